"""
Experts of a mixture with a forward on the low-bit form of their matrices and a backward to their stacked masters, and
the product of a mixture's experts that learner and engines share.

transformers keeps the matrices of a layer's `E` experts in two parameters: `gate_up_proj`, `(E, 2 I, H)`, with the `I`
rows of an expert's gate before those of its up projection, or `up_proj`, `(E, I, H)`, without a gate; and `down_proj`,
`(E, H, I)`. Each is quantized like one matrix of `E * N` rows, of which an expert's tensors are views. gpt-oss and
Llama 4 have transposed masters ([`TransposedSource`]), gpt-oss also biases, and rows of gate and up projection that
alternate.

For a token `x` with the experts `e_1 ... e_k` and their weights `w_1 ... w_k`:

    gate, up = x @ gate_up[e].T         rounded to the dtype of `x`, like a linear layer of an engine
    y_e = (silu(gate) * up) @ down[e].T         or the module's own function of `gate` and `up`
    out = w_1 y_1 + ... + w_k y_k       float32, in this order, each product and sum rounded by itself; rounded
                                        once to the dtype

Each expert multiplies the tokens routed to it in one product. If the rows of that product are independent, no token's
result depends on other tokens.

[`grouped_experts`] multiplies all experts of a layer in one product, for fast numerics on GPUs: the numbers are the
same up to the order of summation. Schemes with activations in 8 bits do not use it: `scaled_grouped_mm` exists only on
GPUs and takes scales in another layout.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.integrations.moe import _default_apply_gate
from typing_extensions import override

from .formats.registry import format_of
from .gemm import GROUPED, expanded_name, low_bit_linear
from .schemes import MXFP4, QuantScheme, get_scheme
from .storage import shapes_of
from .tensors import LowBitTensor, straight_through_linear
from .weight import (
    OWN_ATTRIBUTES,
    QuantizedLayer,
    QuantizedWeight,
    TransposedSource,
    check_can_be_quantized,
    sharing_state,
)


DOWN = "down_proj"

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Constants of [`clamped_swiglu`], which vLLM does not read from a configuration."""


