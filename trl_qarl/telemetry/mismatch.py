"""Measurements of the mismatch between the learner at rollout and the sampler, as pure functions of tensors."""

import math

import torch


ERROR_PROBABILITY = 1e-3
"""A token whose probability is below this under learner and sampler alike counts as an error token."""

_PARTS = ("", "/positive", "/negative", "/q1", "/q2", "/q3", "/q4")


def mismatch_sums(
    old_per_token_logps: torch.Tensor,
    sampling_per_token_logps: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Return sums, which reduce exactly over processes, over the tokens that count and have a sampling log-prob.

    With `d = old_per_token_logps - sampling_per_token_logps`, all `(B, T)`, in nats, for `P` parts of the tokens: all,
    and with `advantages`, `(B,)`, those with positive and with negative advantage, and the four quarters of
    completions. The quarter of a token is `floor(4 rank / L)`, with its rank among the tokens of its completion that
    count.

    Returns:
        `(P, 4)` float64 sums of `|d|`, `-d` (k1), `exp(d) - 1 - d` (k3) and tokens, `(2,)` numbers of tokens without a
        sampling log-prob and of error tokens, and `(P,)` maxima of `|d|`, 0 without tokens. k1 and k3 estimate
        `KL(sampler || learner)` (http://joschu.net/blog/kl-approx.html).
    """
    mask = mask.bool()
    known = mask & ~sampling_per_token_logps.isnan()
    parts = [known]
    if advantages is not None:
        sign = advantages.sign().unsqueeze(1)
        rank = mask.cumsum(-1) - 1
        quarter = (4 * rank).div(mask.sum(-1, keepdim=True).clamp(min=1), rounding_mode="floor")
        parts += [known & (sign == 1), known & (sign == -1), *(known & (quarter == i) for i in range(4))]
    difference = old_per_token_logps.double() - sampling_per_token_logps.double()
    of_parts = [difference[tokens] for tokens in parts]
    sums = torch.stack(
        [torch.stack([d.abs().sum(), -d.sum(), (d.exp() - 1 - d).sum(), d.new_tensor(len(d))]) for d in of_parts]
    )
    likelier = torch.maximum(old_per_token_logps, sampling_per_token_logps)
    errors = known & (likelier < math.log(ERROR_PROBABILITY))
    maxima = torch.stack([d.abs().max() if len(d) else d.new_zeros(()) for d in of_parts])
    return sums, torch.stack([(mask & ~known).sum(), errors.sum()]), maxima


def mismatch_metrics(sums: torch.Tensor, counts: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
    """Return mean and maximum of `|d|`, k1 and k3 of each part, and the share of error tokens, from the results of
    [`mismatch_sums`], added over processes, and the largest maxima. A part without tokens is left out."""
    unknown, errors = counts.tolist()
    metrics = {"mismatch/unknown_tokens": float(unknown)}
    for part, (*totals, tokens), maximum in zip(_PARTS, sums.tolist(), maxima.tolist(), strict=False):
        if tokens:
            means = {kind: total / tokens for kind, total in zip(("abs_logp_mean", "k1", "k3"), totals, strict=True)}
            metrics |= {f"mismatch/{kind}{part}": value for kind, value in (means | {"abs_logp_max": maximum}).items()}
    if len(sums) > 1 and sums[0, 3]:
        metrics["rollout/error_token_share"] = errors / sums[0, 3].item()
    return metrics


def weight_metrics(weights: torch.Tensor, advantages: torch.Tensor | None = None) -> dict[str, float]:
    """Return extremes, mean and effective sample size (as a share of the sequences) of the mismatch weights `(B,)` of
    all sequences, the last two with `advantages`, `(B,)`, also by their sign. A sign without sequences is left out."""
    weights = weights.double()
    metrics = {"mismatch/weight_min": weights.min().item(), "mismatch/weight_max": weights.max().item()}
    parts = {"": weights}
    if advantages is not None:
        parts |= {"/positive": weights[advantages > 0], "/negative": weights[advantages < 0]}
    for part, chosen in parts.items():
        if len(chosen):
            metrics[f"mismatch/weight_mean{part}"] = chosen.mean().item()
            share = chosen.sum().square() / chosen.square().sum() / len(chosen)
            metrics[f"mismatch/effective_sample_size{part}"] = share.item()
    return metrics
