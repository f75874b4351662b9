"""
A linear layer whose forward runs on the low-bit form of its weight and whose backward reaches the master weight.

    forward   y = kernel(Q(x), Q(w)) + b          the tensors the rollout engine holds, through a low-bit matrix product
    backward  dx = dy @ w',  dw = dy.T @ x',  db = sum(dy)        high precision, straight through both quantizers

`w'` is the dequantized weight of the product and `x'` the (de)quantized activation the product saw. The module keeps the same
`Parameter` objects as the `nn.Linear` it was made from, so ties, `state_dict` keys, optimizer groups and hooks survive.
Paper: https://huggingface.co/papers/2604.07853, section "Rollout-aligned quantization-aware training".
"""

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdRef
from typing_extensions import override

from .gemm import low_bit_linear
from .quantize import count_code_flips
from .schemes import QuantScheme
from .tensors import LowBitTensor, straight_through_linear


__all__ = ["QuantizedLinear", "weight_version"]


class QuantizedLinear(nn.Linear):
    """
    `nn.Linear` with a quantized forward and a straight-through gradient to its master weight.

    Made by [`~QuantizedLinear.from_linear`]; `weight` and `bias` stay the high-precision masters. The low-bit weight is
    computed once per version of the master and cached. Another tensor or storage in the master's place, in-place updates that
    PyTorch counts, `step()` of any optimizer, `load_state_dict` and `.to` invalidate the cache; code that writes through
    `.data`, numpy or dlpack outside an optimizer must call [`~QuantizedLinear.invalidate`] afterwards. The cache is not part
    of the `state_dict`, nor of a pickle or copy of the module.

    Attributes:
        scheme ([`QuantScheme`]): the scheme.
        group_size (`int` or `None`): group size in use for this matrix.
        scale_dtype (`torch.dtype`): dtype in which the engine runs the model, to which scales are rounded.
        use_quantized_forward (`bool`): whether the forward is the quantized one; `False` makes it that of `nn.Linear`,
            while the low-bit weight can still be had for publication and export.
        kernel_name (`str` or `None`): name of the kernel of the last forward.
        num_flipped_codes (`torch.Tensor` or `None`): codes that changed at the last re-quantization, 0-d int64.
    """

    scheme: QuantScheme
    group_size: int | None
    scale_dtype: torch.dtype
    use_quantized_forward: bool
    kernel_name: str | None
    num_flipped_codes: torch.Tensor | None
    holds_adapter = False
    """Whether an adapter is part of the weight that is quantized."""

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, scheme: QuantScheme, scale_dtype: torch.dtype | None = None
    ) -> "QuantizedLinear":
        """
        Turn `linear` into a `QuantizedLinear`, in place: the returned object *is* `linear`, with its class changed, so
        every reference, hook and tie to it stays valid.

        Args:
            linear (`nn.Linear`):
                Layer to convert; exactly `nn.Linear`, not a subclass with a forward of its own.
            scheme ([`QuantScheme`]):
                Scheme with quantized weights.
            scale_dtype (`torch.dtype`, *optional*):
                Dtype in which the engine runs the model. Defaults to the weight's dtype.

        Raises:
            TypeError: if `linear` is not a plain `nn.Linear`.
            ValueError: if the scheme has no quantized weight, if the layer has no weights or was made in inference mode, or
                if the scheme cannot quantize `in_features`.
        """
        if type(linear) is not nn.Linear:
            raise TypeError(
                f"Expected a plain nn.Linear, got {type(linear).__name__}, which has a forward of its own."
            )
        if "forward" in vars(linear):
            raise ValueError(
                "The layer has a `forward` of its own on the instance (accelerate's `device_map` hooks set one), which "
                "would bypass the quantized forward. Load the model on one device: `device_map=None`."
            )
        if not scheme.is_quantized:
            raise ValueError(f"Scheme {scheme.name!r} leaves weights in high precision; there is nothing to convert.")
        if linear.weight.numel() == 0:
            raise ValueError(f"The layer has no weights to quantize: shape {tuple(linear.weight.shape)}.")
        if linear.weight.is_inference():
            raise ValueError(MADE_IN_INFERENCE_MODE)
        linear.group_size = scheme.group_size_for(linear.in_features)
        linear.scheme = scheme
        linear.scale_dtype = scale_dtype or linear.weight.dtype
        linear.__class__ = cls
        linear.use_quantized_forward = True
        linear.kernel_name = None
        linear.num_flipped_codes = None
        linear._drop_cache()
        return linear

    def to_linear(self) -> nn.Linear:
        """Undo [`~QuantizedLinear.from_linear`], in place. Masters are untouched."""
        for name in (
            "scheme",
            "group_size",
            "scale_dtype",
            "use_quantized_forward",
            "kernel_name",
            "num_flipped_codes",
            *_CACHE_ATTRIBUTES,
        ):
            delattr(self, name)
        self.__class__ = nn.Linear
        return self

    def convert(self) -> nn.Linear:
        """Replace the master by its frozen low-bit weight, in place: an `nn.Linear` that computes what this layer does."""
        self.freeze()
        return self.to_linear()

    def freeze(self) -> None:
        """Replace the master by its low-bit weight, in place: the layer computes what it did and cannot be trained."""
        low_bit = self.low_bit_weight()
        self._drop_cache()
        self.num_flipped_codes = None
        self.weight = nn.Parameter(low_bit, requires_grad=False)

    @property
    def is_frozen(self) -> bool:
        """Whether the master is gone."""
        return isinstance(self.weight, LowBitTensor)

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer can change the low-bit weight."""
        return self.weight.requires_grad

    def master(self) -> torch.Tensor:
        """The high-precision weight that is quantized."""
        return self.weight

    def low_bit_weight(self) -> LowBitTensor:
        """
        The low-bit weight of the current master. The same object is returned until its value changes.

        Raises:
            ValueError: if the master was made in inference mode, where PyTorch does not count updates.
        """
        # Read once: a parametrization computes a new tensor each time.
        weight = self.weight
        if isinstance(weight, LowBitTensor):
            return weight
        version = weight_version(weight)
        if version is not None and version == self._low_bit_version:
            return self._low_bit
        return self._quantize(weight.detach(), version)

    def quantize(self, weight: torch.Tensor) -> LowBitTensor:
        """The low-bit form that this layer gives to a `weight` of its shape; nothing is kept."""
        return LowBitTensor.from_hp(weight, self.scheme, self.scale_dtype)

    def _quantize(self, weight: torch.Tensor, version: tuple[Any, ...] | None) -> LowBitTensor:
        # Tensors made in inference mode could not be saved for backward later.
        with torch.inference_mode(False):
            low_bit = self.quantize(weight)
            if self._low_bit is not None:
                self.num_flipped_codes = count_code_flips(self._low_bit.qdata, low_bit.qdata, self.scheme.container)
                if self.num_flipped_codes == 0 and torch.equal(self._low_bit.scale, low_bit.scale):
                    low_bit = self._low_bit
        self._low_bit, self._low_bit_version = low_bit, version
        return low_bit

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Low-bit tensors under compressed-tensors' names, without this layer's prefix; the bias is not among them."""
        return self.low_bit_weight().checkpoint_tensors()

    def invalidate(self) -> None:
        """Have the next use quantize the master again."""
        self._low_bit_version = None

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.use_quantized_forward:
            return super().forward(x)
        low_bit = self.low_bit_weight()
        return straight_through_linear(x, low_bit, self.bias, None if self.is_frozen else self.weight, self._product)

    def _product(self, rows, low_bit, bias):
        y, seen, self.kernel_name = low_bit_linear(rows, low_bit, bias)
        return y, seen

    @override
    def extra_repr(self) -> str:
        group = "" if self.group_size is None else f", group_size={self.group_size}"
        plain = "" if self.use_quantized_forward else ", use_quantized_forward=False"
        return f"{super().extra_repr()}, scheme={self.scheme.name}{group}, kernel={self.kernel_name}{plain}"

    def _drop_cache(self) -> None:
        for name in _CACHE_ATTRIBUTES:
            setattr(self, name, None)

    @override
    def _apply(self, *args, **kwargs):
        module = super()._apply(*args, **kwargs)
        self._drop_cache()
        return module

    @override
    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._drop_cache()

    @override
    def __getstate__(self):
        return {**self.__dict__, **dict.fromkeys(_CACHE_ATTRIBUTES), "num_flipped_codes": None}


