"""
Per-weight quantization state, and the base class of quantized layers.

A linear layer has one [`QuantizedWeight`], the experts of a mixture have two. Its *source* provides the tensor that is
quantized and receives gradients: by default [`MasterSource`], the layer's own parameter.
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


Product = Callable[[torch.Tensor, LowBitTensor, torch.Tensor | None], tuple[torch.Tensor, tuple[Any, ...], str]]
"""Product of rows `(M, K)`, a weight and a bias, such as [`~trl_qarl.quantization.gemm.low_bit_linear`]."""


class MasterSource:
    """
    Source of the weight that is quantized: the layer's own parameter, of which this process may hold a part. Each
    method gets that parameter, which is read once per use because a parametrization computes a new tensor each time.

    `is_frozen` sources have no master: the parameter stores codes and scales, but not as a low-bit tensor. With
    `holds_adapter` an adapter is part of the weight.
    """

    is_frozen = False
    holds_adapter = False

    def active(self) -> Hashable:
        """Return a key of the weight that the source gives now; one low-bit form is cached per key."""
        return ()

    def low_bit(self, weight: torch.Tensor) -> LowBitTensor:
        """Return the low-bit weight of a frozen source."""
        raise NotImplementedError

    def version(self, weight: torch.Tensor) -> tuple[Any, ...] | None:
        """Return a value that is equal for two calls if the weight is; `None`, equal to nothing, if unknown."""
        return weight_version(weight)

    def value(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight that is quantized, with gradients; if sharded, the rows that this process quantizes."""
        return storage_of(weight).value(weight)

    def shape(self, weight: torch.Tensor) -> torch.Size:
        """Return the shape of the whole weight."""
        return storage_of(weight).shape(weight)

    def rows(self, weight: torch.Tensor) -> range:
        """Return the rows of the whole weight that this process quantizes."""
        return storage_of(weight).rows(weight)

    def stored(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value of the whole weight in the parameter's form."""
        return value

    def gradient(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that takes the gradient of the value, or `None`."""
        return weight

    def is_trained(self, weight: torch.Tensor) -> bool:
        """Return whether an optimizer can change the value."""
        return weight.requires_grad

    def release(self) -> None:
        """Undo the source's changes to other modules when the layer is no longer quantized."""


class TransposedSource(MasterSource):
    """Source of masters `(E, K, N)`, which have inputs before outputs; their low-bit form has rows of inputs."""

    @override
    def value(self, weight: torch.Tensor) -> torch.Tensor:
        return super().value(weight).mT

    @override
    def shape(self, weight: torch.Tensor) -> torch.Size:
        *experts, inputs, outputs = super().shape(weight)
        # A frozen weight is stored as rows.
        return torch.Size([*experts, outputs, inputs]) if experts else super().shape(weight)

    @override
    def rows(self, weight: torch.Tensor) -> range:
        return range(self.shape(weight)[:-1].numel())

    @override
    def stored(self, value: torch.Tensor) -> torch.Tensor:
        return value.mT.contiguous()

    @override
    def gradient(self, weight: torch.Tensor) -> torch.Tensor | None:
        return weight.mT


class QuantizedWeight:
    """
    One weight of a layer, and its low-bit form, which is computed once per version of the master and cached.

    - `name`: name of the layer's parameter: the master `(N, K)`, or `(E, N, K)` for `E` matrices that are quantized
      like one of `E * N` rows, with a [`TransposedSource`] `(E, K, N)`; or the low-bit weight of a frozen layer.
    - `scale_dtype`: dtype in which the engine runs the model, to which scales are rounded.
    - `num_flipped_codes`: number of codes that changed at the last re-quantization on the same grid, 0-d int64.
    - `global_scale`: divisor of the scales in a format with global scales, chosen at the first use unless given.
    - `fixed_scale`: scales of the whole weight that a checkpoint gives ([`trl_qarl.quantization.fixed_scales`]).
    """

    def __init__(
        self, layer: nn.Module, name: str, scheme: QuantScheme, group_size: int | None, scale_dtype: torch.dtype
    ):
        self.layer, self.name = layer, name
        self.scheme, self.group_size, self.scale_dtype = scheme, group_size, scale_dtype
        self.source = MasterSource()
        self.num_flipped_codes: torch.Tensor | None = None
        self.global_scale: float | None = None
        self.fixed_scale: torch.Tensor | None = None
        self._kept: dict[Hashable, tuple[LowBitTensor, tuple[Any, ...] | None]] = {}

    @property
    def parameter(self) -> torch.Tensor:
        """The layer's parameter: the master, or the low-bit weight of a frozen layer."""
        return getattr(self.layer, self.name)

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole weight, inputs last."""
        return self.source.shape(self.parameter)

    @property
    def is_frozen(self) -> bool:
        """True if the master is gone."""
        parameter = self.parameter
        return self.source.is_frozen or (isinstance(parameter, LowBitTensor) and parameter.gathered_shape is None)

    @property
    def is_trained(self) -> bool:
        """True if an optimizer can change the low-bit weight."""
        return not self.is_frozen and self.source.is_trained(self.parameter)

    def master(self) -> torch.Tensor:
        """Return the high-precision weight that is quantized, with inputs last, and with gradients."""
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
            parts = [storage_of(weight).beside(weight, part) for part in low_bit.parts()]
            low_bit = LowBitTensor.from_parts(parts, low_bit.scheme, low_bit.orig_dtype)
            if kept is not None and kept.scheme != self.scheme:
                # Codes of different grids cannot be compared.
                self.num_flipped_codes = None
            elif kept is not None:
                self.num_flipped_codes = low_bit.format.count_flips(kept.qdata, low_bit.qdata)
                is_same = self.num_flipped_codes == 0 and torch.equal(kept.qdata, low_bit.qdata)
                if is_same and low_bit.differs_only_in_codes(kept):
                    low_bit = kept
        self._kept[active] = low_bit, version
        return low_bit

    @torch.no_grad()
    def whole_low_bit(self, to_main: bool = False) -> LowBitTensor:
        """Return the whole low-bit weight, as [`~trl_qarl.quantization.storage.whole`] does."""
        low_bit, parameter = self.low_bit_weight(), self.parameter
        storage = storage_of(parameter)
        if storage.is_whole:
            return low_bit
        parts = [storage.gathered(parameter, part, to_main) for part in low_bit.parts()]
        return LowBitTensor.from_parts(parts, low_bit.scheme, low_bit.orig_dtype)

    def quantize(self, weight: torch.Tensor) -> LowBitTensor:
        """Return the low-bit form of a `weight` with inputs last, without caching it."""
        weight = weight.flatten(0, -2)
        if self.global_scale is None:
            self.global_scale = format_of(self.scheme.container).choose_global_scale(weight)
        scale = None
        if self.fixed_scale is not None:
            self.fixed_scale = self.fixed_scale.to(weight.device)
            rows, step = self.source.rows(self.parameter), num_steps(self.scheme)
            scale = self.fixed_scale[rows.start : rows.stop]
            # Dtypes of FP4's scales have no product.
            scale = scale if step == 1 else scale * step
        return LowBitTensor.from_hp(weight, self.scheme, self.scale_dtype, self.global_scale, scale)

    def matrices(self) -> Iterator[tuple[torch.Tensor, LowBitTensor]]:
        """Yield master and low-bit form, `(N, K)` each, of every matrix of the parameter."""
        master, low_bit = self.master(), self.low_bit_weight()
        stacked = master if master.ndim == 3 else master.unsqueeze(0)
        yield from zip(stacked.unbind(), low_bit.row_blocks(len(stacked)), strict=True)

    def freeze(self) -> None:
        """Replace the master by its low-bit weight, in place. Results stay the same; the layer cannot be trained."""
        self.hold(self.low_bit_weight())

    def hold(self, low_bit: LowBitTensor) -> None:
        """Replace the master by `low_bit`, which cannot be trained."""
        self.forget()
        self.num_flipped_codes = None
        self.scheme, self.group_size = low_bit.scheme, low_bit.group_size
        self.global_scale = low_bit.shared_scale
        setattr(self.layer, self.name, nn.Parameter(low_bit, requires_grad=False))

    @contextmanager
    def holding(self, low_bit: LowBitTensor) -> Iterator[None]:
        """While open, use `low_bit` unless the master is written to. No code counts as changed."""
        held = self._kept
        self._kept = {**held, self.source.active(): (low_bit, self.source.version(self.parameter))}
        try:
            yield
        finally:
            self._kept = held

    def invalidate(self) -> None:
        """Have the next use quantize the master again, and count the codes that changed."""
        self._kept = {active: (low_bit, None) for active, (low_bit, _) in self._kept.items()}

    def forget(self) -> None:
        """Drop the cached low-bit weights."""
        self._kept = {}

    def __getstate__(self):
        return {**self.__dict__, "_kept": {}, "num_flipped_codes": None}


def num_steps(scheme: QuantScheme) -> int:
    """Return the steps of the container's finest grid in one of the scheme's grid."""
    return 2 ** (scheme.container.num_bits - scheme.grid.num_bits)


class QuantizedLayer(nn.Module):
    """
    A layer with quantized weights, all of one scheme: `QuantizedLinear` or `QuantizedExperts`.

    - `quantized_weights`: weights by the names of their parameters. Their caches are part of neither the `state_dict`
      nor a pickle or copy of the module.
    - `product`: multiplies by a low-bit weight.
    - `use_quantized_forward`: if false, the forward is that of the layer it was made from.
    - `kernel_name`: name of the kernel of the last forward.
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
        """Scheme of the weights."""
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
    def shared_scale(self) -> float | None:
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
        """True if an adapter is part of the weight that is quantized."""
        return self._first.source.holds_adapter

    def restored(self) -> nn.Module:
        """Return the unquantized module that replaces this layer, with its masters."""
        raise NotImplementedError

    def convert(self) -> nn.Module:
        """Freeze the layer, and return the module that replaces it and computes the same."""
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
        """Drop the cached low-bit weights."""
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
"""Attributes of a quantized layer that the layer it was made from does not have."""


def sharing_state(cls: type, module: nn.Module, without: Set[str] = frozenset()) -> Any:
    """Return a `cls` with the attributes of `module`, sharing its tables of parameters and hooks."""
    new = cls.__new__(cls)
    vars(new).update({name: value for name, value in vars(module).items() if name not in without})
    return new


def check_can_be_quantized(module: nn.Module, names: list[str], scheme: QuantScheme) -> None:
    """Raise `ValueError` if `scheme` cannot quantize a layer with these parameters, regardless of their sizes."""
    if "forward" in vars(module):
        raise ValueError(
            "The layer has a `forward` on the instance, as set by accelerate's `device_map` hooks, which would bypass "
            "the quantized forward. Load the model on one device: `device_map=None`."
        )
    if not scheme.is_quantized:
        raise ValueError(f"Scheme {scheme.name!r} leaves weights in high precision; there is nothing to convert.")
    for weight in (getattr(module, name) for name in names):
        if storage_of(weight).shape(weight).numel() == 0:
            raise ValueError(f"The layer has no weights to quantize: shape {tuple(weight.shape)}.")
        if weight.is_inference():
            raise ValueError(MADE_IN_INFERENCE_MODE)
