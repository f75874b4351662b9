"""
Product of a mixture's experts, shared by learner and engines.

For a token `x` with the experts `e_1 ... e_k` and their weights `w_1 ... w_k`:

    gate, up = x @ gate_up[e].T         rounded to the dtype of `x`, like a linear layer of an engine
    y_e = (silu(gate) * up) @ down[e].T
    out = w_1 y_1 + ... + w_k y_k       float32, in this order, each product and sum rounded by itself; rounded
                                        once to the dtype

Each expert multiplies the tokens routed to it in one product. If the rows of that product are independent, no token's
result depends on other tokens.

[`grouped_experts`] multiplies all experts of a layer in one product, for fast numerics on GPUs. Its numbers are those
of one product per expert up to the order of summation, so engine numerics do not use it. Schemes with activations in
8 bits do not use it either: `scaled_grouped_mm` exists only on GPUs and takes scales in another layout.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .schemes import QuantScheme
from .tensors import LowBitTensor


def experts_product(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Sequence[Any],
    down: Sequence[Any],
    linear: Callable[[torch.Tensor, Any], torch.Tensor],
    activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
) -> torch.Tensor:
    """
    Return the output of the experts for tokens `x`, `(T, H)` in the compute dtype, in the same dtype, with the
    gradients of `linear`; zeros for a token without experts.

    - `ids`: experts `(T, k)` of each token, integers; the number of experts stands for a slot to skip.
    - `weights`: their weights `(T, k)`, converted to float32.
    - `gate_up`: operand of `linear` for each expert, with the rows of the gate before those of the up projection,
      `(2 I, H)`; `down` the same for the down projection, `(H, I)`.
    - `linear`: multiplies rows `(M, K)` by an operand and returns `(M, N)` in the dtype of the rows.
    - `activation`: applied to the gate.
    """

    def one_by_one(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        results = []
        for expert, tokens in enumerate(rows.split(counts)):
            if counts[expert]:
                gate, up = linear(tokens, gate_up[expert]).chunk(2, dim=-1)
                results.append(linear(activation(gate) * up, down[expert]))
        return torch.cat(results)

    return routed(x, ids, weights, len(gate_up), one_by_one)


def routed(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    product: Callable[[torch.Tensor, list[int]], torch.Tensor],
) -> torch.Tensor:
    """
    Return the result of [`experts_product`] with another `product`. It takes the rows `(S, H)` of all tokens, sorted
    by expert, and the number of rows of each of the `num_experts`, and returns their outputs `(S, H)`. It is not
    called without rows.
    """
    num_tokens, topk = ids.shape
    slots = ids.reshape(-1).long()
    order = torch.argsort(slots, stable=True)
    counts = torch.bincount(slots, minlength=num_experts + 1)[:num_experts].tolist()
    order = order[: sum(counts)]
    if not len(order):
        return torch.zeros_like(x)
    y = product(x.index_select(0, order // topk), counts)
    of_slots = x.new_zeros(slots.shape[0], x.shape[1]).index_copy(0, order, y)
    parts = of_slots.view(num_tokens, topk, -1).unbind(1)
    products = (part.float() * weight for part, weight in zip(parts, weights.float().split(1, 1), strict=True))
    return reduce(torch.add, products).to(x.dtype)


_Operand = tuple[LowBitTensor, torch.Tensor | None]


def is_grouping_faster(
    x: torch.Tensor, num_rows: int, num_experts: int, sizes: tuple[int, int], scheme: QuantScheme
) -> bool:
    """Return whether a grouped product is possible and faster than one product per expert, for tokens `x` in the
    compute dtype with `num_rows` rows of all experts together; `sizes` are the hidden and the intermediate size."""
    return (
        scheme.activation is None
        # On CPUs torch also multiplies expert by expert, after expanding all weights.
        and x.device.type == "cuda"
        and x.dtype is torch.bfloat16
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        # torch needs rows of multiples of 16 bytes.
        and all(size % 8 == 0 for size in sizes)
        # With fewer rows most experts are idle, and their weights would be expanded.
        and num_rows >= num_experts
    )


def grouped_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    gate_up: _Operand,
    down: _Operand,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the result of [`experts_product`] with gradients to masters. `gate_up` is a low-bit weight `(E * 2 I, H)`
    and the master `(E, 2 I, H)` if it takes a gradient; `down` has shapes `(E * H, I)` and `(E, H, I)`."""

    def product(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ends = torch.tensor(counts, device=x.device).cumsum(0, dtype=torch.int32)
        idle = [expert for expert, count in enumerate(counts) if not count]
        gate, up = _GroupedLinear.apply(rows, *gate_up, ends, idle).chunk(2, dim=-1)
        return _GroupedLinear.apply(activation(gate) * up, *down, ends, idle)

    return routed(x, ids, weights, num_experts, product)


class _GroupedLinear(torch.autograd.Function):
    """Low-bit products forward, high-precision straight-through backward."""

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
            # torch leaves a group without rows undefined.
            grad_master[ctx.idle] = 0
        return grad_rows, None, grad_master, None, None


def _expanded(low_bit: LowBitTensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    # Autocast does not apply to the product: both operands need the dtype of the rows.
    return low_bit.dequantize(rows.dtype).unflatten(0, (len(ends), -1))