_CACHE_ATTRIBUTES = ("_low_bit", "_low_bit_version")

MADE_IN_INFERENCE_MODE = (
    "The weight was made inside `torch.inference_mode()`, where PyTorch does not count updates, so a changed weight could "
    "not be told from the one that was quantized. Make or load the model outside of it; `torch.no_grad()` does as well."
)

# Fused and 8-bit optimizers write to parameters without raising their version, so each step of any optimizer counts.
_num_optimizer_steps = 0


# A tracer cannot follow weak references.
@torch.compiler.disable
def weight_version(weight: torch.Tensor) -> tuple[Any, ...] | None:
    """
    Equal for two calls if the tensor and the number of writes to it are; `None`, equal to nothing, for one that is not kept.

    Addresses are no identity: a new tensor may lie where an old one was. As long as a weak reference to a storage exists, no
    other storage compares equal to it.
    """
    if weight.is_inference():
        if isinstance(weight, nn.Parameter):
            raise ValueError(MADE_IN_INFERENCE_MODE)
        return None
    return (
        WeakIdRef(weight),
        StorageWeakRef(weight.untyped_storage()),
        weight.storage_offset(),
        weight.stride(),
        weight._version,
        weight.dtype,
        _num_optimizer_steps,
    )


def _count_optimizer_step(*args, **kwargs):
    global _num_optimizer_steps
    _num_optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)
