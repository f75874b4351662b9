"""Merges an adapter into its base, quantizes the sum, and measures how much of the adapter is left."""

from dataclasses import dataclass

import torch
from torch import nn

from ..quantization.inventory import Inventory
from .tensors import ADAPTER_NAME


@dataclass(frozen=True)
class MergeLoss:
    """
    Effect of quantizing the merged weight on an adapter `D` that was trained next to the low-bit base `Q(W)`.

    `relative_error` is `|Q(W + D) - (Q(W) + D)| / |D|` over all quantized layers: 0 if the merged policy is the
    trained one, 1 if nothing is left of the adapter. `flipped_share` is the share of codes of `Q(W)` that change.
    """

    relative_error: float
    flipped_share: float

    def __str__(self) -> str:
        return (
            f"The merged policy is not the trained one: quantization changes the merged layers by {self.relative_error:.0%} of the "
            f"adapter's own change, and {self.flipped_share:.2%} of their codes differ from the base's. Serve the adapter next to the "
            "base instead, where nothing is lost."
        )


@torch.no_grad()
def merge_adapter(model: nn.Module) -> tuple[nn.Module, MergeLoss]:
    """Add the adapter of `model`, a `PeftModel`, to the masters of its prepared base, and to layers in high precision.
    Return the base model without adapters, prepared as before, and the loss. `ValueError` is raised if the masters are
    gone."""
    inventory = Inventory.of(model)
    frozen = [name for name, layer in inventory.layers.items() if layer.is_frozen]
    if frozen:
        raise ValueError(
            f"An adapter is merged into masters, which are gone here ({frozen[0]!r} has only low-bit weights). Load the adapter on the "
            "high-precision base."
        )
    sums = torch.zeros(4, dtype=torch.float64)
    layers = {id(layer) for layer in inventory.layers.values()}
    for wrapper in inventory.model.modules():
        if ADAPTER_NAME not in getattr(wrapper, "lora_A", ()):
            continue
        delta, layer = wrapper.get_delta_weight(ADAPTER_NAME).float(), wrapper.base_layer
        before = layer.low_bit_weight() if id(layer) in layers else None
        layer.weight.add_(delta.to(layer.weight.dtype))
        if before is not None:
            after = layer.low_bit_weight()
            trained = before.gemm_weight().dequantize(torch.float32) + delta
            error = after.gemm_weight().dequantize(torch.float32) - trained
            flips = before.format.count_flips(before.qdata, after.qdata)
            sums += torch.tensor(
                [error.square().sum(), delta.square().sum(), flips, delta.numel()], dtype=torch.float64
            )
    error, size, flips, count = sums.tolist()
    return model.unload(), MergeLoss((error / size) ** 0.5 if size else 0.0, flips / count if count else 0.0)
