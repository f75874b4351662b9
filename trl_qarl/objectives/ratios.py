"""Probability ratios between learner and sampler, and the weights of objectives computed from them."""

import math

import torch


@torch.no_grad()
def mismatch_ratio(
    old_per_token_logps: torch.Tensor,
    sampling_per_token_logps: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> torch.Tensor:
    """
    Return the bounded probability ratio between learner and sampler at rollout, by which TRL multiplies the loss of
    vLLM rollouts.

        w_t = exp(old_t - sampling_t)                `token_*`, shape `(B, T)`
        W   = exp(sum_t (old_t - sampling_t))        `sequence_*`, shape `(B, 1)`

    `*_truncate` clamps to `[clip_min, clip_max]` (TIS, https://fengyao.notion.site/off-policy-rl); `*_mask` sets
    ratios outside to 0 (MIS). `None` stands for no bound. The result has no gradient.

    Tensors are those of a [`~trl_qarl.forward.Batch`]. A sampling log-prob of NaN counts as no mismatch. Tokens
    outside of `mask` may have any value and get ratio 1. Another `mode` than these four raises `ValueError`.
    """
    level, _, bound = mode.partition("_")
    if level not in ("token", "sequence") or bound not in ("truncate", "mask"):
        raise ValueError(
            f"mode={mode!r} is unknown. Choose 'token_truncate', 'token_mask', 'sequence_truncate' or 'sequence_mask'."
        )
    counts = mask.bool() & ~sampling_per_token_logps.isnan()
    log_ratio = torch.where(counts, old_per_token_logps - sampling_per_token_logps, 0.0)
    ratio = torch.exp(log_ratio.sum(-1, keepdim=True) if level == "sequence" else log_ratio)
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    if bound == "truncate":
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@torch.no_grad()
def geometric_mask(
    old_per_token_logps: torch.Tensor,
    sampling_per_token_logps: torch.Tensor,
    mask: torch.Tensor,
    low: float,
    high: float,
) -> torch.Tensor:
    """Return 1 if the geometric-mean mismatch of a completion lies in `[low, high]`, else 0: shape `(B, 1)`."""
    log_ratio = sequence_log_ratio(old_per_token_logps, sampling_per_token_logps, mask)
    return ((log_ratio >= math.log(low)) & (log_ratio <= math.log(high))).to(log_ratio.dtype).unsqueeze(1)


@torch.no_grad()
def kpop_weight(
    old_per_token_logps: torch.Tensor, sampling_per_token_logps: torch.Tensor, mask: torch.Tensor, threshold: float
) -> torch.Tensor:
    """
    Return the token mismatch `w` if neither direction of [`binary_kl`] between learner and sampler exceeds `threshold`
    nats, else 0: shape `(B, T)`. Tokens are handled as in [`mismatch_ratio`].
    """
    counts = mask.bool() & ~sampling_per_token_logps.isnan()
    old = torch.where(counts, old_per_token_logps, -1.0)
    sampling = torch.where(counts, sampling_per_token_logps, -1.0)
    is_near = torch.maximum(binary_kl(old, sampling), binary_kl(sampling, old)) <= threshold
    # Decide before `exp`: a ratio that would overflow is dropped.
    return torch.exp(torch.where(is_near, old - sampling, 0.0)) * is_near


def binary_kl(logps: torch.Tensor, other_logps: torch.Tensor) -> torch.Tensor:
    """
    Kullback-Leibler divergence in nats between two distributions of *this token or any other*: `p log(p / q) +
    (1 - p) log((1 - p) / (1 - q))`, elementwise. Probabilities are kept in `[1e-6, 1 - 1e-6]`.
    """
    p, q = (torch.exp(values).clamp(1e-6, 1 - 1e-6) for values in (logps, other_logps))
    return p * (p.log() - q.log()) + (1 - p) * (torch.log1p(-p) - torch.log1p(-q))


def sequence_log_ratio(
    per_token_logps: torch.Tensor, reference_per_token_logps: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """
    Log of the geometric-mean probability ratio: `1/L sum_t m_t (per_token_logps - reference_per_token_logps)`.

    All arguments have shape `(B, T)`, the result `(B,)`, float32 or wider. Positions where `mask` is zero may have any
    value, including NaN and inf. A token whose reference is NaN (vLLM may return it) counts in `L` with a difference
    of 0; a NaN in `per_token_logps` is not hidden. An empty completion gives 0.
    """
    mask = mask.bool()
    has_both = mask & ~torch.isnan(reference_per_token_logps)
    dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
    # Select before subtracting: NaN * 0 is NaN, in the value and in the gradient.
    log_ratio = torch.where(has_both, per_token_logps.to(dtype), 0.0)  # (B, T)
    log_ratio = log_ratio - torch.where(has_both, reference_per_token_logps.to(dtype), 0.0)
    return log_ratio.sum(-1) / mask.sum(-1).clamp(min=1)  # (B,)


@torch.no_grad()
def mismatch_weight(
    old_per_token_logps: torch.Tensor, sampling_per_token_logps: torch.Tensor, mask: torch.Tensor, cap: float
) -> torch.Tensor:
    """
    Return the weight `w~` (Eq. 5) that corrects for sampling with the engine instead of the learner: shape `(B,)`, in
    `[1/cap, cap]`, without gradient, 1 for an empty completion. Tokens are handled as in [`sequence_log_ratio`]. A
    `cap` below 1 raises `ValueError`; 1 turns the correction off.
    """
    if not cap >= 1.0:
        raise ValueError(f"mismatch_cap must be at least 1 (1 turns the correction off), got {cap}.")
    log_weight = sequence_log_ratio(old_per_token_logps, sampling_per_token_logps, mask)
    return torch.exp(log_weight.clamp(-math.log(cap), math.log(cap)))  # (B,)
