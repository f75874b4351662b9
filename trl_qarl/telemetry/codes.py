"""Measurements of low-bit weights (`quant/*`): code flips, updates in quantization steps, and quantization error."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import torch

from ..quantization.weight import QuantizedWeight


_NUM_SAMPLED_ROWS = 32

AddUp = Callable[[list[float]], list[float]]
"""Adds up numbers over the processes among which masters are sharded; each process measures its own rows."""


def code_flip_rate(weights: Iterable[QuantizedWeight], add_up: AddUp = list) -> float:
    """Return the share of low-bit codes that changed at the last update of the masters, which are quantized if
    needed; NaN before the second quantization. A share of 0 over many updates means that the policy is stalled."""
    flipped = total = 0
    for weight in weights:
        low_bit = weight.low_bit_weight()
        if weight.num_flipped_codes is not None:
            flipped += weight.num_flipped_codes.item()
            total += low_bit.numel()
    flipped, total = add_up([flipped, total])
    return flipped / total if total else math.nan


@torch.no_grad()
def sampled_masters(weights: Iterable[tuple[str, QuantizedWeight]]) -> dict[str, torch.Tensor]:
    """Copy up to 32 evenly spaced rows of each master weight, for [`update_to_step`]."""
    return {name: _rows(weight)[_sampled_rows(weight)].clone() for name, weight in weights}


@torch.no_grad()
def update_to_step(
    before: Mapping[str, torch.Tensor], weights: Iterable[tuple[str, QuantizedWeight]], add_up: AddUp = list
) -> float:
    """
    Return the mean `|w - w_before| / step` over the rows of [`sampled_masters`], taken before the update: the change
    of a master relative to the distance of neighbouring low-bit values.

    `step` is the magnitude of the scale of the weight's group for integer codes. E4M3 codes lie
    `2^(max(floor(log2 |q|), -6) - 3)` scales apart around the code `q`, E2M1 codes `2^(max(floor(log2 |q|), 0) - 1)`.
    NaN without layers.
    """
    total = count = 0.0
    for name, weight in weights:
        old, rows = before[name], _sampled_rows(weight)
        low_bit = weight.low_bit_weight().take(rows)
        scale = low_bit.scale_values().abs().unsqueeze(-1)
        change = (_rows(weight)[rows].float() - old.float()).abs()
        change = change.view(*scale.shape[:2], change.shape[1] // scale.shape[1])
        container = weight.scheme.container
        if container.type == "float":
            codes = low_bit.codes().abs().view_as(change)
            smallest, num_mantissa_bits = (-6, 3) if container.num_bits == 8 else (0, 1)
            scale = scale * torch.exp2(codes.log2().floor().clamp(min=smallest) - num_mantissa_bits)
        total += (change / scale).sum().item()
        count += change.numel()
    total, count = add_up([total, count])
    return total / count if count else math.nan


def _rows(weight: QuantizedWeight) -> torch.Tensor:
    # The rows of all experts, one after the other; of a sharded master those of this process.
    return weight.master().flatten(0, -2)


def _sampled_rows(weight: QuantizedWeight) -> torch.Tensor:
    """Return the sampled rows in this process' shard of the weight, counted from the shard's first row."""
    held, num_rows = weight.source.rows(weight.parameter), weight.shape[:-1].numel()
    stride = -(-num_rows // _NUM_SAMPLED_ROWS)
    rows = torch.arange(0, num_rows, stride, device=weight.parameter.device)
    return rows[(rows >= held.start) & (rows < held.stop)] - held.start


@torch.no_grad()
def sqnr(weights: Iterable[tuple[str, QuantizedWeight]], add_up: AddUp = list) -> dict[str, float]:
    """
    Return the signal-to-quantization-noise ratio of the quantized weights, `10 log10(sum w^2 / sum (w - w')^2)`, in
    dB: `quant/sqnr` for all together, `quant/sqnr/NAME` for names that end in `NAME`, such as `q_proj`. NaN without
    noise. Weights without masters are left out.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, weight in weights:
        if weight.is_frozen:
            continue
        totals = sums["quant/sqnr"], sums[f"quant/sqnr/{name.rpartition('.')[2]}"]
        # One expert at a time: intermediate results are as large as the masters.
        for master, low_bit in weight.matrices():
            master = master.float()
            signal = master.square().sum().item()
            noise = (master - low_bit.gemm_weight().dequantize(torch.float32)).square().sum().item()
            for total in totals:
                total[0] += signal
                total[1] += noise
    added = add_up([*chain.from_iterable(sums.values())])
    pairs = zip(sums, added[::2], added[1::2], strict=True)
    return {key: 10 * math.log10(s / n) if s and n else math.nan for key, s, n in pairs}
