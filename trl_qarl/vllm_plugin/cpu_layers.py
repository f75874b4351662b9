"""
Norms, rotary embeddings and convolutions of vLLM on a CPU, where its layers are slow, wrong or stop.

**Norms** run vLLM's own kernels, which vLLM calls on GPUs only: on a CPU it computes a norm with seven operations of
torch, which take three to six times as long. An engine of this package names them in `ir_op_priority`; others do not
change.

**Rotations**: vLLM's kernel takes rows of all heads (csrc/cpu/pos_encoding.cpp in 0.31). LFM2 and latent attention
give it `(N, heads, head_dim)`, of which it would rotate the first N heads as if they were N tokens.

**Convolutions**: on CPUs with bf16 instructions vLLM 0.31 packs their weights (`dispatch_cpu_unquantized_gemm` in
`layers/utils.py`) for a kernel that takes bfloat16 and a width of 4, and otherwise stops. Layers of Mamba 2 in
float32, LFM2 with its width of 3, and those of [`trl_qarl.vllm_plugin.cpu_scans`] compute by PyTorch operations, which
need no packed weights.
"""

from functools import wraps
from typing import Any

import torch
from vllm import ir
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from ..bitwise.cpu import has_norm_kernel, rms_norm
from ..wire.protocol import NORMS


def register_norms() -> None:
    """Register with vLLM's operations; calling it again changes nothing."""
    if NORMS in ir.ops.rms_norm.impls:
        return
    ir.ops.rms_norm.register_impl(NORMS, supports_args=_can_norm)(_norm)
    ir.ops.fused_add_rms_norm.register_impl(NORMS, supports_args=_can_add_and_norm, inplace=True)(_add_and_norm)


# vLLM requires the parameters of its operations, by name, and the types of the last two.


def _can_norm(x, weight, epsilon, variance_size=None) -> bool:
    return weight is not None and x.dtype is weight.dtype and variance_size is None and has_norm_kernel(weight)


def _can_add_and_norm(x, x_residual, weight, epsilon, variance_size=None) -> bool:
    return _can_norm(x, weight, epsilon, variance_size)


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    return rms_norm(x, weight, epsilon)


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


def register_rotations() -> None:
    """Have vLLM call its kernel with rows of all heads; calling it again changes nothing."""
    forward = RotaryEmbedding.forward_cpu
    if hasattr(forward, "__wrapped__"):
        return

    @wraps(forward)
    def forward_cpu(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        given = [query, key]
        rows = [None if each is None else each.reshape(len(each), -1) for each in given]
        rotated = forward(self, positions, *rows)
        return tuple(new if old is None else new.view_as(old) for old, new in zip(given, rotated, strict=True))

    RotaryEmbedding.forward_cpu = forward_cpu


def register_convolutions() -> None:
    """Have vLLM leave the weights that its kernel cannot take; calling it again changes nothing."""
    dispatch = utils.dispatch_cpu_unquantized_gemm
    if hasattr(dispatch, "leaves_convolutions"):
        return

    @wraps(dispatch)
    def dispatch_others(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        is_convolution = weight.ndim == 3 and weight.shape[1] == 1
        is_packed = weight.dtype is torch.bfloat16 and weight.shape[2:] == (4,)
        if not is_convolution or (is_packed and not hasattr(layer, "is_read_as_loaded")):
            dispatch(layer, remove_weight)

    dispatch_others.leaves_convolutions = True  # pyrefly: ignore[missing-attribute]
    utils.dispatch_cpu_unquantized_gemm = dispatch_others
