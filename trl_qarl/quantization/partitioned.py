"""
Masters that DeepSpeed's ZeRO-3 has cut into flat slices, of which each process holds one.

A slice cuts through rows and their groups, so that no process can quantize its own. DeepSpeed gathers the masters of a layer before its
forward and its backward, where they are parameters as in one process: whole, and what takes the gradient. In between a parameter is
empty, and [`gathered`] gathers it, which every process has to call.

What DeepSpeed has cut is known by its attributes, as DeepSpeed is optional.
"""

from typing import Any

import torch


__all__ = ["forget_order", "gathered", "held_part", "is_partitioned", "shape_of"]


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a parameter of which this process holds a slice."""
    return hasattr(tensor, "ds_tensor")


def held_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of `tensor` this process keeps, and an optimizer writes to: its slice, or all of it."""
    return getattr(tensor, "ds_tensor", tensor)


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of all of `tensor`."""
    return getattr(tensor, "ds_shape", tensor.shape)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of `tensor`: itself where it is whole, as in a forward, else what was gathered, which has no gradient."""
    if not is_partitioned(tensor) or tensor.ds_status.name == "AVAILABLE":
        return tensor
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor]):
        # Of the same storage, which DeepSpeed takes away from the parameter.
        return tensor.detach()


def forget_order(engine: Any) -> None:
    """
    Have DeepSpeed's `engine` gather what its next forward and backward ask for, not what the forward before it did in its order: a
    forward for a rollout, for scoring or for a comparison runs other modules than that of the loss.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    coordinator = None if offload is None else offload.get_param_coordinator()
    if coordinator is not None and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
