"""
Addresses of the tensors of an engine. A CUDA graph keeps reading the addresses with which it was captured, even after
a reload has moved the tensors.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
import vllm
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .engine_tensors import kernels_in_use


_LEFT_OUT = ("_parameters", "_buffers", "_modules", "kv_cache", "vllm_config")
"""Attributes of a layer that have been visited or are not its own. The last one leads to the whole engine."""

_NOT_OF_A_LAYER = ("vllm.config", "vllm.compilation", "trl_qarl.vllm_plugin.weight_transfer")
"""Modules of classes that belong to the whole engine, although a layer's objects may refer to them."""

_FOREIGN = {*sys.stdlib_module_names, "torch", "transformers"} - {"builtins", "types"}


def reachable_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors to which the layers of a model refer, with a name for each: parameters, buffers, and tensors
    in objects that vLLM keeps for a layer, such as its kernel."""
    for prefix, layer in model.named_modules():
        seen: set[int] = {id(layer)}
        for attribute, value in (layer._parameters | layer._buffers | vars(layer)).items():
            if attribute not in _LEFT_OUT:
                yield from _tensors_in(value, f"{prefix}.{attribute}" if prefix else attribute, seen)


def _tensors_in(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors_in(getattr(value, name), f"{path}.{name}", seen)
        elif value.layout is torch.strided and not (value.is_meta or isinstance(value, FakeTensor)):
            yield path, value
        return
    if id(value) in seen or isinstance(value, (nn.Module, type, str, int, float)):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        parts = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, partial):
        parts = [(path, value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords)]
    elif isinstance(value, MethodType):
        parts = [(f"{path}.__self__", value.__self__)]
    elif isinstance(value, FunctionType):
        parts = [(f"{path}.{name}", item) for name, item in _closed_over(value)]
    else:
        module = type(value).__module__
        if not isinstance(value, SimpleNamespace) and (
            module.partition(".")[0] in _FOREIGN or module.startswith(_NOT_OF_A_LAYER)
        ):
            return
        parts = [(f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    for name, item in parts:
        yield from _tensors_in(item, name, seen)


def _closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # A cell may still be empty.
        with suppress(ValueError):
            yield name, cell.cell_contents


class Addresses:
    """
    Keeps every tensor of [`reachable_tensors`] at its address before the first reload.

    vLLM copies loaded tensors into the memory of a layer's parameters and buffers. A reload allocates other tensors of
    kernels, such as strides, again, and parameters whose `data` is assigned.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        # Views keep the memory allocated.
        self._first = {name: tensor.detach() for name, tensor in reachable_tensors(model) if tensor.numel()}

    # Tensors made in a forward pass can be written to only in this mode.
    @torch.inference_mode()
    def restore(self) -> list[str]:
        """Move tensors back to their first addresses. Return descriptions of tensors that cannot be moved, because
        shape or dtype have changed, or nothing refers to them any more."""
        now = {name: tensor for name, tensor in reachable_tensors(self._model) if tensor.numel()}
        held = {tensor.untyped_storage().data_ptr() for tensor in now.values()}
        problems, placed = [], set()
        for name, first in self._first.items():
            tensor = now.get(name)
            if tensor is None:
                # A view may be gone while its memory still belongs to a parameter.
                if first.untyped_storage().data_ptr() in held:
                    continue
                problems.append(f"{name}: nothing refers to it any more")
            elif tensor.data_ptr() == first.data_ptr():
                continue
            elif _kind(tensor) != _kind(first):
                problems.append(f"{name}: {_described(first)} before, {_described(tensor)} now")
            else:
                # Expanded dimensions have one element in memory.
                once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in first.stride())
                first[once].copy_(tensor[once])
                # One tensor with several names can lie in only one place.
                if id(tensor) not in placed:
                    tensor.data = first
                placed.add(id(tensor))
        return [self._in_words(problem) for problem in problems[:5]]

    def _in_words(self, problem: str) -> str:
        paths = [path for path, _ in self._model.named_modules() if problem.startswith(f"{path}.")]
        layer = self._model.get_submodule(max(paths, key=len, default=""))
        kernels = ", ".join(kernels_in_use(layer))
        runs = f"kernel {kernels}" if kernels else f"layer {type(layer).__name__}"
        return (
            f"{problem}. Reloading the weights has moved it in memory, but the engine's CUDA graphs keep reading the old address "
            f"({runs}, vLLM {vllm.__version__}). Start the engine with enforce_eager=True (`--enforce-eager`)."
        )


def _kind(tensor: torch.Tensor) -> tuple:
    is_expanded = [stride == 0 for stride in tensor.stride()]
    return tensor.shape, tensor.dtype, tensor.device, is_expanded


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
