"""
How a process holds a parameter, all of it or a part while other processes hold the rest; shape, value and version of
either.

[`storage_of`] finds the [`Storage`] of a tensor. The two that hold parts are in [`trl_qarl.sharding`], which adds them
to [`BACKENDS`]; nothing else names a backend.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdRef


__all__ = [
    "BACKENDS",
    "MADE_IN_INFERENCE_MODE",
    "Storage",
    "is_sharded",
    "num_elements",
    "refresh",
    "shapes_of",
    "storage_of",
    "weight_version",
    "whole",
    "writes_to",
]


class Storage:
    """A parameter that this process holds whole. A backend overrides what differs for one that it has sharded."""

    is_whole = True

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is stored so."""
        return True

    def is_of(self, model: nn.Module) -> bool:
        """Return whether parameters of `model` are stored so, but for what is gathered now."""
        return any(map(self.has, model.parameters()))

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Return the shape of all of `tensor`."""
        return tensor.shape

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of `tensor` that this process keeps, and an optimizer writes to."""
        return tensor

    @contextmanager
    def holding(self, tensor: torch.Tensor, local: torch.Tensor) -> Iterator[None]:
        """While open, this process' part of `tensor` has the values of `local`; this does not count as a write."""
        held = tensor.data
        # Not copied into the tensor: what is kept of its value is kept for its storage, and must find that again.
        tensor.data = local
        try:
            yield
        finally:
            tensor.data = held

    def rows(self, tensor: torch.Tensor) -> range:
        """Return which rows `(..., K)` of all of `tensor`, those of experts in one count, this process quantizes."""
        return range(self.shape(tensor)[:-1].numel())

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows, in high precision: the tensor itself, with gradients, where that has them."""
        return tensor

    def whole(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return all of `tensor`, in `dtype` if given; every process has to call."""
        value = self.value(tensor)
        return value if dtype is None else value.to(dtype)

    def whole_low_bit(self, weight: Any) -> torch.Tensor:
        """Return the low-bit form of all of a [`QuantizedWeight`]; every process has to call."""
        return weight.low_bit_weight()

    def refresh(self, model: nn.Module) -> None:
        """Drop what is kept of what was gathered for the last forward of `model`."""


_WHOLE = Storage()
BACKENDS: list[Storage] = []
"""The storages of parts."""


def storage_of(tensor: torch.Tensor) -> Storage:
    """Return how this process holds `tensor`."""
    return next((backend for backend in BACKENDS if backend.has(tensor)), _WHOLE)


def is_sharded(model: nn.Module) -> bool:
    """Return whether this process holds only a part of a model."""
    return any(backend.is_of(model) for backend in BACKENDS)


def whole(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return all of a tensor, in `dtype` if given; of a sharded one every process has to call."""
    return storage_of(tensor).whole(tensor, dtype)


def refresh(model: nn.Module) -> None:
    """Have the next forward of a sharded model gather anew: it may keep what it gathered for the last one."""
    for backend in BACKENDS:
        backend.refresh(model)


MADE_IN_INFERENCE_MODE = (
    "The weight was made inside `torch.inference_mode()`, where PyTorch does not count updates, so a changed weight could "
    "not be told from the one that was quantized. Make or load the model outside of it; `torch.no_grad()` does as well."
)


def shapes_of(module: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a module's own parameters by name, of sharded ones those of all of them."""
    return {name: storage_of(p).shape(p) for name, p in module.named_parameters(recurse=False)}


def num_elements(parameters: Iterable[torch.Tensor]) -> int:
    """Return how many numbers parameters have, sharded ones counted whole."""
    return sum(storage_of(parameter).shape(parameter).numel() for parameter in parameters)


def writes_to(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return numbers of which one changes when the parameter, or this process' part, is written to or replaced."""
    local = storage_of(parameter).local(parameter)
    return parameter._version, local._version, local.data_ptr()


# Fused and 8-bit optimizers write to parameters without raising their version, so each step of any optimizer counts.
_num_optimizer_steps = 0


# A tracer cannot follow weak references.
@torch.compiler.disable
def weight_version(weight: torch.Tensor) -> tuple[Any, ...] | None:
    """
    Equal for two calls if the tensor and the number of writes to it are; `None`, equal to nothing, for one that is not
    kept.

    Addresses are not an identity: a new tensor may lie where an old one was. As long as a weak reference to a storage
    exists, no other storage compares equal to it.
    """
    if weight.is_inference():
        if isinstance(weight, nn.Parameter):
            raise ValueError(MADE_IN_INFERENCE_MODE)
        return None
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


def _count_optimizer_step(*args, **kwargs):
    global _num_optimizer_steps
    _num_optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)
