"""
Experts of a mixture with a forward on the low-bit form of their matrices and a backward to their stacked masters, and
the product of a mixture's experts that learner and engines share.

transformers keeps the matrices of a layer's `E` experts in two parameters: `gate_up_proj`, `(E, 2 I, H)`, with the `I`
rows of an expert's gate before those of its up projection, and `down_proj`, `(E, H, I)`. Every row has its own scales,
so each parameter is quantized like one matrix of `E * N` rows, and an expert's tensors are views of it. An expert
without tokens gets a gradient of zeros.

For a token `x` with the experts `e_1 ... e_k` and their weights `w_1 ... w_k`:

    gate, up = x @ gate_up[e].T         rounded to the dtype of `x`, like a linear layer of an engine
    y_e = (silu(gate) * up) @ down[e].T
    out = w_1 y_1 + ... + w_k y_k       float32, in this order, each product and sum rounded by itself; rounded
                                        once to the dtype

Each expert multiplies the tokens routed to it in one product. If the rows of that product are independent, no token's
result depends on other tokens.

[`grouped_experts`] multiplies all experts of a layer in one product, for fast numerics on GPUs. Rows are sorted by
expert, and `torch.nn.functional.grouped_mm` multiplies each group of rows `G_e` by its expert's matrix:

    y[G_e]      = x[G_e] @ w'[e].T
    grad x[G_e] = grad y[G_e] @ w'[e]
    grad w[e]   = grad y[G_e].T @ x[G_e]     straight through to the master; 0 for an expert without rows

`w'` are the low-bit weights of all experts, expanded to the dtype of `x` at each use. The numbers are those of one
product per expert up to the order of summation, so engine numerics do not use it. Schemes with activations in 8 bits
do not use it either: `scaled_grouped_mm` exists only on GPUs and takes scales in another layout.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from .formats.registry import format_of
from .gemm import GROUPED, expanded_name, low_bit_linear
from .schemes import QuantScheme, get_scheme
from .storage import shapes_of
from .tensors import LowBitTensor, straight_through_linear
from .weight import OWN_ATTRIBUTES, QuantizedLayer, QuantizedWeight, check_can_be_quantized, sharing_state


GATE_UP, DOWN = "gate_up_proj", "down_proj"


class QuantizedExperts(QuantizedLayer):
    """
    The experts of a layer with a quantized forward and a straight-through gradient to their masters.

    Made by [`~QuantizedExperts.from_experts`]. The experts' implementation in the model's configuration has no effect.
    Caches work as in [`~trl_qarl.quantization.linear.QuantizedLinear`]. `num_experts` is also the index of a slot to
    skip, and `experts_class` the class of the module it was made from.
    """

    num_experts: int
    act_fn: nn.Module
    experts_class: type[nn.Module]

    @classmethod
    def from_experts(
        cls, experts: nn.Module, scheme: QuantScheme, scale_dtype: torch.dtype | None = None
    ) -> "QuantizedExperts":
        """Make a `QuantizedExperts` that replaces `experts`, one of transformers' modules of experts; arguments and
        errors are those of `QuantizedLinear.from_linear`. Another layout raises `TypeError`."""
        if problem := problem_of_experts(experts):
            raise TypeError(f"{type(experts).__name__} cannot be quantized: {problem}.")
        check_can_be_quantized(experts, [GATE_UP, DOWN], scheme)
        layer = sharing_state(cls, experts)
        layer._quantize([GATE_UP, DOWN], *experts_format(experts, scheme), scale_dtype)
        layer.experts_class = type(experts)
        return layer

    @override
    def restored(self) -> nn.Module:
        if self.is_frozen:
            raise ValueError("Frozen experts have no masters, and transformers' experts cannot use low-bit weights.")
        return sharing_state(self.experts_class, self, without={*OWN_ATTRIBUTES, "experts_class"})

    @override
    def convert(self) -> "QuantizedExperts":
        # transformers' own module has no product of low-bit weights.
        self.freeze()
        return self

    # A tracer would follow the number of tokens of each expert.
    @torch.compiler.disable
    @override
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Multiply tokens `(T, H)` by the experts `(T, k)` that the router chose, weighted by `(T, k)`, with
        [`experts_product`], or on GPUs with [`grouped_experts`] if it is faster; under autocast in its dtype."""
        if torch.is_autocast_enabled(hidden_states.device.type):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(hidden_states.device.type))
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        is_quantized = self.use_quantized_forward or self.is_frozen
        sizes = tokens.shape[-1], self.down_proj.shape[-1]
        # Engine numerics need the bits of their own product.
        may_group = is_quantized and self.product is low_bit_linear
        if may_group and is_grouping_faster(tokens, top_k_index.numel(), self.num_experts, sizes, self.scheme):
            operands = map(self._stacked_operand, self.quantized_weights.values())
            y = grouped_experts(tokens, top_k_index, top_k_weights, self.num_experts, *operands, self.act_fn)
            self.kernel_name = expanded_name(GROUPED, self.scheme, tokens.dtype)
            return y.view_as(hidden_states)
        operands = self._low_bit_operands if is_quantized else lambda weight: weight.master().unbind()
        gate_up, down = map(operands, self.quantized_weights.values())
        kernels: set[str] = set()

        def product(rows, low_bit, bias):
            y, seen, kernel = self.product(rows, low_bit, bias)
            kernels.add(kernel)
            return y, seen

        def linear(rows: torch.Tensor, operand: Any) -> torch.Tensor:
            if not is_quantized:
                return F.linear(rows, operand.to(rows.dtype))
            low_bit, master = operand
            return straight_through_linear(rows, low_bit, None, master, product)

        y = experts_product(tokens, top_k_index, top_k_weights, gate_up, down, linear, self.act_fn)
        # Experts with few tokens may run another kernel.
        self.kernel_name = " and ".join(sorted(kernels)) or self.kernel_name
        return y.view_as(hidden_states)

    def _low_bit_operands(self, weight: QuantizedWeight) -> Sequence[tuple[LowBitTensor, torch.Tensor | None]]:
        stacked, master = self._stacked_operand(weight)
        low_bit = stacked.row_blocks(self.num_experts)
        # With `master[expert]` each gradient would be as large as the whole.
        masters = [None] * self.num_experts if master is None else master.unbind()
        return list(zip(low_bit, masters, strict=True))

    def _stacked_operand(self, weight: QuantizedWeight) -> tuple[LowBitTensor, torch.Tensor | None]:
        takes_gradient = torch.is_grad_enabled() and not weight.is_frozen
        return weight.low_bit_weight(), weight.source.gradient(weight.parameter) if takes_gradient else None

    @override
    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}{super().extra_repr()}"


