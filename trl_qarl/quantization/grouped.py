"""
One product for all experts of a layer: that of fast numerics on GPUs.

Rows are sorted by expert, and `torch.nn.functional.grouped_mm` multiplies each group of rows `G_e` by its expert's
matrix:

    y[G_e]      = x[G_e] @ w'[e].T
    grad x[G_e] = grad y[G_e] @ w'[e]
    grad w[e]   = grad y[G_e].T @ x[G_e]     straight through to the master; 0 for an expert without rows

`w'` are the low-bit weights of all experts, expanded to the dtype of `x` at each use. Up to the order of summation the
numbers are those of one product per expert, which engine numerics keep, whose bits these are not, as do schemes with
activations in 8 bits: `scaled_grouped_mm` exists only on GPUs and wants scales in another layout.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .experts_product import routed
from .schemes import QuantScheme
from .tensors import LowBitTensor


__all__ = ["grouped_experts", "reason_against_grouping"]

_Operand = tuple[LowBitTensor, torch.Tensor | None]


def reason_against_grouping(
    x: torch.Tensor, num_rows: int, num_experts: int, sizes: tuple[int, int], scheme: QuantScheme
) -> str | None:
    """Return why experts are multiplied one by one, or `None` where a grouped product can be had and pays: of tokens
    `x` in the compute dtype, with `num_rows` rows of all experts together, and experts of a hidden and an intermediate
    size."""
    if scheme.activation is not None:
        return "activations are quantized"
    if x.device.type != "cuda":
        return "on CPUs torch multiplies expert by expert too, after all weights were expanded"
    if x.dtype is not torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (8, 0):
        return "torch has it for bfloat16, from compute capability 8.0"
    if any(size % 8 for size in sizes):
        return "torch wants rows of multiples of 16 bytes"
    if num_rows < num_experts:
        return "most experts are idle, and their weights would be expanded"
    return None


def grouped_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    gate_up: _Operand,
    down: _Operand,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """
    Return what [`~trl_qarl.quantization.experts_product.experts_product`] does, with gradients to masters. `gate_up`
    is a low-bit weight `(E * 2 I, H)` and the master `(E, 2 I, H)` if it takes a gradient; `down` the same of
    `(E * H, I)` and `(E, H, I)`.
    """

    def product(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ends = torch.tensor(counts, device=x.device).cumsum(0, dtype=torch.int32)
        idle = [expert for expert, count in enumerate(counts) if not count]
        gate, up = _GroupedLinear.apply(rows, *gate_up, ends, idle).chunk(2, dim=-1)
        return _GroupedLinear.apply(activation(gate) * up, *down, ends, idle)

    return routed(x, ids, weights, num_experts, product)


class _GroupedLinear(torch.autograd.Function):
    """Low-bit products forward, high-precision straight-through backward, as for a linear layer."""

    @staticmethod
    def forward(ctx, rows, low_bit, master, ends, idle):
        ctx.low_bit, ctx.ends, ctx.idle = low_bit, ends, idle
        ctx.master_dtype = None if master is None else master.dtype
        ctx.save_for_backward(*([rows] if ctx.needs_input_grad[2] else ()))
        return F.grouped_mm(rows, _expanded(low_bit, rows, ends).mT, offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_rows = grad_master = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            grad_rows = F.grouped_mm(grad, _expanded(ctx.low_bit, grad, ctx.ends), offs=ctx.ends)
        if ctx.needs_input_grad[2]:
            grad_master = F.grouped_mm(grad.t(), ctx.saved_tensors[0], offs=ctx.ends).to(ctx.master_dtype)
            # torch does not say what is left in a group without rows.
            grad_master[ctx.idle] = 0
        return grad_rows, None, grad_master, None, None


def _expanded(low_bit: LowBitTensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    # The product is not under autocast: both operands have the dtype of the rows.
    return low_bit.dequantize(rows.dtype).unflatten(0, (len(ends), -1))
