"""
Linear layer with a forward on the low-bit form of its weight and a backward to the master weight.

    forward   y = kernel(Q(x), Q(w)) + b          the engine's tensors, through a low-bit matrix product
    backward  dx = dy @ w',  dw = dy.T @ x',  db = sum(dy)        high precision, straight through both quantizers

`w'` is the dequantized weight of the product and `x'` the (de)quantized activation the product saw. Paper:
https://huggingface.co/papers/2604.07853, section "Rollout-aligned quantization-aware training".
"""

import operator

import torch
import torch.nn.functional as F
from torch import fx, nn
from typing_extensions import override

from .schemes import QuantScheme
from .tensors import LowBitTensor, straight_through_linear
from .weight import OWN_ATTRIBUTES, QuantizedLayer, check_can_be_quantized, sharing_state


class QuantizedLinear(QuantizedLayer, nn.Linear):
    """
    `nn.Linear` with a quantized forward and a straight-through gradient to its master weight.

    Made by [`~QuantizedLinear.from_linear`]; `weight` and `bias` stay the high-precision masters, and `linear_class`
    is the class of the layer it was made from. The low-bit weight is cached. Replacing the master or its storage,
    in-place updates that PyTorch counts, `step()` of any optimizer, `load_state_dict` and `.to` invalidate the cache;
    code that writes through `.data`, numpy or dlpack outside an optimizer must call [`~QuantizedLinear.invalidate`]
    afterwards.
    """

    linear_class: type[nn.Linear]

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, scheme: QuantScheme, scale_dtype: torch.dtype | None = None
    ) -> "QuantizedLinear":
        """
        Make a `QuantizedLinear` that replaces `linear`. The two share parameters, buffers and hooks, so ties,
        `state_dict` keys, optimizer groups and handles of hooks survive. `scale_dtype` is the dtype in which the
        engine runs the model, by default that of the weight.

        `TypeError` is raised if `linear` has its own forward ([`is_plain`]); `ValueError` if the scheme quantizes no
        weight or cannot quantize `in_features`, and if the layer has no weights or was made in inference mode.
        """
        if not is_plain(linear):
            raise TypeError(f"Expected a plain nn.Linear, got {type(linear).__name__}, which has its own forward.")
        check_can_be_quantized(linear, ["weight"], scheme)
        layer = sharing_state(cls, linear)
        layer.linear_class = type(linear)
        layer._quantize(["weight"], scheme, scheme.group_size_for(linear.in_features), scale_dtype)
        return layer

    @override
    def restored(self) -> nn.Linear:
        """Return the layer that replaces this one, with its masters; an `nn.Linear` if it is frozen. An adapter in the
        low-bit weight runs next to the layer again, unless the layer is frozen with it."""
        if not self.is_frozen:
            self._first.source.release()
        # A low-bit weight has no other product than that of `nn.Linear`.
        cls = nn.Linear if self.is_frozen else self.linear_class
        return sharing_state(cls, self, without={*OWN_ATTRIBUTES, "linear_class"})

    @override
    def convert(self) -> nn.Linear:
        self.freeze()
        return self.restored()

    def low_bit_weight(self) -> LowBitTensor:
        """Return [`QuantizedWeight.low_bit_weight`] of the layer's only weight."""
        return self._first.low_bit_weight()

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, source = self.weight, self._first.source
        if not self.use_quantized_forward:
            return F.linear(x, source.value(weight).to(weight.dtype), self.bias)
        takes_gradient = torch.is_grad_enabled() and not self.is_frozen
        master = source.gradient(weight) if takes_gradient else None
        return straight_through_linear(x, self.low_bit_weight(), self.bias, master, self._multiply)

    def _multiply(self, rows, low_bit, bias):
        y, seen, self.kernel_name = self.product(rows, low_bit, bias)
        return y, seen


def is_plain(linear: nn.Module) -> bool:
    """Return whether a layer is an `nn.Linear`, or of a subclass with a forward that only writes out the product and
    the sum with the bias, such as transformers' `FalconLinear`: `x @ weight.T + bias`."""
    if type(linear) is nn.Linear:
        return True
    try:
        x, weight, columns, product, *rest = fx.Tracer().trace(linear).nodes
    except Exception:
        # Its forward depends on values, takes other arguments or has fewer steps.
        return False
    steps = [(node.target, node.args) for node in (weight, columns, product, *rest[:-1])]
    expected = [("weight", ()), (getattr, (weight, "T")), (operator.matmul, (x, columns))]
    if linear.bias is not None:
        expected += [("bias", ()), (operator.add, (product, rest[0]))]
    return steps == expected
