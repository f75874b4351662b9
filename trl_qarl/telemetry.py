"""
What is measured about mismatch and quantization, as pure functions of tensors and layers.

Names follow TRL's families: `mismatch/*` compares the learner at rollout with the sampler, `quant/*` describes the
low-bit weights, `rollout/*` what was sampled.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .linear import QuantizedLinear
from .quantize import dequantize_weight, product_weight


__all__ = [
    "DEAF_FLIP_RATE",
    "DEAF_UPDATES",
    "ERROR_PROBABILITY",
    "HISTOGRAM_EDGES",
    "code_flip_rate",
    "has_loop",
    "is_deaf",
    "is_garbled",
    "mismatch_metrics",
    "mismatch_sums",
    "ratio_histograms",
    "sampled_masters",
    "split_metrics",
    "split_sums",
    "sqnr",
    "update_to_step",
    "weight_metrics",
    "worst_examples",
    "worst_span",
]

ERROR_PROBABILITY = 1e-3
"""A token whose probability is below this under learner and sampler alike counts as an error token."""

DEAF_FLIP_RATE, DEAF_UPDATES = 1e-6, 50
"""Code-flip rate below which, over that many updates in a row, the low-bit policy is called deaf."""

_SPLITS = ("positive", "negative", "q1", "q2", "q3", "q4")
_MAX_LOOP_PERIOD, _MIN_LOOP_REPEATS, _MIN_LOOP_TOKENS = 64, 4, 16
_NUM_SAMPLED_ROWS = 32

_LOG_EDGES = [10 ** (exponent / 4) for exponent in range(-20, 5)]
_LOG_EDGES = [-edge for edge in reversed(_LOG_EDGES)] + _LOG_EDGES

HISTOGRAM_EDGES = [math.exp(edge) for edge in _LOG_EDGES]
"""
Edges of the histograms of ratios: the distance from 1 in nats is log-spaced on both sides, from 1e-5 to 10, as trust bands are
some 1e-4 wide and mismatches of whole completions reach several nats.
"""


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


def split_sums(
    old_per_token_logps: torch.Tensor,
    sampling_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Sums for [`split_metrics`], which add up over processes, and maxima.

    Arguments as in [`mismatch_sums`], and `advantages` of shape `(B,)`. A token's quarter is that of its rank among the
    tokens of its completion that count, `floor(4 rank / L)`.

    Returns:
        `(4, 7)` float64 sums: of `|d|`, `-d`, `exp(d) - 1 - d` and of tokens, over those of positive and of negative advantage,
        of each quarter, and of error tokens, whose last row counts all tokens. And `(6,)` maxima of `|d|` over the same tokens
        but the last, 0 where there is none.
    """
    mask = mask.bool()
    known = mask & ~sampling_per_token_logps.isnan()
    d = torch.where(known, old_per_token_logps.double() - sampling_per_token_logps.double(), 0.0)  # (B, T)
    rank = mask.cumsum(-1) - 1
    quarter = (4 * rank).div(mask.sum(-1, keepdim=True).clamp(min=1), rounding_mode="floor")
    sign = advantages.sign().unsqueeze(1)
    chosen = [known & (sign == 1), known & (sign == -1), *(known & (quarter == i) for i in range(4))]
    likelier = torch.maximum(old_per_token_logps, sampling_per_token_logps)
    errors = known & (likelier < math.log(ERROR_PROBABILITY))
    values = (d.abs(), -d, d.exp() - 1 - d, torch.ones_like(d))
    sums = torch.stack([torch.stack([(value * tokens).sum() for tokens in chosen]) for value in values])  # (4, 6)
    of_errors = torch.stack([errors.sum().double()] * 3 + [known.sum().double()])
    maxima = torch.stack([(d.abs() * tokens).amax() if d.numel() else sums.new_zeros(()) for tokens in chosen])
    return torch.cat([sums, of_errors.unsqueeze(1)], dim=1), maxima


