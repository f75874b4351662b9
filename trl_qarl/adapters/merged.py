"""
LoRA inside the low-bit weight: base and adapter are quantized together, and the engine gets one low-bit matrix.

    forward   y = kernel(Q(x), Q(W + s B A)) + b                  one low-bit product, without a second branch
    backward  dA = s B.T @ dW,  dB = s dW @ A.T,  dW = dy.T @ x'          straight through both quantizers

`W` is frozen in the precision in which it was loaded; the sum is computed in float32. An adapter whose product stays
below half a quantization step changes no code and has no effect, which `quant/code_flip_rate` shows.
"""

from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from typing_extensions import override

from ..quantization.storage import storage_of, weight_version, whole
from ..quantization.weight import MasterSource


def merge_adapters(model: PeftModel) -> None:
    """Have every adapted layer of `model`, all prepared by [`prepare_model`], quantize base and adapter together."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.base_layer.quantized_weights["weight"].source = LoraSource(module)
            module.base_layer.invalidate()


class LoraSource(MasterSource):
    """
    `W + s B A` of the active adapter of a LoRA layer around the quantized layer, whose weight stays `W`. While
    adapters are disabled, as for TRL's reference policy, it is `W`. Until [`~LoraSource.release`], the LoRA layer only
    calls the layer inside it.
    """

    holds_adapter = True

    def __init__(self, adapter: LoraLinear):
        self.adapter = adapter
        # Set on the instance, where torch and PEFT look first, in a form that can be copied and pickled.
        adapter.forward = partial(_forward_without_branch, adapter)
        # PEFT writes through `.data`.
        adapter.merge, adapter.unmerge = (
            partial(_call_and_invalidate, adapter, name) for name in ("merge", "unmerge")
        )

    @override
    def active(self) -> tuple[str, ...]:
        # PEFT's own merge has already added the adapter to `W`.
        if self.adapter.disable_adapters or self.adapter.merged:
            return ()
        return tuple(name for name in self.adapter.active_adapters if name in self.adapter.lora_A)

    @override
    def version(self, weight: torch.Tensor) -> tuple[Any, ...]:
        active = self.active()
        tensors = [weight, *self._factors(active)]
        return (*map(weight_version, tensors), *(self.adapter.scaling[name] for name in active))

    @override
    def value(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the sum in float32, with gradients unless sharded; then it has the rows of this process."""
        storage = storage_of(weight)
        delta = self._delta() if storage.is_whole else self._delta_of_rows()
        weight = storage.value(weight)
        return weight if delta is None else weight.float() + delta

    @override
    def gradient(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return `s B A`, whose gradient is that of the sum."""
        return self._delta()

    @override
    def is_trained(self, weight: torch.Tensor) -> bool:
        return any(factor.requires_grad for factor in self._factors(self.active()))

    @override
    def release(self) -> None:
        """Let the adapter run next to the layer again."""
        del self.adapter.forward, self.adapter.merge, self.adapter.unmerge

    def _factors(self, active: tuple[str, ...]) -> list[torch.nn.Parameter]:
        return [part[name].weight for name in active for part in (self.adapter.lora_A, self.adapter.lora_B)]

    def _delta(self) -> torch.Tensor | None:
        active = self.active()
        if not active:
            return None
        device = self.adapter.lora_A[active[0]].weight.device
        with torch.autocast(device.type, enabled=False):
            deltas = [self.adapter.get_delta_weight(name).float() for name in active]
        return sum(deltas[1:], deltas[0])

    @torch.no_grad()
    def _delta_of_rows(self) -> torch.Tensor | None:
        # The rows of `B` are sharded like those of `W`; every process needs the whole `A`, which is small.
        parts = []
        for name in self.active():
            a, b = self._factors((name,))
            rows = storage_of(b).value(b).float()
            parts.append(rows @ whole(a).float().to(rows.device) * self.adapter.scaling[name])
        return sum(parts[1:], parts[0]) if parts else None


def _forward_without_branch(adapter: LoraLinear, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return adapter.base_layer(x, *args, **kwargs)


def _call_and_invalidate(adapter: LoraLinear, name: str, *args: Any, **kwargs: Any) -> None:
    getattr(type(adapter), name)(adapter, *args, **kwargs)
    adapter.base_layer.invalidate()
