"""What is measured about the low-bit weights (`quant/*`): code flips, updates against a quantization step, quantization error."""

import math
from collections.abc import Iterable, Mapping

import torch

from ..quantization.linear import QuantizedLinear


__all__ = [
    "code_flip_rate",
    "sampled_masters",
    "sqnr",
    "update_to_step",
]

_NUM_SAMPLED_ROWS = 32


def code_flip_rate(layers: Iterable[QuantizedLinear]) -> float:
    """
    Return the share of low-bit codes that changed at the last update of the masters, which are quantized here if they
    were not yet.

    NaN before the second quantization. A rate of 0 over many updates means that the masters move less than the codes
    can show: the low-bit policy is stalled.
    """
    flipped = total = 0
    for layer in layers:
        layer.low_bit_weight()
        if layer.num_flipped_codes is not None:
            flipped += layer.num_flipped_codes.item()
            total += layer.weight.numel()
    return flipped / total if total else math.nan


@torch.no_grad()
def sampled_masters(layers: Iterable[tuple[str, QuantizedLinear]]) -> dict[str, torch.Tensor]:
    """Copy up to 32 evenly spaced rows of each master weight, for [`update_to_step`]."""
    return {name: layer.master()[_sampled_rows(layer)].clone() for name, layer in layers}


@torch.no_grad()
def update_to_step(before: Mapping[str, torch.Tensor], layers: Iterable[tuple[str, QuantizedLinear]]) -> float:
    """
    Return the mean `|w - w_before| / step` over the rows of [`sampled_masters`], taken before the update: how far it
    moves a master relative to the distance of neighbouring low-bit values.

    `step` is the magnitude of the scale of the weight's group for integer codes. E4M3 codes lie `2^(max(floor(log2 |q|), -6) - 3)` scales
    apart around the code `q`. NaN without layers.
    """
    total = count = 0.0
    for name, layer in layers:
        old, rows = before[name], _sampled_rows(layer)
        low_bit = layer.low_bit_weight()
        scale = low_bit.scale[rows].float().abs().unsqueeze(-1)  # (R, groups, 1)
        change = (layer.master()[rows].float() - old.float()).abs().view(*scale.shape[:2], -1)
        if layer.scheme.container.type == "float":
            codes = low_bit.qdata[rows].float().abs().view_as(change)
            scale = scale * torch.exp2(codes.log2().floor().clamp(min=-6) - 3)
        total += (change / scale).sum().item()
        count += change.numel()
    return total / count if count else math.nan


def _sampled_rows(layer: QuantizedLinear) -> torch.Tensor:
    stride = -(-layer.out_features // _NUM_SAMPLED_ROWS)
    return torch.arange(0, layer.out_features, stride, device=layer.weight.device)


@torch.no_grad()
def sqnr(layers: Iterable[tuple[str, QuantizedLinear]]) -> dict[str, float]:
    """
    Return the signal-to-quantization-noise ratio of the quantized weights, `10 log10(sum w^2 / sum (w - w')^2)`, in
    dB: `quant/sqnr` of all together, `quant/sqnr/NAME` of the layers whose name ends in `NAME`, such as `q_proj`. NaN
    without noise; nothing about layers whose masters are gone.
    """
    sums: dict[str, list[float]] = {}
    for name, layer in layers:
        if layer.is_frozen:
            continue
        weight = layer.master().float()
        low_bit = layer.low_bit_weight().gemm_weight()
        signal = weight.square().sum().item()
        noise = (weight - low_bit.dequantize(torch.float32)).square().sum().item()
        for key in ("quant/sqnr", f"quant/sqnr/{name.rpartition('.')[2]}"):
            total = sums.setdefault(key, [0.0, 0.0])
            total[0], total[1] = total[0] + signal, total[1] + noise
    return {key: 10 * math.log10(s / n) if s and n else math.nan for key, (s, n) in sums.items()}
