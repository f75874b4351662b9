"""
LoRA inside the low-bit weight: base and adapter are quantized together, and the engine gets one low-bit matrix.

    forward   y = kernel(Q(x), Q(W + s B A)) + b                  one low-bit product, with no branch beside it
    backward  dA = s B.T @ dW,  dB = s dW @ A.T,  dW = dy.T @ x'          straight through both quantizers

`W` is frozen in the precision it was loaded in; the sum is computed in float32. An adapter whose product stays below half a
quantization step changes no code, and so nothing: `quant/code_flip_rate` shows it.
"""

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch.nn import functional as F
from typing_extensions import override

from ..quantization.linear import QuantizedLinear, weight_version
from ..quantization.tensors import LowBitTensor, straight_through_linear


__all__ = ["MergedLinear", "merge_adapters"]


def merge_adapters(model: PeftModel) -> int:
    """
    Have every adapted layer of `model`, prepared by [`prepare_model`], quantize base and adapter together, in place.

    Returns:
        The number of layers.

    Raises:
        ValueError: if a layer that is adapted is not quantized, or if adapters drop some of their inputs.
    """
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    plain = [name for name, module in adapters.items() if not isinstance(module.base_layer, QuantizedLinear)]
    if plain:
        raise ValueError(
            f"lora_mode='merged' quantizes base and adapter together, but {len(plain)} of {len(adapters)} adapted layers stay "
            f"in high precision, such as {plain[0]!r}. Leave them out of `target_modules`, or use lora_mode='adapter'."
        )
    rates = {getattr(dropout, "p", 0.0) for module in adapters.values() for dropout in module.lora_dropout.values()}
    if any(rates):
        raise ValueError(
            f"lora_dropout={max(rates)} with lora_mode='merged': it drops inputs of the adapter's branch, and there is none. Use "
            "lora_dropout=0, `disable_dropout=True` or lora_mode='adapter'."
        )
    for module in adapters.values():
        MergedLinear.from_quantized(module.base_layer, module)
    return len(adapters)


class MergedLinear(QuantizedLinear):
    """
    The quantized base layer of a LoRA layer, whose master is `W + s B A` of the active adapter; `weight` stays `W`.

    Made by [`merge_adapters`]. While adapters are disabled, which is how TRL gets its reference policy, the master is `W`. The
    low-bit weight of each is cached, as long as neither changes.
    """

    holds_adapter = True

    @classmethod
    def from_quantized(cls, layer: QuantizedLinear, adapter: LoraLinear) -> "MergedLinear":
        """Turn `layer` into a `MergedLinear`, in place; `adapter`, the LoRA layer around it, then leaves everything to it."""
        layer.__class__ = cls
        # In a tuple: as a submodule the layer would contain what contains it.
        layer._adapter = (adapter,)
        layer._cached_for = ()
        layer._drop_cache()
        adapter.__class__ = _LoraInsideBase
        return layer

    @override
    def to_linear(self):
        """As the parent's; the adapter then runs beside the layer again, unless the layer is frozen with the adapter in it."""
        (adapter,) = self._adapter
        if not self.is_frozen:
            adapter.__class__ = LoraLinear
        del self._adapter, self._cached_for, self._kept
        return super().to_linear()

    @property
    @override
    def is_trained(self) -> bool:
        return not self.is_frozen and any(p.requires_grad for p in self._factors(self._active()))

    @override
    def master(self) -> torch.Tensor:
        """`W + s B A` in float32, with gradients to `A` and `B`."""
        delta = self._delta(self._active())
        return self.weight if delta is None else self.weight.float() + delta

    @override
    def low_bit_weight(self) -> LowBitTensor:
        """The low-bit weight of base and active adapter. The same object is returned until its value changes."""
        if isinstance(self.weight, LowBitTensor):
            return self.weight
        active = self._active()
        if active != self._cached_for:
            self._kept[self._cached_for] = self._low_bit, self._low_bit_version
            self._low_bit, self._low_bit_version = self._kept.pop(active, (None, None))
            self._cached_for = active
        version = self._version(active)
        if version == self._low_bit_version:
            return self._low_bit
        # What is computed in inference mode could not be saved for backward later.
        with torch.inference_mode(False), torch.no_grad():
            return self._quantize(self.master(), version)

    @override
    def invalidate(self) -> None:
        super().invalidate()
        self._kept.clear()

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.use_quantized_forward:
            return F.linear(x, self.master().to(self.weight.dtype), self.bias)
        # The gradient of the sum is that of the adapter's product; its value is in the low-bit weight already.
        delta = self._delta(self._active()) if torch.is_grad_enabled() and not self.is_frozen else None
        return straight_through_linear(x, self.low_bit_weight(), self.bias, delta, self._product)

    def _active(self) -> tuple[str, ...]:
        (adapter,) = self._adapter
        # PEFT's own merge has put the adapter into `W`.
        if adapter.disable_adapters or adapter.merged:
            return ()
        return tuple(name for name in adapter.active_adapters if name in adapter.lora_A)

    def _factors(self, active: tuple[str, ...]) -> list[torch.nn.Parameter]:
        (adapter,) = self._adapter
        return [part[name].weight for name in active for part in (adapter.lora_A, adapter.lora_B)]

    def _delta(self, active: tuple[str, ...]) -> torch.Tensor | None:
        (adapter,) = self._adapter
        with torch.autocast(self.weight.device.type, enabled=False):
            deltas = [adapter.get_delta_weight(name).float() for name in active]
        return sum(deltas[1:], deltas[0]) if deltas else None

    def _version(self, active: tuple[str, ...]) -> tuple[Any, ...]:
        (adapter,) = self._adapter
        factors = [weight_version(factor) for factor in self._factors(active)]
        return (weight_version(self.weight), *factors, *(adapter.scaling[name] for name in active))

    @override
    def _drop_cache(self) -> None:
        super()._drop_cache()
        self._kept: dict[tuple[str, ...], tuple[LowBitTensor | None, tuple[Any, ...] | None]] = {}

    @override
    def __getstate__(self):
        return {**super().__getstate__(), "_kept": {}}


class _LoraInsideBase(LoraLinear):
    """PEFT's LoRA layer without its branch: the base layer's weight holds the adapter."""

    @override
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.base_layer(x, *args, **kwargs)

    # PEFT writes through `.data`.
    @override
    def merge(self, *args, **kwargs) -> None:
        super().merge(*args, **kwargs)
        self.base_layer.invalidate()

    @override
    def unmerge(self) -> None:
        super().unmerge()
        self.base_layer.invalidate()
