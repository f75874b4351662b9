"""
Shape and version of a parameter, of which this process may hold a part: who asks here need not know that.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdRef

from .storage import storage_of


__all__ = ["MADE_IN_INFERENCE_MODE", "num_elements", "shapes_of", "weight_version", "writes_to"]

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
    """Return numbers of which one changes when the parameter, or this process' part of it, is written to or
    replaced."""
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
