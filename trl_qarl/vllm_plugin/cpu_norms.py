"""
RMSNorm of an engine on a CPU by vLLM's own kernels, which vLLM calls on GPUs only: on a CPU it computes a norm with
seven operations of torch, which take three to six times as long.

An engine of this package names the implementations here in `ir_op_priority`; others do not change.
"""

import torch
from vllm import ir

from ..bitwise.cpu import has_norm_kernel, rms_norm
from ..wire.protocol import NORMS


def register_norms() -> None:
    """Register with vLLM's operations; calling it again changes nothing."""
    if NORMS in ir.ops.rms_norm.impls:
        return
    ir.ops.rms_norm.register_impl(NORMS, supports_args=_can_norm)(_norm)
    ir.ops.fused_add_rms_norm.register_impl(NORMS, supports_args=_can_add_and_norm, inplace=True)(_add_and_norm)


# vLLM requires the parameters of its operations, by name.


def _can_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return weight is not None and x.dtype is weight.dtype and variance_size is None and has_norm_kernel(weight)


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    return rms_norm(x, weight, epsilon)


def _can_add_and_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _can_norm(x, weight, epsilon, variance_size)


def _add_and_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, x_residual = x.contiguous(), x_residual.contiguous()
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
