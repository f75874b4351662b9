"""
Masters that DeepSpeed's ZeRO-3 has cut into flat slices, of which each process holds one, and the settings of
DeepSpeed that all stages need.

A slice cuts through rows and their groups, so that no process can quantize its own. DeepSpeed gathers the masters of a
layer before its forward and its backward, where they are parameters as in one process: whole, and what takes the
gradient. In between a parameter is empty, and [`Slices.whole`] gathers it, which every process has to call.

Partitioned parameters are detected by their attributes, because DeepSpeed is optional.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from typing_extensions import override

from ..quantization.names import base_model
from ..quantization.storage import BACKENDS, Storage


__all__ = ["Slices", "compute_in_bfloat16", "forget_order", "keep_float32_masters"]

logger = logging.getLogger(__name__)


class Slices(Storage):
    """A parameter of which this process holds a slice."""

    is_whole = False

    @override
    def has(self, tensor: torch.Tensor) -> bool:
        return hasattr(tensor, "ds_tensor")

    @override
    def shape(self, tensor: torch.Tensor) -> torch.Size:
        return tensor.ds_shape

    @override
    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.ds_tensor

    @override
    @contextmanager
    def holding(self, tensor: torch.Tensor, local: torch.Tensor) -> Iterator[None]:
        held = tensor.ds_tensor.data
        _put(tensor, local)
        try:
            yield
        finally:
            _put(tensor, held)

    @override
    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of `tensor`: itself where it is whole, as in a forward, else what was gathered, without a gradient."""
        if tensor.ds_status.name == "AVAILABLE":
            return tensor
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            # Of the same storage, which DeepSpeed takes away from the parameter.
            return tensor.detach()


BACKENDS.append(Slices())


def _put(tensor: Any, local: torch.Tensor) -> None:
    """Have `local` be this process' slice, also where DeepSpeed keeps the whole parameter, as it does small ones."""
    is_whole = tensor.ds_status.name == "AVAILABLE"
    if is_whole:
        tensor.partition()
    tensor.ds_tensor.data = local
    if is_whole:
        tensor.all_gather()


def forget_order(engine: Any) -> None:
    """Have DeepSpeed's `engine` gather what its next forward and backward ask for, not what the forward before it did
    in its order: that of a rollout, of scoring or of a comparison runs other modules than that of the loss."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    coordinator = None if offload is None else offload.get_param_coordinator()
    if coordinator is not None and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def keep_float32_masters(config: dict[str, Any]) -> None:
    """Have DeepSpeed leave the model in float32, whatever accelerate has made of `mixed_precision` in its
    configuration, and step with `optim`: with an offloaded state accelerate would substitute DeepSpeed's own Adam."""
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    if config.get("bf16", {}).get("enabled"):
        logger.info("DeepSpeed leaves masters in float32, and the forward computes in bfloat16 under autocast.")
        config["bf16"] = {"enabled": False}


def compute_in_bfloat16(model: nn.Module) -> None:
    """Have the model's forward compute under autocast and return float32, as accelerate does with DDP."""
    # PEFT's `generate` bypasses the forward of the adapted model.
    model = base_model(model)
    device = next(model.parameters()).device
    model.forward = convert_outputs_to_fp32(torch.autocast(device.type, torch.bfloat16)(model.forward))
