"""
Storage of a parameter, whole in this process or sharded over several: its shape, value and version.

[`storage_of`] finds the [`Storage`] of a tensor. [`trl_qarl.sharding`] adds its two sharded storages to [`BACKENDS`];
no other module names a backend.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdRef


class Storage:
    """Storage of a parameter that this process holds whole; backends override it for sharded parameters."""

    is_whole = True

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` has this storage."""
        return True

    def is_of(self, model: nn.Module) -> bool:
        """Return whether parameters of `model` have this storage, except for parameters that are gathered now."""
        return any(map(self.has, model.parameters()))

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Return the shape of the whole parameter."""
        return tensor.shape

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of `tensor` that this process keeps and an optimizer writes to."""
        return tensor

    def like(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape of the whole `tensor` of which this process has the part `local`."""
        return local

    def device(self, tensor: torch.Tensor) -> torch.device:
        """Return the device that computes with the parameter, also if it is kept in host memory."""
        return tensor.device

    @contextmanager
    def holding(self, tensor: torch.Tensor, local: torch.Tensor) -> Iterator[None]:
        """While open, this process' part of `tensor` has the values of `local`; this does not count as a write."""
        held = tensor.data
        # Replaced, not copied: caches identify a value by its memory, and must find it again afterwards.
        tensor.data = local
        try:
            yield
        finally:
            tensor.data = held

    def rows(self, tensor: torch.Tensor) -> range:
        """Return the rows of the whole parameter that this process quantizes, counted through all stacked experts."""
        return range(self.shape(tensor)[:-1].numel())

    def beside(self, tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return `part`, made of `tensor`, in the kind of memory in which this process keeps `tensor`."""
        return part

    def num_copies(self, tensor: torch.Tensor) -> int:
        """Return the number of processes that hold the same part of a sharded parameter."""
        return 1

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows in high precision, with gradients; the tensor itself if it consists of them."""
        return tensor

    def gathered(self, tensor: torch.Tensor, part: torch.Tensor, to_main: bool) -> torch.Tensor:
        """Return the rows of all processes, of which `part` are those that this process quantizes of `tensor`, on the
        computing device; every process has to call. With `to_main` the other processes may get a tensor without
        values, on the meta device."""
        return part

    def refresh(self, model: nn.Module) -> None:
        """Drop parameters that stay gathered after the last forward of `model`."""

    def keep_gradients_in(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Have autograd keep the gradients of `model` in `dtype`, `None` for any."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = dtype


_WHOLE = Storage()
BACKENDS: list[Storage] = []
"""
Storages of sharded parameters. The modules of [`trl_qarl.sharding`] add theirs when they are imported: no call
precedes every sharded model, because accelerate, DeepSpeed's `zero.Init` and a user's own code shard models too.
"""


def storage_of(tensor: torch.Tensor) -> Storage:
    """Return the storage of `tensor`."""
    return next((backend for backend in BACKENDS if backend.has(tensor)), _WHOLE)


def is_sharded(model: nn.Module) -> bool:
    """Return whether this process holds only a part of a model."""
    return any(backend.is_of(model) for backend in BACKENDS)


def device_of(model: nn.Module) -> torch.device:
    """Return the device that computes with `model`, also if its parameters are kept in host memory."""
    parameter = next(model.parameters())
    return storage_of(parameter).device(parameter)


def whole(tensor: torch.Tensor, dtype: torch.dtype | None = None, to_main: bool = False) -> torch.Tensor:
    """Return the whole tensor, in `dtype` if given; if it is sharded, as [`~Storage.gathered`] does."""
    storage = storage_of(tensor)
    value = storage.value(tensor)
    # Converted first, because 16 bits are cheaper to move and to gather.
    return storage.gathered(tensor, value if dtype is None else value.to(dtype), to_main)


def refresh(model: nn.Module) -> None:
    """Have the next forward of a sharded model gather again: parameters may stay gathered after the last one."""
    for backend in BACKENDS:
        backend.refresh(model)


def keep_gradients_in(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Keep the gradients of `model` in `dtype`, `None` for any, with any storage of its parameters."""
    next((backend for backend in BACKENDS if backend.is_of(model)), _WHOLE).keep_gradients_in(model, dtype)


MADE_IN_INFERENCE_MODE = (
    "The weight was made inside `torch.inference_mode()`, where PyTorch does not count updates, so changes to the weight "
    "would go unnoticed. Make or load the model outside of it; use `torch.no_grad()` instead."
)


def shapes_of(module: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a module's own parameters by name, sharded ones counted whole."""
    return {name: storage_of(p).shape(p) for name, p in module.named_parameters(recurse=False)}


def num_elements(parameters: Iterable[torch.Tensor]) -> int:
    """Return the number of elements of parameters, sharded ones counted whole."""
    return sum(storage_of(parameter).shape(parameter).numel() for parameter in parameters)


def writes_to(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return numbers that change when the parameter, or this process' part, is written to or replaced."""
    local = storage_of(parameter).local(parameter)
    return parameter._version, local._version, local.data_ptr()


_num_optimizer_steps = 0


@lru_cache(maxsize=1)
def _count_optimizer_steps() -> None:
    """Count every optimizer step as a write: fused and 8-bit optimizers do not raise the version of parameters."""

    def count(*args, **kwargs):
        global _num_optimizer_steps
        _num_optimizer_steps += 1

    register_optimizer_step_post_hook(count)


# A tracer cannot follow weak references.
@torch.compiler.disable
def weight_version(weight: torch.Tensor) -> tuple[Any, ...] | None:
    """
    Return a value that is equal for two calls if the tensor and the number of writes to it are; `None`, equal to
    nothing, for an inference tensor.

    A new tensor may have the address of an old one. A weak reference to a storage equals no other storage as long as
    the reference exists.
    """
    if weight.is_inference():
        if isinstance(weight, nn.Parameter):
            raise ValueError(MADE_IN_INFERENCE_MODE)
        return None
    _count_optimizer_steps()
    held = storage_of(weight).local(weight)
    return (
        WeakIdRef(weight),
        StorageWeakRef(held.untyped_storage()),
        held.storage_offset(),
        held.stride(),
        held._version,
        weight._version,
        weight.dtype,
        _num_optimizer_steps,
    )
