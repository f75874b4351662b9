"""
Routing and unquantized experts with the arithmetic of vLLM on a CPU, and with gradients.

    values, ids = the k largest of the router's logits, in the order in which `topk` finds them
    weights     = softmax of the values                          in the dtype of the logits
    y[k]        = (silu(x @ gate[ids[k]].T) * (x @ up[ids[k]].T)) @ down[ids[k]].T
    out         = weights[0] * y[0] + weights[1] * y[1] + ...    in float32, in the order of `ids`, rounded once

Experts with low-bit weights use [`~trl_qarl.quantization.experts.experts_product`] on both sides.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..quantization.experts import experts_product, gated
from ..quantization.gemm import has_fast_bf16, linear_in_blocks
from . import cpu as kernels


EXPERT_FEATURES = 32
"""Divisor of hidden and intermediate sizes that vLLM's product of unquantized experts requires."""


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights, `(T, k)` float32 with gradients to `logits`, and the experts, `(T, k)` int64, of each token,
    like vLLM's `CPURouter` (`_softmax_topk`). `logits` are `(T, E)` in the engine's dtype, in which weights are
    computed. The weights of a token sum to 1 with `renormalize`; else all experts' weights sum to 1."""
    values, ids = torch.topk(logits, k=top_k, dim=-1, sorted=False)
    if renormalize:
        weights = torch.softmax(values, dim=-1)
    else:
        weights = (values - torch.logsumexp(logits, dim=-1, keepdim=True)).exp()
    return weights.float(), ids


class PackedExperts:
    """Product of unquantized experts with the same bits for a token in any batch. `gate_up`, `(E, 2 I, H)` bfloat16,
    has the rows of the gate before those of `up`; `down` is `(E, H, I)`. Both are copied."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor):
        self._is_engine = kernels.has_engine_kernels()
        if not self._is_engine:
            dtype = torch.bfloat16 if has_fast_bf16() else torch.float32
            self._weights = [weight.to(dtype) for weight in (gate_up, down)]
            return
        import vllm._custom_ops as ops

        self._isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
        self._weights = [ops.cpu_prepack_moe_weight(weight.contiguous(), self._isa) for weight in (gate_up, down)]

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the output, `(T, H)` bfloat16, for `x`, `(T, H)` bfloat16, and `(T, k)` from [`route`]."""
        if not self._is_engine:

            def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                return linear_in_blocks(x.to(weight.dtype), weight).to(x.dtype)

            return experts_product(x, ids, weights, *self._weights, linear, gated(F.silu))
        import vllm._custom_ops as ops

        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        routing = weights.float().contiguous(), ids.int().contiguous()
        ops.cpu_fused_moe(out, x.contiguous(), *self._weights, None, None, *routing, "silu", self._isa, False)
        return out


def experts(x, ids, weights, gate_up, down, product) -> torch.Tensor:
    """Return the output `(T, H)` of unquantized experts through `product`, made of the rounded matrices, with
    gradients to `x`, `(T, H)` in the engine's dtype, `weights`, `(T, k)` float32, and the masters `(E, 2 I, H)` and
    `(E, H, I)`, which are 0 for experts without a token."""
    return _Experts.apply(x, ids, weights, gate_up, down, product)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, weights, gate_up, down, product):
        ctx.save_for_backward(x, ids, weights, gate_up, down)
        return product(x, ids, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, ids, weights, gate_up, down = ctx.saved_tensors
        num_experts, top_k = len(down), ids.shape[1]
        slots = ids.flatten()
        order, counts = slots.argsort(stable=True), slots.bincount(minlength=num_experts).tolist()
        grad_x = torch.zeros_like(x, dtype=torch.float32)
        grad_weights = torch.zeros_like(weights).flatten()
        grads = [torch.zeros_like(w) if ctx.needs_input_grad[3 + i] else None for i, w in enumerate((gate_up, down))]
        # One expert at a time, so that only its weights are held in rounded form.
        for expert, part in enumerate(order.split(counts)):
            if not len(part):
                continue
            tokens, w_in, w_out = part // top_k, gate_up[expert].to(x.dtype), down[expert].to(x.dtype)
            rows, upstream, weight = x[tokens], grad[tokens], weights.flatten()[part, None]
            gate, up = (rows @ w_in.t()).float().chunk(2, dim=-1)
            hidden = F.silu(gate) * up
            grad_hidden = (upstream @ w_out).float()
            grad_weights[part] = (grad_hidden * hidden).sum(dim=-1)
            if grads[1] is not None:
                grads[1][expert] = (upstream * weight).to(x.dtype).t() @ hidden.to(x.dtype)
            grad_hidden *= weight
            grad_gate = torch.ops.aten.silu_backward(grad_hidden * up, gate)
            inner = torch.cat([grad_gate, grad_hidden * F.silu(gate)], dim=-1).to(x.dtype)
            if grads[0] is not None:
                grads[0][expert] = inner.t() @ rows
            grad_x.index_add_(0, tokens, (inner @ w_in).float())
        return grad_x.to(x.dtype), None, grad_weights.view_as(weights), *grads, None
