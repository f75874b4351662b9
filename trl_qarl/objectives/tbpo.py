r"""
Trust-Band Policy Optimization (TBPO), the objective of [QaRL](https://huggingface.co/papers/2604.07853), section 3.

A completion of `L` tokens (mask `m_t = 1`) is one action; its probabilities are geometric means over tokens:

    log r = 1/L sum_t m_t [log pi_learner(o_t; theta)     - log pi_learner(o_t; theta_old)]     proximal ratio
    log w = 1/L sum_t m_t [log pi_learner(o_t; theta_old) - log pi_sampler(o_t; theta_old)]     mismatch weight

    w~   = exp(clip(log w, -log cap, log cap))                                  (Eq. 5), a constant for the gradient
    r~   = clip(r, 0, 1 + positive_epsilon_high)                                         if A > 0
    r~   = clip(r, 1 - negative_epsilon_low, 1 + negative_epsilon_high)         if A < 0
    loss = -mean_i w~_i r~_i A_i

The paper prints Eq. 5 as a clip of `w`, but its bounds `[-log c, log c]` are those of `log w`, which is clipped here.
A ratio outside its band is constant, hence the whole completion gives no gradient: it is *dropped*. The mean runs over
all sequences, and an empty completion contributes 0, as in TRL's `loss_type="grpo"`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from ..forward import Batch
from .objective import TBPO_OPTIONS, Loss, Objective


# Far outside every trust band, far below overflow: exp(89) is inf in float32, and the gradient 0 * inf of a dropped
# sequence would be NaN.
MAX_LOG_RATIO = 20.0

_RESHAPES = "it reshapes the sampling distribution, so sampling log-probs and the learner's would differ"

_REASONS = {
    "epsilon": "TBPO's bounds are `positive_epsilon_high`, `negative_epsilon_low` and `negative_epsilon_high`",
    "epsilon_high": "it bounds a token's ratio; TBPO's bound of a sequence's mean ratio is `positive_epsilon_high`, 4e-4 "
    "in the paper",
    "delta": "the upper bound for negative advantages is `negative_epsilon_high`",
    "importance_sampling_level": "TBPO's ratio is the geometric mean over the sequence; leave it out",
    "sapo_temperature_neg sapo_temperature_pos": "it belongs to `loss_type='sapo'`",
    "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg": "it belongs to `loss_type='vespo'`",
    "off_policy_mask_threshold": "TBPO drops off-policy sequences by its band; narrow `negative_epsilon_low/high` instead",
    "top_entropy_quantile": "a token mask would change the geometric mean; use `loss_type='grpo'`",
    "entropy_coef use_adaptive_entropy": "the entropy bonus is a token-level term; use `loss_type='grpo'`",
    "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
    "vllm_importance_sampling_cap": "TBPO's mismatch weight is the sequence's geometric mean; its bound is `mismatch_cap`",
    "top_p": f"{_RESHAPES}; use 1.0",
    "top_k": f"{_RESHAPES}; use 0",
    "min_p": f"{_RESHAPES}; leave it unset",
    "repetition_penalty": f"{_RESHAPES}; use 1.0",
}
REFUSED_BY_TBPO = {name: why for names, why in _REASONS.items() for name in names.split()}
"""Inherited options that TBPO replaces, or that have no meaning for one clipped ratio per sequence, with reasons."""


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
    `cap` of 1 turns the correction off.
    """
    log_weight = sequence_log_ratio(old_per_token_logps, sampling_per_token_logps, mask)
    return torch.exp(log_weight.clamp(-math.log(cap), math.log(cap)))  # (B,)


