"""
Losses that TRL has no option for: those of tokens, `dppo-tv` and `acr` (equations in `presets.py`), and the choice.

As TRL's `loss_type="grpo"`, terms are averaged over the tokens of a completion, then over completions.
"""

import math
from typing import Any

import torch

from .ratios import sequence_log_ratio
from .tbpo import tbpo_loss, tbpo_metrics


__all__ = ["MAX_RATIO", "OWN_LOSSES", "acr_loss", "dppo_tv_loss", "own_loss"]

OWN_LOSSES = ("tbpo", "dppo-tv", "acr")
MAX_RATIO = 20.0
"""Bound of the ratio to the sampler by which `dppo-tv` weighs a token, as in https://huggingface.co/papers/2602.04879."""


def own_loss(
    config: Any, per_token_logps: torch.Tensor, inputs: dict[str, torch.Tensor], mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """
    Loss of the objectives that are not TRL's, of a micro-batch as TRL makes it.

    Returns:
        The loss; the ratio that makes a KL term of tokens unbiased, `(B, 1)` or `(B, T)`; and metrics of each sequence, NaN
        where it does not count, for [`~trl_qarl.objectives.tbpo.reduce_metrics`].
    """
    old, sampling = inputs["old_per_token_logps"], inputs["sampling_per_token_logps"]
    advantages = inputs["advantages"]
    if config.objective == "tbpo":
        loss, output = tbpo_loss(
            per_token_logps,
            old,
            sampling,
            advantages,
            mask,
            positive_epsilon_high=config.positive_epsilon_high,
            negative_epsilon_low=config.negative_epsilon_low,
            negative_epsilon_high=config.negative_epsilon_high,
            mismatch_cap=config.mismatch_cap,
        )
        ratio = sequence_log_ratio(per_token_logps, old, mask).exp().unsqueeze(1)
        return loss, ratio, tbpo_metrics(output, advantages)
    if config.objective == "dppo-tv":
        loss, dropped = dppo_tv_loss(per_token_logps, sampling, advantages, mask, config.divergence_threshold)
    else:
        epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        bounds = config.epsilon, epsilon_high, config.vllm_importance_sampling_clip_max
        loss, dropped = acr_loss(per_token_logps, old, sampling, advantages, mask, *bounds)
    length = mask.bool().sum(-1)
    share = dropped.sum(-1) / torch.where(length > 0, length, math.nan)
    ratio = torch.exp(torch.where(mask.bool(), per_token_logps - old, 0.0))
    return loss, ratio, {f"{config.objective}/dropped_tokens": share}


def dppo_tv_loss(
    per_token_logps: torch.Tensor,
    sampling_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    threshold: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    DPPO with the total variation of one token: a token counts while its probability has not moved by more than `threshold`
    from the sampler's, in the direction of its advantage.

    Args:
        per_token_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs of the learner now, in nats. The only argument that receives gradient.
        sampling_per_token_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs under which the tokens were sampled; where it is NaN the token gives no gradient.
        advantages (`torch.Tensor` of shape `(B,)`):
            One advantage per sequence.
        mask (`torch.Tensor` of shape `(B, T)`):
            Nonzero for the tokens that count.
        threshold (`float`):
            Bound of the change of probability, in (0, 1).

    Returns:
        The loss, and which tokens were dropped: `bool`, `(B, T)`.
    """
    mask = mask.bool()
    is_known = mask & ~sampling_per_token_logps.isnan()
    now = torch.where(is_known, per_token_logps, 0.0)
    sampling = torch.where(is_known, sampling_per_token_logps, 0.0)
    moved = (torch.exp(now) - torch.exp(sampling)).detach() * advantages.sign().unsqueeze(1)
    keeps = is_known & (moved <= threshold)
    ratio = torch.exp((now - sampling).detach().clamp(max=math.log(MAX_RATIO)))
    terms = torch.where(keeps, ratio * advantages.unsqueeze(1) * now, 0.0)
    return -_mean(terms, mask), mask & ~keeps


def acr_loss(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    sampling_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Clipped loss of tokens weighted by the truncated mismatch `min(w, cap)`, whose upper clip widens by `w / cap` where that
    weight was truncated: truncation has scaled the ratio to the sampler down by as much.

    Args:
        per_token_logps, old_per_token_logps, sampling_per_token_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs of the learner now, of the learner at rollout, and of the sampler (NaN: no mismatch).
        advantages (`torch.Tensor` of shape `(B,)`):
            One advantage per sequence.
        mask (`torch.Tensor` of shape `(B, T)`):
            Nonzero for the tokens that count.
        epsilon, epsilon_high (`float`):
            Offsets of the clip.
        cap (`float` or `None`):
            Bound of the weight; `None` truncates nothing.

    Returns:
        The loss, and which tokens were dropped: `bool`, `(B, T)`.
    """
    mask = mask.bool()
    has_both = mask & ~sampling_per_token_logps.isnan()
    log_weight = torch.where(has_both, old_per_token_logps - sampling_per_token_logps, 0.0)
    log_cap = math.inf if cap is None else math.log(cap)
    low, high = (math.log1p(-epsilon) if epsilon < 1 else -math.inf), math.log1p(epsilon_high)
    widening = (log_weight - log_cap).clamp(min=0.0)
    log_ratio = torch.where(mask, per_token_logps, 0.0) - torch.where(mask, old_per_token_logps, 0.0)
    is_positive = advantages.unsqueeze(1) > 0
    is_above = is_positive & (log_ratio > high + widening)
    is_below = ~is_positive & (log_ratio < low)
    # A ratio outside is constant at its bound: the value of the clip, without gradient and without overflow.
    bounded = torch.where(is_above, high + widening, log_ratio)
    bounded = torch.where(is_below, low, bounded)
    weight = torch.exp(log_weight.clamp(max=log_cap))
    terms = weight * torch.exp(bounded) * advantages.unsqueeze(1)
    return -_mean(torch.where(mask, terms, 0.0), mask), mask & (is_above | is_below) & (advantages != 0).unsqueeze(1)


def _mean(terms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (terms.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
