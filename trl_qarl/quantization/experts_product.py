"""
The product of a mixture's experts, which learner and engines share.

For a token `x` with the experts `e_1 ... e_k` and their weights `w_1 ... w_k`:

    gate, up = x @ gate_up[e].T         rounded to the dtype of `x`, as a linear layer of an engine does
    y_e = (silu(gate) * up) @ down[e].T
    out = w_1 y_1 + ... + w_k y_k       float32, in this order, each product and sum rounded by itself; rounded
                                        once to the dtype

Each expert multiplies the tokens routed to it in one product, so with a product whose rows do not depend on each other
no token's result depends on what else is computed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F


__all__ = ["experts_product", "routed"]


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
    Return what the experts give for tokens `x`, `(T, H)` in the compute dtype, in its dtype; zeros for a token without
    experts; with gradients where `linear` has them.

    `ids` has the experts `(T, k)` of each token, integers, of which the number of experts stands for a slot to skip;
    `weights` their weights `(T, k)`, converted to float32. `gate_up` has for each expert what `linear` takes for the
    rows of its gate, then of its up projection, `(2 I, H)`; `down` the same for the down projection, `(H, I)`.
    `linear` takes rows `(M, K)` and an expert's weight and returns `(M, N)` in the dtype of the rows; `activation` is
    applied to the gate.
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
    Return what [`experts_product`] does, given what multiplies: `product` takes the rows of all tokens and experts,
    `(S, H)`, those of one expert after those of the one before, and how many each of the `num_experts` has, and
    returns their outputs `(S, H)`. It is not called without rows.
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
    return _weighted_sum(of_slots.view(num_tokens, topk, -1), weights.float()).to(x.dtype)


def _weighted_sum(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`(T, H)` float32 of `y`, `(T, k, H)`, and `weights`, `(T, k)` float32."""
    total = y[:, 0].float() * weights[:, :1]
    for slot in range(1, y.shape[1]):
        total = total + y[:, slot].float() * weights[:, slot : slot + 1]
    return total