def has_stacked_matrices(name: str, module: nn.Module) -> bool:
    """Return whether a module with this name in the model keeps the matrices of several experts in one parameter."""
    is_experts = "experts" in name.split(".") or hasattr(module, "num_experts")
    return is_experts and any(len(shape) == 3 for shape in shapes_of(module).values())


def problem_of_experts(module: nn.Module) -> str | None:
    """Return why experts with stacked matrices cannot be quantized, or `None` for the layout described above."""
    if not hasattr(module, "is_concatenated"):
        return "its class does not have transformers' interface for the computation of experts"
    if getattr(module, "is_transposed", False):
        return "matrices are stored transposed, so a group of input features is not part of a row"
    if not module.is_concatenated:
        return "rows of gate and up projection alternate"
    if getattr(module, "has_bias", False):
        return "experts have biases"
    if not getattr(module, "has_gate", True):
        return "experts have no gate"
    if getattr(type(module)._apply_gate, "__name__", "") != "_default_apply_gate":
        return "its class has its own activation (`_apply_gate`)"
    shapes = {name: tuple(shape) for name, shape in shapes_of(module).items()}
    if shapes.keys() != {GATE_UP, DOWN} or any(len(shape) != 3 for shape in shapes.values()):
        return f"its parameters are {shapes}, not {GATE_UP} (E, 2 I, H) and {DOWN} (E, H, I)"
    (experts, rows, hidden), down = shapes[GATE_UP], shapes[DOWN]
    if down != (experts, hidden, rows // 2) or module.num_experts != experts:
        return f"its parameters are {shapes}, which do not fit {module.num_experts} experts"
    return None


def experts_format(module: nn.Module, scheme: QuantScheme) -> tuple[QuantScheme, int | None]:
    """Return `scheme`, and the one group size of both matrices: engines and checkpoints have one for all experts of a
    layer. `ValueError` is raised if no size divides both, and for formats in which experts are unsupported."""
    if refusal := format_of(scheme.container).refusal_of_experts:
        raise ValueError(
            f"scheme {scheme.name!r} of experts: {refusal}. Use another scheme for them, such as "
            "'w4a16' ('re:.*experts'), or leave them out with `exclude_modules`."
        )
    shapes = shapes_of(module)
    hidden, intermediate = shapes[GATE_UP][-1], shapes[DOWN][-1]
    try:
        sizes = {scheme.group_size_for(size) for size in (hidden, intermediate)}
    except ValueError as error:
        raise ValueError(
            f"experts of hidden size {hidden} and intermediate size {intermediate}, which must both fit: {error}"
        ) from None
    if len(sizes) == 1:
        return scheme, sizes.pop()
    smallest = min(size for size in sizes if size is not None)
    return get_scheme(scheme, smallest), smallest


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