def trust_band_clip(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    positive_epsilon_high: float,
    negative_epsilon_low: float,
    negative_epsilon_high: float,
) -> torch.Tensor:
    """
    Clip `ratio` to `[0, 1 + positive_epsilon_high]` where `advantages > 0` and to
    `[1 - negative_epsilon_low, 1 + negative_epsilon_high]` where `advantages < 0`; every shape is `(B,)`. The gradient
    is 1 inside the band, including its bounds, and 0 outside. If the advantage is 0, the ratio passes without
    gradient.
    """
    constant = ratio.detach()

    def clip(low: float, high: float) -> torch.Tensor:
        # The gradient of `clamp` at its bounds is 1 before torch 2.14 and 0 since; a fresh batch with a band of 0 is
        # there. `clamp` of a constant keeps NaN.
        return torch.where((ratio >= low) & (ratio <= high), ratio, constant.clamp(low, high))

    positive = clip(0.0, 1.0 + positive_epsilon_high)
    negative = clip(1.0 - negative_epsilon_low, 1.0 + negative_epsilon_high)
    return torch.where(advantages > 0, positive, torch.where(advantages < 0, negative, constant))


def tbpo_loss(batch: Batch, *, mismatch_cap: float, **epsilons: float) -> Loss:
    """
    Return the TBPO loss of a batch (equations at the top), whose epsilons are arguments of [`trust_band_clip`], and
    `mismatch_cap` that of [`mismatch_weight`]. Advantages of another shape than `(B,)` raise `ValueError`.

    The metrics `tbpo/ratio/*` count completions that are not empty. Among these, `tbpo/dropped/positive_high` counts
    positive advantages, `tbpo/dropped/negative_{low,high}` negative ones, and `tbpo/dropped/total` both. Gathered over
    processes and reduced by [`~trl_qarl.objectives.objective.reduce_metrics`], they are exact for any split.
    """
    old, sampling, advantages, mask, now = batch
    assert now is not None
    # A (B, 1) tensor, as in TRL's own loss, would silently broadcast to (B, B).
    if advantages.shape != now.shape[:1]:
        raise ValueError(f"advantages must have shape ({len(now)},), got {tuple(advantages.shape)}.")
    log_ratio = sequence_log_ratio(now, old.detach(), mask)  # (B,)
    ratio = torch.exp(torch.where(log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, log_ratio))
    weight = mismatch_weight(old, sampling, mask, mismatch_cap)
    is_empty = ~mask.bool().any(-1)
    objective = weight * trust_band_clip(ratio, advantages, **epsilons) * advantages  # (B,)
    value = -torch.where(is_empty, 0.0, objective).mean()

    ratio, positive, negative = ratio.detach(), advantages > 0, advantages < 0
    shares = {
        "positive_high": (ratio > 1.0 + epsilons["positive_epsilon_high"], positive),
        "negative_low": (ratio < 1.0 - epsilons["negative_epsilon_low"], negative),
        "negative_high": (ratio > 1.0 + epsilons["negative_epsilon_high"], negative),
    }
    is_dropped = torch.stack([is_outside & counts for is_outside, counts in shares.values()]).any(0)
    shares["total"] = (is_dropped, positive | negative)
    metrics = {f"tbpo/ratio/{kind}": ratio.masked_fill(is_empty, math.nan) for kind in ("mean", "min", "max")}
    for name, (dropped, counts) in shares.items():
        metrics[f"tbpo/dropped/{name}"] = dropped.to(ratio.dtype).masked_fill(~counts | is_empty, math.nan)
    return Loss(value, metrics, sequence_log_ratio(now, old, mask).exp().unsqueeze(1))


class TBPO(Objective):
    """Trust-Band Policy Optimization, with the options of [`QaRLConfig`]."""

    skips_zero_advantages = True

    @override
    def loss(self, config: Any, batch: Batch) -> Loss:
        return tbpo_loss(batch, **{name: getattr(config, name) for name in TBPO_OPTIONS})

    @override
    def problems(self, config: Any) -> Iterator[str]:
        from trl import GRPOConfig

        for name, why in REFUSED_BY_TBPO.items():
            value = getattr(config, name)
            is_neutral = value == getattr(GRPOConfig, name) or (name == "min_p" and value == 0.0)
            # With vLLM these are refused for every objective.
            is_refused_already = config.use_vllm and why.startswith(_RESHAPES)
            if not is_neutral and not is_refused_already:
                yield f"{name}={value!r} is not honoured by loss_type='tbpo', only by objectives such as 'grpo': {why}."