def split_metrics(sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
    """
    Mean and maximum of `|d|`, k1 and k3 by sign of the advantage and by quarter of the completion, and the share of error
    tokens, from [`split_sums`] added over processes and its maxima over them. A split without tokens is left out.
    """
    means = sums[:3] / sums[3]
    metrics = {}
    for index, name in enumerate(_SPLITS):
        if sums[3, index] == 0:
            continue
        for kind, value in zip(("abs_logp_mean", "k1", "k3"), means[:, index].tolist(), strict=True):
            metrics[f"mismatch/{kind}/{name}"] = value
        metrics[f"mismatch/abs_logp_max/{name}"] = maxima[index].item()
    if sums[3, -1] > 0:
        metrics["rollout/error_token_share"] = means[0, -1].item()
    return metrics


def weight_metrics(weights: torch.Tensor, advantages: torch.Tensor) -> dict[str, float]:
    """
    Mean and effective sample size (a share of the sequences) of the mismatch weights `(B,)` of all sequences by the sign of their
    advantage, `(B,)`. A sign without sequences is left out.
    """
    metrics = {}
    for name, sign in (("positive", 1), ("negative", -1)):
        chosen = weights.double()[advantages.sign() == sign]
        if len(chosen):
            size = chosen.sum().square() / chosen.square().sum() / len(chosen)
            metrics[f"mismatch/weight_mean/{name}"] = chosen.mean().item()
            metrics[f"mismatch/effective_sample_size/{name}"] = size.item()
    return metrics


def worst_span(scores: Sequence[float]) -> tuple[int, int]:
    """`(start, stop)` of the run of tokens around the largest score whose scores all exceed a quarter of it; NaN is no score."""
    values = [-math.inf if math.isnan(score) else score for score in scores]
    peak = max(range(len(values)), key=values.__getitem__)
    start, stop = peak, peak + 1
    while start > 0 and values[start - 1] > values[peak] / 4:
        start -= 1
    while stop < len(values) and values[stop] > values[peak] / 4:
        stop += 1
    return start, stop


def worst_examples(
    old_per_token_logps: torch.Tensor,
    sampling_per_token_logps: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """
    Two completions as text with the offending span between `⟦` and `⟧`, see [`worst_span`]: that of the largest `|d|`
    (`"mismatch"`), and that of the token least likely under learner and sampler alike (`"improbable"`, by `-log p`).

    Args:
        old_per_token_logps, sampling_per_token_logps, mask (`torch.Tensor` of shape `(B, T)`):
            As in [`mismatch_sums`].
        advantages (`torch.Tensor` of shape `(B,)`):
            Reported with the completion.
        prompt_ids, completion_ids (`B` sequences of `int`):
            Tokens without padding.
        decode (`Callable`):
            From token ids to text.

    Returns:
        `{"kind", "nats", "advantage", "prompt", "completion"}`, texts cut to the last 200 characters of the prompt and about 300
        around the span; none if no token counts or no score is finite.
    """
    known = mask.bool() & ~sampling_per_token_logps.isnan()
    examples = []
    for kind, scores in (
        ("mismatch", (old_per_token_logps - sampling_per_token_logps).abs()),
        ("improbable", -torch.maximum(old_per_token_logps, sampling_per_token_logps)),
    ):
        scores = scores.float().masked_fill(~known | ~scores.isfinite(), math.nan)
        worst = scores.nan_to_num(nan=-math.inf).amax(-1)  # (B,)
        row = int(worst.argmax())
        if not worst[row].isfinite():
            continue
        ids = list(completion_ids[row])
        start, stop = worst_span(scores[row, : len(ids)].tolist())
        text = f"{decode(ids[:start])[-200:]}⟦{decode(ids[start:stop])}⟧{decode(ids[stop:])[:100]}"
        examples.append(
            {
                "kind": kind,
                "nats": worst[row].item(),
                "advantage": advantages[row].item(),
                "prompt": decode(list(prompt_ids[row]))[-200:],
                "completion": text,
            }
        )
    return examples


def has_loop(token_ids: Sequence[int]) -> bool:
    """
    Whether a completion repeats itself: a block of up to 64 tokens that occurs at least 4 times in a row, over at least 16
    tokens. A stretch of `n` tokens has period `p` where `n - p` tokens in a row equal the one `p` before them.
    """
    ids = torch.as_tensor(token_ids)
    for period in range(1, min(_MAX_LOOP_PERIOD, len(ids) // _MIN_LOOP_REPEATS) + 1):
        breaks = (ids[period:] != ids[:-period]).nonzero().flatten()
        ends = torch.cat([breaks.new_tensor([-1]), breaks, breaks.new_tensor([len(ids) - period])])
        longest = int(ends.diff().max()) - 1 + period
        if longest >= max(_MIN_LOOP_REPEATS * period, _MIN_LOOP_TOKENS):
            return True
    return False


def is_garbled(text: str) -> bool:
    """
    Whether a text holds U+FFFD, the mark of bytes that are no character. At the end it does not count: there a completion
    may have been cut inside a character.
    """
    return "\ufffd" in text.rstrip("\ufffd")


def ratio_histograms(log_ratios: torch.Tensor, advantages: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """
    Histograms of ratios by the sign of the advantage, over [`HISTOGRAM_EDGES`].

    Args:
        log_ratios (`torch.Tensor` of shape `(Q, N)`):
            Logs of `Q` quantities for each sequence or token, in nats. What lies beyond the edges is counted in the outermost
            bins, NaN nowhere.
        advantages (`torch.Tensor` of shape `(N,)`):
            Where the advantage is 0, nothing is counted.
        counts (`torch.Tensor` of shape `(N,)`):
            `bool`, whether the sequence or token counts at all.

    Returns:
        `(2 Q, 49)` int64: for each quantity the histogram of positive advantages, then that of negative ones.
    """
    edges = torch.tensor(_LOG_EDGES, dtype=torch.float64, device=log_ratios.device)
    rows = []
    for values in log_ratios.double():
        for sign in (1, -1):
            chosen = values[counts & (advantages.sign() == sign) & ~values.isnan()]
            # Bins are closed on the left, as are those of `numpy.histogram`.
            bins = torch.bucketize(chosen, edges[1:-1], right=True)
            rows.append(torch.bincount(bins, minlength=len(edges) - 1))
    return torch.stack(rows)


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


def is_deaf(code_flip_rates: Sequence[float]) -> bool:
    """Whether the last [`DEAF_UPDATES`] rates of [`code_flip_rate`] are all below [`DEAF_FLIP_RATE`]; NaN is no rate."""
    last = [rate for rate in code_flip_rates if not math.isnan(rate)][-DEAF_UPDATES:]
    return len(last) == DEAF_UPDATES and max(last) < DEAF_FLIP_RATE


@torch.no_grad()
def sampled_masters(layers: Mapping[str, QuantizedLinear]) -> dict[str, torch.Tensor]:
    """Copies of up to 32 evenly spaced rows of each master weight, for [`update_to_step`]."""
    return {name: layer.weight[_sampled_rows(layer)].clone() for name, layer in layers.items()}


@torch.no_grad()
def update_to_step(before: Mapping[str, torch.Tensor], layers: Mapping[str, QuantizedLinear]) -> float:
    """
    Mean `|w - w_before| / step` over the rows of [`sampled_masters`], taken before the update: how far it moves a master
    relative to the distance of neighbouring low-bit values.

    `step` is the scale of the weight's group for integer codes. E4M3 codes lie `2^(max(floor(log2 |q|), -6) - 3)` scales
    apart around the code `q`. NaN without layers.
    """
    total = count = 0.0
    for name, old in before.items():
        layer, rows = layers[name], _sampled_rows(layers[name])
        low_bit = layer.low_bit_weight()
        scale = low_bit.scale[rows].float().unsqueeze(-1)  # (R, groups, 1)
        change = (layer.weight[rows].float() - old.float()).abs().view(*scale.shape[:2], -1)
        if layer.scheme.weight_type == "float":
            codes = low_bit.qdata[rows].float().abs().view_as(change)
            scale = scale * torch.exp2(codes.log2().floor().clamp(min=-6) - 3)
        total += (change / scale).sum().item()
        count += change.numel()
    return total / count if count else math.nan


def _sampled_rows(layer: QuantizedLinear) -> torch.Tensor:
    stride = -(-layer.out_features // _NUM_SAMPLED_ROWS)
    return torch.arange(0, layer.out_features, stride, device=layer.weight.device)


@torch.no_grad()
def sqnr(layers: Mapping[str, QuantizedLinear]) -> dict[str, float]:
    """
    Signal-to-quantization-noise ratio of the quantized weights, `10 log10(sum w^2 / sum (w - w')^2)`, in dB: `quant/sqnr` of all
    together, `quant/sqnr/NAME` of the layers whose name ends in `NAME`, such as `q_proj`. NaN without noise.
    """
    sums: dict[str, list[float]] = {}
    for name, layer in layers.items():
        weight = layer.weight.float()
        low_bit = product_weight(layer.low_bit_weight(), layer.scheme)
        signal = weight.square().sum().item()
        noise = (weight - dequantize_weight(low_bit, torch.float32)).square().sum().item()
        for key in ("quant/sqnr", f"quant/sqnr/{name.rpartition('.')[2]}"):
            total = sums.setdefault(key, [0.0, 0.0])
            total[0], total[1] = total[0] + signal, total[1] + noise
    return {key: 10 * math.log10(s / n) if s and n else math.nan for key, (s, n) in sums.items()}
