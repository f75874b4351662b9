"""
What is measured about mismatch and quantization, as pure functions of tensors and layers.

Names follow TRL's families: `mismatch/*` compares the learner at rollout with the sampler, `quant/*` describes the
low-bit weights.
"""

import math
from collections.abc import Iterable, Mapping

import torch

from .linear import QuantizedLinear
from .quantize import dequantize_weight


__all__ = ["code_flip_rate", "mismatch_metrics", "mismatch_sums", "sqnr"]


def mismatch_sums(
    old_per_token_logps: torch.Tensor, sampling_per_token_logps: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Sums that reduce exactly over processes, over the tokens that count and whose sampling log-prob is known.

    With `d = old_per_token_logps - sampling_per_token_logps`, all `(B, T)`, in nats:

    Returns:
        `(5,)` float64 sums of: tokens, `|d|`, `-d` (k1), `exp(d) - 1 - d` (k3), tokens without a sampling log-prob; and
        the 0-d maximum of `|d|`. k1 and k3 estimate `KL(sampler || learner)` (http://joschu.net/blog/kl-approx.html).
    """
    mask = mask.bool()
    known = mask & ~sampling_per_token_logps.isnan()
    d = (old_per_token_logps.double() - sampling_per_token_logps.double())[known]
    sums = torch.stack(
        [known.sum().double(), d.abs().sum(), -d.sum(), (d.exp() - 1 - d).sum(), (mask & ~known).sum().double()]
    )
    return sums, d.abs().max() if d.numel() else sums.new_zeros(())


def mismatch_metrics(sums: torch.Tensor, maximum: torch.Tensor, weights: torch.Tensor) -> dict[str, float]:
    """
    `mismatch/*` metrics.

    Args:
        sums (`torch.Tensor`): `(5,)` sums of [`mismatch_sums`], added over processes.
        maximum (`torch.Tensor`): 0-d, the largest `|d|` of all processes.
        weights (`torch.Tensor`): `(B,)` mismatch weights of all sequences.
    """
    tokens, absolute, k1, k3, unknown = sums.tolist()
    if tokens == 0:
        return {"mismatch/unknown_tokens": unknown}
    weights = weights.double()
    return {
        "mismatch/abs_logp_mean": absolute / tokens,
        "mismatch/abs_logp_max": maximum.item(),
        "mismatch/k1": k1 / tokens,
        "mismatch/k3": k3 / tokens,
        "mismatch/weight_mean": weights.mean().item(),
        "mismatch/weight_min": weights.min().item(),
        "mismatch/weight_max": weights.max().item(),
        "mismatch/effective_sample_size": (weights.sum().square() / weights.square().sum() / weights.numel()).item(),
        "mismatch/unknown_tokens": unknown,
    }


def code_flip_rate(layers: Iterable[QuantizedLinear]) -> float:
    """
    Share of low-bit codes that changed at the last update of the masters, which are quantized here if they were not yet.

    NaN before the second quantization. A rate of 0 over many updates means that the masters move less than the codes
    can show: the low-bit policy is deaf to its updates.
    """
    flipped = total = 0
    for layer in layers:
        layer.low_bit_weight()
        if layer.num_flipped_codes is not None:
            flipped += layer.num_flipped_codes.item()
            total += layer.weight.numel()
    return flipped / total if total else math.nan


@torch.no_grad()
def sqnr(layers: Mapping[str, QuantizedLinear]) -> float:
    """Signal-to-quantization-noise ratio of all quantized weights together, `10 log10(sum w^2 / sum (w - w')^2)`, in dB."""
    signal = noise = 0.0
    for layer in layers.values():
        weight = layer.weight.float()
        signal += weight.square().sum().item()
        noise += (weight - dequantize_weight(layer.low_bit_weight(), torch.float32)).square().sum().item()
    return 10 * math.log10(signal / noise) if signal and noise else math.nan
