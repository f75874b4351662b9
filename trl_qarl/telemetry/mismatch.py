"""Measurements of the mismatch between the learner at rollout and the sampler, as pure functions of tensors."""

import math

import torch

from .run_files import LOG_EDGES


ERROR_PROBABILITY = 1e-3
"""A token whose probability is below this under learner and sampler alike counts as an error token."""

_SPLITS = ("positive", "negative", "q1", "q2", "q3", "q4")


def mismatch_sums(
    old_per_token_logps: torch.Tensor, sampling_per_token_logps: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return sums, which reduce exactly over processes, over the tokens that count and have a sampling log-prob.

    With `d = old_per_token_logps - sampling_per_token_logps`, all `(B, T)`, in nats:

    Returns:
        `(5,)` float64 sums of: tokens, `|d|`, `-d` (k1), `exp(d) - 1 - d` (k3), tokens without a sampling log-prob;
        and the 0-d maximum of `|d|`. k1 and k3 estimate `KL(sampler || learner)`
        (http://joschu.net/blog/kl-approx.html).
    """
    mask = mask.bool()
    known = mask & ~sampling_per_token_logps.isnan()
    d = (old_per_token_logps.double() - sampling_per_token_logps.double())[known]
    sums = torch.stack(
        [known.sum().double(), d.abs().sum(), -d.sum(), (d.exp() - 1 - d).sum(), (mask & ~known).sum().double()]
    )
    return sums, d.abs().max() if d.numel() else sums.new_zeros(())


def mismatch_metrics(sums: torch.Tensor, maximum: torch.Tensor, weights: torch.Tensor) -> dict[str, float]:
    """Return the `mismatch/*` metrics from the `(5,)` sums of [`mismatch_sums`], added over processes, from `maximum`,
    the largest `|d|` of all processes, and from the `(B,)` mismatch weights of all sequences."""
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
        "mismatch/effective_sample_size": _effective_sample_size(weights),
        "mismatch/unknown_tokens": unknown,
    }


def split_sums(
    old_per_token_logps: torch.Tensor,
    sampling_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return sums for [`split_metrics`], which add up over processes, and maxima.

    Arguments are as in [`mismatch_sums`], with `advantages` of shape `(B,)`. The quarter of a token is
    `floor(4 rank / L)`, with its rank among the tokens of its completion that count.

    Returns:
        `(4, 7)` float64 sums of `|d|`, `-d`, `exp(d) - 1 - d` and tokens. The columns are tokens with positive and
        with negative advantage, the four quarters, and error tokens, where the last row counts all tokens. And `(6,)`
        maxima of `|d|` for all but the last column, 0 without tokens.
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
    Return mean and maximum of `|d|`, k1 and k3 by sign of the advantage and by quarter of the completion, and the
    share of error tokens, from [`split_sums`] added over processes and its maxima over them. A split without tokens is
    left out.
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
    """Return mean and effective sample size (as a share of the sequences) of the mismatch weights `(B,)` of all
    sequences, by the sign of their advantage, `(B,)`. A sign without sequences is left out."""
    metrics = {}
    for name, sign in (("positive", 1), ("negative", -1)):
        chosen = weights.double()[advantages.sign() == sign]
        if len(chosen):
            metrics[f"mismatch/weight_mean/{name}"] = chosen.mean().item()
            metrics[f"mismatch/effective_sample_size/{name}"] = _effective_sample_size(chosen)
    return metrics


def _effective_sample_size(weights: torch.Tensor) -> float:
    return (weights.sum().square() / weights.square().sum() / weights.numel()).item()


def ratio_histograms(log_ratios: torch.Tensor, advantages: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """
    Return histograms of ratios over [`HISTOGRAM_EDGES`], `(2 Q, 49)` int64. `log_ratios`, `(Q, N)`, are the logs, in
    nats, of `Q` quantities of each sequence or token. Each quantity has a histogram for positive `advantages`, `(N,)`,
    followed by one for negative ones. Values beyond the edges go to the outermost bins. NaN, advantages of 0 and
    values that are False in `counts`, `(N,)`, are left out.
    """
    edges = torch.tensor(LOG_EDGES, dtype=torch.float64, device=log_ratios.device)
    rows = []
    for values in log_ratios.double():
        for sign in (1, -1):
            chosen = values[counts & (advantages.sign() == sign) & ~values.isnan()]
            # Bins are closed on the left, as in `numpy.histogram`.
            bins = torch.bucketize(chosen, edges[1:-1], right=True)
            rows.append(torch.bincount(bins, minlength=len(edges) - 1))
    return torch.stack(rows)
