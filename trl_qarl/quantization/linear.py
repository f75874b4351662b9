"""
A linear layer whose forward runs on the low-bit form of its weight and whose backward reaches the master weight.

    forward   y = kernel(Q(x), Q(w)) + b          the tensors the rollout engine holds, through a low-bit matrix product
    backward  dx = dy @ w',  dw = dy.T @ x',  db = sum(dy)        high precision, straight through both quantizers

`w'` is the dequantized weight of the product and `x'` the (de)quantized activation the product saw. A layer has two parts: its
*source* says which weight is quantized and where gradients go ([`MasterSource`]: the layer's own), its *product* multiplies by
the low-bit weight ([`~trl_qarl.quantization.gemm.low_bit_linear`] unless another was set). It shares the `Parameter` objects of
the `nn.Linear` it was made from, so ties, `state_dict` keys, optimizer groups and hooks survive.
Paper: https://huggingface.co/papers/2604.07853, section "Rollout-aligned quantization-aware training".
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdRef
from typing_extensions import override

from .gemm import low_bit_linear
from .quantize import count_code_flips
from .schemes import QuantScheme
from .tensors import LowBitTensor, straight_through_linear


__all__ = ["MasterSource", "Product", "QuantizedLinear", "weight_version"]

Product = Callable[[torch.Tensor, LowBitTensor, torch.Tensor | None], tuple[torch.Tensor, tuple[Any, ...], str]]
"""Takes rows `(M, K)`, weight and bias and returns what [`~trl_qarl.quantization.gemm.low_bit_linear`] does."""


class MasterSource:
    """
    The weight that a [`QuantizedLinear`] quantizes: its own. Other sources build it from that one and from more.

    Each method is given the layer's `weight`, which is read once per use: a parametrization computes a new tensor each time.
    """

    holds_adapter = False
    """Whether an adapter is part of the weight that is quantized."""

    def active(self) -> Hashable:
        """Return which of its weights the source gives now; the low-bit form of each is kept."""
        return ()

    def version(self, weight: torch.Tensor) -> tuple[Any, ...] | None:
        """Equal for two calls if the value is; `None`, equal to nothing, where that cannot be told."""
        return weight_version(weight)

    def value(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the high-precision weight that is quantized, with gradients."""
        return weight

    def gradient(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor to which the gradient of the value can be given in its place; `None` if nothing takes one."""
        return weight

    def is_trained(self, weight: torch.Tensor) -> bool:
        """Return whether an optimizer can change the value."""
        return weight.requires_grad

    def release(self) -> None:
        """Give back what the source holds besides the layer's weight, when the layer is no longer quantized."""


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
        source ([`MasterSource`]): gives the weight that is quantized.
        product ([`Product`]): multiplies by the low-bit weight.
        use_quantized_forward (`bool`): whether the forward is the quantized one; `False` makes it that of `nn.Linear`,
            while the low-bit weight can still be had for publication and export.
        kernel_name (`str` or `None`): name of the kernel of the last forward.
        num_flipped_codes (`torch.Tensor` or `None`): codes that changed at the last re-quantization, 0-d int64.
    """

    scheme: QuantScheme
    group_size: int | None
    scale_dtype: torch.dtype
    source: MasterSource
    product: Product
    use_quantized_forward: bool
    kernel_name: str | None
    num_flipped_codes: torch.Tensor | None
    _kept: dict[Hashable, tuple[LowBitTensor, tuple[Any, ...] | None]]

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, scheme: QuantScheme, scale_dtype: torch.dtype | None = None
    ) -> "QuantizedLinear":
        """
        Make a `QuantizedLinear` to be put into the place of `linear`. The two share parameters, buffers and hooks, now and
        later: what is assigned to one is in the other, and handles of hooks work.

        Args:
            linear (`nn.Linear`):
                Layer to replace; exactly `nn.Linear`, not a subclass with a forward of its own.
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
        group_size = scheme.group_size_for(linear.in_features)
        layer = _sharing_state(cls, linear)
        layer.scheme = scheme
        layer.group_size = group_size
        layer.scale_dtype = scale_dtype or linear.weight.dtype
        layer.source = MasterSource()
        layer.product = low_bit_linear
        layer.use_quantized_forward = True
        layer.kernel_name = None
        layer.num_flipped_codes = None
        layer._kept = {}
        return layer

    def to_linear(self) -> nn.Linear:
        """
        Make the `nn.Linear` to be put into this layer's place, as [`~QuantizedLinear.from_linear`] does the other way. Masters are
        untouched. An adapter in the low-bit weight runs beside the layer again, unless the layer is frozen with it.
        """
        if not self.is_frozen:
            self.source.release()
        return _sharing_state(nn.Linear, self, without=_OWN_ATTRIBUTES)

    def convert(self) -> nn.Linear:
        """Make the `nn.Linear` with the frozen low-bit weight, which computes what this layer does; the master is gone."""
        self.freeze()
        return self.to_linear()

    def freeze(self) -> None:
        """Replace the master by its low-bit weight, in place: the layer computes what it did and cannot be trained."""
        low_bit = self.low_bit_weight()
        self._kept = {}
        self.num_flipped_codes = None
        self.weight = nn.Parameter(low_bit, requires_grad=False)

    @property
    def is_frozen(self) -> bool:
        """Whether the master is gone."""
        return isinstance(self.weight, LowBitTensor)

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer can change the low-bit weight."""
        return not self.is_frozen and self.source.is_trained(self.weight)

    @property
    def holds_adapter(self) -> bool:
        """Whether an adapter is part of the weight that is quantized."""
        return self.source.holds_adapter

    def master(self) -> torch.Tensor:
        """Return the high-precision weight that is quantized, with gradients."""
        return self.source.value(self.weight)

    def low_bit_weight(self) -> LowBitTensor:
        """
        Return the low-bit weight of the current master. The same object is returned until its value changes.

        Raises:
            ValueError: if the master was made in inference mode, where PyTorch does not count updates.
        """
        weight = self.weight
        if isinstance(weight, LowBitTensor):
            return weight
        active, version = self.source.active(), self.source.version(weight)
        kept, kept_version = self._kept.get(active, (None, None))
        if version is not None and version == kept_version:
            return kept
        # Tensors made in inference mode could not be saved for backward later.
        with torch.inference_mode(False), torch.no_grad():
            low_bit = self.quantize(self.source.value(weight).detach())
            if kept is not None:
                self.num_flipped_codes = count_code_flips(kept.qdata, low_bit.qdata, self.scheme.container)
                if self.num_flipped_codes == 0 and torch.equal(kept.scale, low_bit.scale):
                    low_bit = kept
        self._kept[active] = low_bit, version
        return low_bit

    def quantize(self, weight: torch.Tensor) -> LowBitTensor:
        """Return the low-bit form that this layer gives to a `weight` of its shape; nothing is kept."""
        return LowBitTensor.from_hp(weight, self.scheme, self.scale_dtype)

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Low-bit tensors under compressed-tensors' names, without this layer's prefix; the bias is not among them."""
        return self.low_bit_weight().checkpoint_tensors()

    def invalidate(self) -> None:
        """Have the next use quantize the master again."""
        self._kept = {active: (low_bit, None) for active, (low_bit, _) in self._kept.items()}

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if not self.use_quantized_forward:
            return F.linear(x, self.source.value(weight).to(weight.dtype), self.bias)
        takes_gradient = torch.is_grad_enabled() and not self.is_frozen
        master = self.source.gradient(weight) if takes_gradient else None
        return straight_through_linear(x, self.low_bit_weight(), self.bias, master, self._multiply)

    def _multiply(self, rows, low_bit, bias):
        y, seen, self.kernel_name = self.product(rows, low_bit, bias)
        return y, seen

    @override
    def extra_repr(self) -> str:
        group = "" if self.group_size is None else f", group_size={self.group_size}"
        plain = "" if self.use_quantized_forward else ", use_quantized_forward=False"
        return f"{super().extra_repr()}, scheme={self.scheme.name}{group}, kernel={self.kernel_name}{plain}"

    @override
    def _apply(self, *args, **kwargs):
        module = super()._apply(*args, **kwargs)
        self._kept = {}
        return module

    @override
    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._kept = {}

    @override
    def __getstate__(self):
        return {**self.__dict__, "_kept": {}, "num_flipped_codes": None}


_OWN_ATTRIBUTES = frozenset(
    [
        "scheme",
        "group_size",
        "scale_dtype",
        "source",
        "product",
        "use_quantized_forward",
        "kernel_name",
        "num_flipped_codes",
        "_kept",
    ]
)


def _sharing_state(cls: type, module: nn.Module, without: frozenset[str] = frozenset()) -> Any:
    """Return a `cls` with the attributes of `module`; the tables of parameters and hooks are the same objects."""
    new = cls.__new__(cls)
    vars(new).update({name: value for name, value in vars(module).items() if name not in without})
    return new


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
