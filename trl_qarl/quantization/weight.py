"""
Per-weight quantization state, and the base class of quantized layers.

A linear layer has one [`QuantizedWeight`], the experts of a mixture have two. Its *source* says which weight is
quantized and where gradients go: [`MasterSource`], the layer's own parameter, unless another was set.
"""

from collections.abc import Callable, Hashable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from .formats.registry import format_of
from .gemm import low_bit_linear
from .schemes import QuantScheme
from .storage import MADE_IN_INFERENCE_MODE, storage_of, weight_version
from .tensors import LowBitTensor


__all__ = ["MasterSource", "Product", "QuantizedLayer", "QuantizedWeight"]

Product = Callable[[torch.Tensor, LowBitTensor, torch.Tensor | None], tuple[torch.Tensor, tuple[Any, ...], str]]
"""Takes rows `(M, K)`, weight and bias and returns what [`~trl_qarl.quantization.gemm.low_bit_linear`] does."""


class MasterSource:
    """
    The weight that is quantized: the layer's own, of which this process may hold a part ([`storage_of`]). Other
    sources build it from that one and from more. Each method is given the layer's parameter, which is read once per
    use, as a parametrization computes a new tensor each time. With `is_frozen` there is no master: the parameter holds
    codes and scales in another form than a low-bit tensor. With `holds_adapter` an adapter is part of the weight.
    """

    is_frozen = False
    holds_adapter = False

    def active(self) -> Hashable:
        """Return which of its weights the source gives now; the low-bit form of each is kept."""
        return ()

    def low_bit(self, weight: torch.Tensor) -> LowBitTensor:
        """Return the low-bit weight of a frozen source."""
        raise NotImplementedError

    def version(self, weight: torch.Tensor) -> tuple[Any, ...] | None:
        """Equal for two calls if the value is; `None`, equal to nothing, where that cannot be told."""
        return weight_version(weight)

    def value(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight that is quantized, with gradients; of a sharded one what this process quantizes."""
        return storage_of(weight).value(weight)

    def shape(self, weight: torch.Tensor) -> torch.Size:
        """Return the shape of all of the weight."""
        return storage_of(weight).shape(weight)

    def rows(self, weight: torch.Tensor) -> range:
        """Return which rows of all of the weight the value has."""
        return storage_of(weight).rows(weight)

    def gradient(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that takes the gradient of the value, or `None`."""
        return weight

    def is_trained(self, weight: torch.Tensor) -> bool:
        """Return whether an optimizer can change the value."""
        return weight.requires_grad

    def release(self) -> None:
        """Give back what the source holds besides the layer's weight, when the layer is no longer quantized."""


class QuantizedWeight:
    """
    One weight of a layer, and its low-bit form: computed once per version of the master and kept.

    `name` is that of the layer's parameter: the master `(N, K)`, or `(E, N, K)` for `E` matrices whose rows are
    quantized as those of one, or the low-bit weight of a frozen layer, `(N, K)` or `(E * N, K)`. `scale_dtype` is the
    dtype in which the engine runs the model, to which scales are rounded.

    `num_flipped_codes` are the codes that changed at the last re-quantization on the same grid, 0-d int64.
    `global_scale` is what the scales of a format with global scales are divided by, chosen at the first use unless it
    was given.
    """

    def __init__(
        self, layer: nn.Module, name: str, scheme: QuantScheme, group_size: int | None, scale_dtype: torch.dtype
    ):
        self.layer, self.name = layer, name
        self.scheme, self.group_size, self.scale_dtype = scheme, group_size, scale_dtype
        self.source = MasterSource()
        self.num_flipped_codes: torch.Tensor | None = None
        self.global_scale: float | None = None
        self._kept: dict[Hashable, tuple[LowBitTensor, tuple[Any, ...] | None]] = {}

    @property
    def parameter(self) -> torch.Tensor:
        """The layer's parameter: the master, or the low-bit weight of a frozen layer."""
        return getattr(self.layer, self.name)

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter: of a sharded one that of all of it."""
        return storage_of(self.parameter).shape(self.parameter)

    @property
    def is_frozen(self) -> bool:
        """True if the master is gone."""
        parameter = self.parameter
        return self.source.is_frozen or (isinstance(parameter, LowBitTensor) and not parameter.is_gathered)

    @property
    def is_trained(self) -> bool:
        """True if an optimizer can change the low-bit weight."""
        return not self.is_frozen and self.source.is_trained(self.parameter)

    def master(self) -> torch.Tensor:
        """Return the high-precision weight that is quantized, of the parameter's shape, with gradients."""
        return self.source.value(self.parameter)

    def low_bit_weight(self) -> LowBitTensor:
        """Return the low-bit weight `(N, K)` or `(E * N, K)` of the current master, the same object until its value
        changes. `ValueError` is raised for a master made in inference mode, where PyTorch does not count updates."""
        weight = self.parameter
        if isinstance(weight, LowBitTensor):
            return weight
        if self.source.is_frozen:
            return self.source.low_bit(weight)
        active, version = self.source.active(), self.source.version(weight)
        kept, kept_version = self._kept.get(active, (None, None))
        if version is not None and version == kept_version:
            return kept
        # Tensors made in inference mode could not be saved for backward later.
        with torch.inference_mode(False), torch.no_grad():
            low_bit = self.quantize(self.source.value(weight).detach())
            if kept is not None and kept.scheme != self.scheme:
                # Codes of another grid are other codes, whatever the master did.
                self.num_flipped_codes = None
            elif kept is not None:
                self.num_flipped_codes = low_bit.format.count_flips(kept.qdata, low_bit.qdata)
                if self.num_flipped_codes == 0 and torch.equal(kept, low_bit):
                    low_bit = kept
        self._kept[active] = low_bit, version
        return low_bit

    @torch.no_grad()
    def whole_low_bit(self) -> LowBitTensor:
        """Return all of the low-bit weight; of a sharded one every process has to call."""
        return storage_of(self.parameter).whole_low_bit(self)

    def quantize(self, weight: torch.Tensor) -> LowBitTensor:
        """Return the low-bit form that this layer gives to a `weight` of its shape; nothing is kept."""
        weight = weight.flatten(0, -2)
        if self.global_scale is None:
            self.global_scale = format_of(self.scheme.container).choose_global_scale(weight)
        return LowBitTensor.from_hp(weight, self.scheme, self.scale_dtype, self.global_scale)

    def matrices(self) -> Iterator[tuple[torch.Tensor, LowBitTensor]]:
        """Yield master and low-bit form, `(N, K)` each, of the matrix, or of each that the parameter stacks."""
        master, low_bit = self.master(), self.low_bit_weight()
        stacked = master if master.ndim == 3 else master.unsqueeze(0)
        yield from zip(stacked.unbind(), low_bit.row_blocks(len(stacked)), strict=True)

    def freeze(self) -> None:
        """Replace the master by its low-bit weight, in place: the layer computes what it did and cannot be trained."""
        self.hold(self.low_bit_weight())

    def hold(self, low_bit: LowBitTensor) -> None:
        """Put `low_bit`, which cannot be trained, into the master's place."""
        self.forget()
        self.num_flipped_codes = None
        self.scheme, self.group_size = low_bit.scheme, low_bit.group_size
        self.global_scale = low_bit.shared_scale
        setattr(self.layer, self.name, nn.Parameter(low_bit, requires_grad=False))

    @contextmanager
    def holding(self, low_bit: LowBitTensor) -> Iterator[None]:
        """While open, `low_bit` is the low-bit weight, unless the master is written to; no code counts as changed."""
        held = self._kept
        self._kept = {**held, self.source.active(): (low_bit, self.source.version(self.parameter))}
        try:
            yield
        finally:
            self._kept = held

    def invalidate(self) -> None:
        """Have the next use quantize the master again, and count the codes that changed."""
        self._kept = {active: (low_bit, None) for active, (low_bit, _) in self._kept.items()}

    def kept(self) -> list[LowBitTensor]:
        """Return the low-bit weights that are kept next to the parameter."""
        return [low_bit for low_bit, _ in self._kept.values()]

    def forget(self) -> None:
        """Drop what is kept."""
        self._kept = {}

    def __getstate__(self):
        return {**self.__dict__, "_kept": {}, "num_flipped_codes": None}


class QuantizedLayer(nn.Module):
    """
    A layer with quantized weights, all of one scheme: `QuantizedLinear` or `QuantizedExperts`.

    `quantized_weights` has the weights by the names of their parameters; what is kept of them is not part of the
    `state_dict`, nor of a pickle or copy of the module. `product` multiplies by a low-bit weight, and `kernel_name` is
    that of the kernel of the last forward. Without `use_quantized_forward` the forward is that of the layer it was
    made from, while the low-bit weight can still be had for publication and export.
    """

    quantized_weights: dict[str, QuantizedWeight]
    product: Product
    use_quantized_forward: bool
    kernel_name: str | None

    def _quantize(
        self, names: list[str], scheme: QuantScheme, group_size: int | None, scale_dtype: torch.dtype | None
    ) -> None:
        """Set the attributes for weights of these names; scales are rounded to the weights' dtype by default."""
        self.quantized_weights = {
            name: QuantizedWeight(self, name, scheme, group_size, scale_dtype or getattr(self, name).dtype)
            for name in names
        }
        self.product, self.use_quantized_forward, self.kernel_name = low_bit_linear, True, None

    @property
    def scheme(self) -> QuantScheme:
        """The scheme."""
        return self._first.scheme

    @property
    def group_size(self) -> int | None:
        """Group size in use."""
        return self._first.group_size

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype in which the engine runs the model, to which scales are rounded."""
        return self._first.scale_dtype

    @property
    def global_scale(self) -> float | None:
        """Divisor of the scales in a format with global scales, once chosen."""
        return self._first.global_scale

    @property
    def _first(self) -> QuantizedWeight:
        return next(iter(self.quantized_weights.values()))

    @property
    def is_frozen(self) -> bool:
        """True if the masters are gone."""
        return self._first.is_frozen

    @property
    def holds_adapter(self) -> bool:
        """True if an adapter is part of a weight that is quantized."""
        return any(weight.source.holds_adapter for weight in self.quantized_weights.values())

    def restored(self) -> nn.Module:
        """Make the module to be put into this layer's place, with its masters; it is no longer quantized."""
        raise NotImplementedError

    def convert(self) -> nn.Module:
        """Freeze the layer, and make the module to be put into its place that computes the same."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Freeze every weight."""
        for weight in self.quantized_weights.values():
            weight.freeze()

    def invalidate(self) -> None:
        """Have the next use quantize the masters again, and count the codes that changed."""
        for weight in self.quantized_weights.values():
            weight.invalidate()

    def forget(self) -> None:
        """Drop the low-bit weights that are kept."""
        for weight in self.quantized_weights.values():
            weight.forget()

    @override
    def extra_repr(self) -> str:
        group = "" if self.group_size is None else f", group_size={self.group_size}"
        plain = "" if self.use_quantized_forward else ", use_quantized_forward=False"
        return f"{super().extra_repr()}, scheme={self.scheme.name}{group}, kernel={self.kernel_name}{plain}"

    @override
    def _apply(self, *args, **kwargs):
        module = super()._apply(*args, **kwargs)
        self.forget()
        return module

    @override
    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self.forget()


OWN_ATTRIBUTES = frozenset(["quantized_weights", "product", "use_quantized_forward", "kernel_name"])
"""Attributes that a quantized layer has and the layer that it was made from has not."""


def sharing_state(cls: type, module: nn.Module, without: Set[str] = frozenset()) -> Any:
    """Return a `cls` with the attributes of `module`; the tables of parameters and hooks are the same objects."""
    new = cls.__new__(cls)
    vars(new).update({name: value for name, value in vars(module).items() if name not in without})
    return new


def check_can_be_quantized(module: nn.Module, names: list[str], scheme: QuantScheme) -> None:
    """Raise `ValueError` for a layer with these parameters that `scheme` cannot apply to, whatever their sizes."""
    if "forward" in vars(module):
        raise ValueError(
            "The layer has a `forward` of its own on the instance (accelerate's `device_map` hooks set one), which "
            "would bypass the quantized forward. Load the model on one device: `device_map=None`."
        )
    if not scheme.is_quantized:
        raise ValueError(f"Scheme {scheme.name!r} leaves weights in high precision; there is nothing to convert.")
    for weight in (getattr(module, name) for name in names):
        if storage_of(weight).shape(weight).numel() == 0:
            raise ValueError(f"The layer has no weights to quantize: shape {tuple(weight.shape)}.")
        if weight.is_inference():
            raise ValueError(MADE_IN_INFERENCE_MODE)
