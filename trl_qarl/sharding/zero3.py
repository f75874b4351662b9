"""
Masters sharded by DeepSpeed's ZeRO-3 into one flat slice per process, and the settings of DeepSpeed that all stages
need.

A slice cuts through rows and groups, so a process cannot quantize its slice. DeepSpeed gathers the masters of a layer
before its forward and its backward, where they are whole parameters that take the gradient, as in one process.
Otherwise a parameter is empty, and [`Slices.whole`] gathers it, which every process has to call.

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


logger = logging.getLogger(__name__)


class Slices(Storage):
    """Storage of a parameter of which this process holds a slice."""

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
        """Return the whole parameter: itself while it is gathered, else a gathered copy without gradient."""
        if tensor.ds_status.name == "AVAILABLE":
            return tensor
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            # Keeps the storage, which DeepSpeed takes away from the parameter.
            return tensor.detach()


BACKENDS.append(Slices())


def _put(tensor: Any, local: torch.Tensor) -> None:
    """Make `local` this process' slice, also if DeepSpeed keeps a small parameter whole."""
    is_whole = tensor.ds_status.name == "AVAILABLE"
    if is_whole:
        tensor.partition()
    tensor.ds_tensor.data = local
    if is_whole:
        tensor.all_gather()


def forget_order(engine: Any) -> None:
    """Have DeepSpeed's `engine` gather by demand in its next forward and backward instead of in the recorded order of
    the last forward: rollout, scoring, comparison and loss run different modules."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    coordinator = None if offload is None else offload.get_param_coordinator()
    if coordinator is not None and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def keep_float32_masters(config: dict[str, Any]) -> None:
    """Have DeepSpeed leave the model in float32 despite accelerate's `mixed_precision`, and step with `optim`, which
    accelerate would replace by DeepSpeed's Adam if the state is offloaded."""
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    if config.get("bf16", {}).get("enabled"):
        logger.info("DeepSpeed leaves masters in float32, and the forward computes in bfloat16 under autocast.")
        config["bf16"] = {"enabled": False}


def compute_in_bfloat16(model: nn.Module) -> None:
    """Have the model's forward compute under autocast and return float32, like accelerate with DDP."""
    # PEFT's `generate` bypasses the forward of the adapted model.
    model = base_model(model)
    device = next(model.parameters()).device
    model.forward = convert_outputs_to_fp32(torch.autocast(device.type, torch.bfloat16)(model.forward))