class QuantizedExperts(QuantizedLayer):
    """
    The experts of a layer with a quantized forward and a straight-through gradient to their masters.

    Made by [`~QuantizedExperts.from_experts`]. The experts' implementation in the model's configuration has no effect.
    `num_experts` is also the index of a slot to skip, and `experts_class` the class of the module it was made from.
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
        names = list(matrices_of_experts(experts))
        check_can_be_quantized(experts, names, scheme)
        layer = sharing_state(cls, experts)
        layer._quantize(names, *experts_format(experts, scheme), scale_dtype)
        if experts.is_transposed:
            for weight in layer.quantized_weights.values():
                weight.source = TransposedSource()
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
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply tokens `(T, H)` by the experts `(T, k)` that the router chose, weighted by `(T, k)`, with
        [`experts_product`], or on GPUs with [`grouped_experts`] if it is faster; under autocast in its dtype. Llama 4
        gives each expert in turn all tokens, `(E * T, H)`, already weighted: zeros for those of other experts."""
        if top_k_index is None or top_k_weights is None:
            experts = torch.arange(self.num_experts, device=hidden_states.device)
            top_k_index = experts.repeat_interleave(len(hidden_states) // self.num_experts).unsqueeze(1)
            top_k_index = top_k_index.masked_fill(~hidden_states.any(1, keepdim=True), self.num_experts)
            top_k_weights = torch.ones_like(top_k_index, dtype=torch.float32)
        if torch.is_autocast_enabled(hidden_states.device.type):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(hidden_states.device.type))
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        is_quantized = self.use_quantized_forward or self.is_frozen
        sizes = tokens.shape[-1], self.down_proj.shape[-1]
        # Engine numerics need the bits of their own product.
        may_group = is_quantized and self.product is low_bit_linear
        if may_group and is_grouping_faster(tokens, top_k_index.numel(), self.num_experts, sizes, self.scheme):
            operands = map(self._stacked_operand, self.quantized_weights.values())
            y = grouped_experts(tokens, top_k_index, top_k_weights, self.num_experts, *operands, self._activation)
            self.kernel_name = expanded_name(GROUPED, self.scheme, tokens.dtype)
            return y.view_as(hidden_states)
        inner, outer = (self._operands(weight, is_quantized) for weight in self.quantized_weights.values())
        kernels: set[str] = set()

        def product(rows, low_bit, bias):
            y, seen, kernel = self.product(rows, low_bit, bias)
            kernels.add(kernel)
            return y, seen

        def linear(rows: torch.Tensor, operand: Any) -> torch.Tensor:
            low_bit, master, bias = operand
            if low_bit is None:
                return F.linear(rows, master.to(rows.dtype), None if bias is None else bias.to(rows.dtype))
            return straight_through_linear(rows, low_bit, bias, master, product)

        y = experts_product(tokens, top_k_index, top_k_weights, inner, outer, linear, self._activation)
        # Experts with few tokens may run another kernel.
        self.kernel_name = " and ".join(sorted(kernels)) or self.kernel_name
        return y.view_as(hidden_states)

    @property
    def _activation(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Function of the rows between the two products."""
        return partial(self.experts_class._apply_gate, self) if self.has_gate else self.act_fn

    def _operands(self, weight: QuantizedWeight, is_quantized: bool) -> list[tuple[Any, ...]]:
        """Return low-bit weight, master and bias of each expert, `None` for each that its product does not take."""
        low_bit, *others = self._stacked_operand(weight, is_quantized)
        none = [None] * self.num_experts
        blocks = none if low_bit is None else low_bit.row_blocks(self.num_experts)
        # With `stacked[expert]` each gradient would be as large as the whole.
        return list(zip(blocks, *(none if stacked is None else stacked.unbind() for stacked in others), strict=True))

    def _stacked_operand(self, weight: QuantizedWeight, is_quantized: bool = True) -> tuple[Any, ...]:
        bias = getattr(self, f"{weight.name}_bias", None)
        if not is_quantized:
            return None, weight.master(), bias
        takes_gradient = torch.is_grad_enabled() and not weight.is_frozen
        master = weight.source.gradient(weight.parameter) if takes_gradient else None
        return weight.low_bit_weight(), master, bias

    @override
    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}{super().extra_repr()}"


def has_stacked_matrices(name: str, module: nn.Module) -> bool:
    """Return whether a module with this name in the model keeps the matrices of several experts in one parameter."""
    is_experts = "experts" in name.split(".") or hasattr(module, "num_experts")
    return is_experts and any(len(shape) == 3 for shape in shapes_of(module).values())


def matrices_of_experts(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names in a checkpoint of the matrices of one expert, in order, by the parameter of a module of
    experts that stacks them. Where rows of gate and up projection alternate, both are one matrix, with the names of
    vLLM's loader of gpt-oss ([`~trl_qarl.wire.protocol.is_parameter`])."""
    if not module.has_gate:
        return {"up_proj": ("up_proj",), DOWN: (DOWN,)}
    if not module.is_concatenated:
        return {"gate_up_proj": ("w13_",), DOWN: ("w2_",)}
    return {"gate_up_proj": ("gate_proj", "up_proj"), DOWN: (DOWN,)}


def problem_of_experts(module: nn.Module) -> str | None:
    """Return why experts with stacked matrices cannot be quantized, or `None` for the layouts described above."""
    if type(module).__name__ == "Llama4TextExperts":
        # Its class describes no layout (modeling_llama4.py).
        vars(module).update(has_gate=True, has_bias=False, is_transposed=True, is_concatenated=True)
        type(module)._apply_gate = _default_apply_gate
    if not hasattr(module, "is_concatenated"):
        return "its class does not have transformers' interface for the computation of experts"
    layout = module.is_transposed, module.has_bias, module.is_concatenated
    if layout not in ((False, False, True), (True, True, False), (True, False, True)):
        return (
            "matrices have biases, or rows of gate and up projection that alternate: only gpt-oss' form, both and stored transposed, has "
            "been compared"
        )
    is_default = getattr(type(module)._apply_gate, "__name__", "") == "_default_apply_gate"
    constants = getattr(module, "alpha", None), getattr(module, "limit", None)
    if is_default is not module.is_concatenated or not (is_default or constants == (SWIGLU_ALPHA, SWIGLU_LIMIT)):
        return "its class has its own activation (`_apply_gate`)"
    inner, outer = matrices_of_experts(module)
    shapes = _shapes_of_matrices(module)
    fits = shapes.keys() == {inner, outer} and all(len(shape) == 3 for shape in shapes.values())
    if not fits:
        return f"its parameters are {shapes}, not {inner} and {outer} of all experts"
    (experts, rows, hidden), down = shapes[inner], shapes[outer]
    if down != (experts, hidden, rows // (1 + module.has_gate)) or module.num_experts != experts:
        return f"its parameters are {shapes}, which do not fit {module.num_experts} experts"
    return None


def _shapes_of_matrices(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of experts that are not biases, with inputs last."""
    shapes = {name: tuple(shape) for name, shape in shapes_of(module).items() if not name.endswith("_bias")}
    return {name: (*s[:-2], s[-1], s[-2]) if module.is_transposed else s for name, s in shapes.items()}


def is_released_form(scheme: QuantScheme) -> bool:
    """Return whether experts with this scheme are stored in the form in which gpt-oss is released: MXFP4 codes and
    scales of all experts of a layer, next to layers in high precision."""
    return scheme.container is MXFP4


def experts_format(module: nn.Module, scheme: QuantScheme) -> tuple[QuantScheme, int | None]:
    """Return `scheme`, and the one group size of both matrices: engines and checkpoints have one for all experts of a
    layer. `ValueError` is raised if no size divides both, and for formats in which experts are unsupported."""
    refusal = format_of(scheme.container).refusal_of_experts
    if refusal and not (is_released_form(scheme) and module.is_transposed):
        raise ValueError(
            f"scheme {scheme.name!r} of experts: {refusal}. Use another scheme for them, such as "
            "'w4a16' ('re:.*experts'), or leave them out with `exclude_modules`."
        )
    hidden, intermediate = (shape[-1] for shape in _shapes_of_matrices(module).values())
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
    inner: Sequence[Any],
    outer: Sequence[Any],
    linear: Callable[[torch.Tensor, Any], torch.Tensor],
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """
    Return the output of the experts for tokens `x`, `(T, H)` in the compute dtype, in the same dtype, with the
    gradients of `linear`; zeros for a token without experts.

    - `ids`: experts `(T, k)` of each token, integers; the number of experts stands for a slot to skip.
    - `weights`: their weights `(T, k)`, converted to float32.
    - `inner`: operand of `linear` for each expert, of gate and up projection, `(2 I, H)`, or of the latter, `(I, H)`;
      `outer` the same for the down projection, `(H, I)`.
    - `linear`: multiplies rows `(M, K)` by an operand and returns `(M, N)` in the dtype of the rows.
    - `activation`: returns `(M, I)` for the first product, such as [`gated`] does.
    """

    def one_by_one(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        results = []
        for expert, tokens in enumerate(rows.split(counts)):
            if counts[expert]:
                results.append(linear(activation(linear(tokens, inner[expert])), outer[expert]))
        return torch.cat(results)

    return routed(x, ids, weights, len(inner), one_by_one)


def gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function of rows `(M, 2 I)` that multiplies the `activation` of their first half, the gate, by the
    second."""

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return activation(gate) * up

    return multiply


def clamped_swiglu(rows: torch.Tensor) -> torch.Tensor:
    """Return gpt-oss' function of rows `(M, 2 I)`, in which gate and up projection alternate, like transformers'
    `GptOssExperts._apply_gate`."""
    gate = rows[..., ::2].clamp(max=SWIGLU_LIMIT)
    up = rows[..., 1::2].clamp(min=-SWIGLU_LIMIT, max=SWIGLU_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))


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


_Operand = tuple[LowBitTensor, torch.Tensor | None, torch.Tensor | None]
"""Low-bit weight, the master if it takes a gradient, and the bias if there is one, of one expert or of all."""


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
    inner: _Operand,
    outer: _Operand,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the result of [`experts_product`] with gradients to masters. `inner` is a low-bit weight `(E * N, H)`,
    its master `(E, N, H)` and the bias `(E, N)`; `outer` has shapes `(E * H, I)`, `(E, H, I)` and `(E, H)`."""

    def product(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ends = torch.tensor(counts, device=x.device).cumsum(0, dtype=torch.int32)
        idle = [expert for expert, count in enumerate(counts) if not count]

        def linear(rows: torch.Tensor, low_bit: LowBitTensor, master, bias) -> torch.Tensor:
            y = _GroupedLinear.apply(rows, low_bit, master, ends, idle)
            return (
                y if bias is None else y + bias.to(y.dtype).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), 0)
            )

        return linear(activation(linear(rows, *inner)), *outer)

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
