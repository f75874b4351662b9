r"""
Losses of tokens that TRL has no option for, of what others use against the mismatch. With `r` and `w` of `presets.py`,
`b = r w`, and `p` the probabilities of a token under the learner, `p_s` under the sampler:

    dppo-tv         1[sign(A) (p - p_s) <= d] min(b, 20) A log p      https://huggingface.co/papers/2602.04879;
                                                                      min(b, 20) is a constant
    acr             min(w, C) min(r A, clip(r, 1 - e, (1 + e_high) max(1, w / C)) A)
                                                                      https://huggingface.co/papers/2602.13953

As TRL's `loss_type="grpo"`, terms are averaged over the tokens of a completion, then over completions. A token whose
sampling log-prob is not known has `w = 1` under `acr` and does not count under `dppo-tv`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from ..forward import Batch
from .objective import NO_BOUNDS, Bounds, Loss
from .options import BOUNDS_OF_MISMATCH, OF_TRLS_LOSS, clip_offsets, refuse_changed
from .others import OPTIONS, SamplerRule, problems_of_threshold


__all__ = ["ACR", "DPPO_TV", "MAX_RATIO", "acr_loss", "dppo_tv_loss"]

MAX_RATIO = 20.0
"""Bound of the ratio to the sampler by which `dppo-tv` weighs a token, as in
https://huggingface.co/papers/2602.04879."""


def dppo_tv_loss(
    per_token_logps: torch.Tensor,
    sampling_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    threshold: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    DPPO with the total variation of one token: a token counts while its probability has not moved by more than
    `threshold` from the sampler's, in the direction of its advantage.

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
    Clipped loss of tokens weighted by the truncated mismatch `min(w, cap)`, whose upper clip widens by `w / cap` where
    that weight was truncated: truncation has scaled the ratio to the sampler down by as much.

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


class _TokenLoss(SamplerRule):
    has_own_loss = True

    def _dropped(self, config: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and which tokens were dropped."""
        raise NotImplementedError

    @override
    def loss(self, config: Any, batch: Batch) -> Loss:
        value, dropped = self._dropped(config, batch)
        mask = batch.mask.bool()
        length = mask.sum(-1)
        share = dropped.sum(-1) / torch.where(length > 0, length, math.nan)
        ratio = torch.exp(torch.where(mask, batch.per_token_logps - batch.old_per_token_logps, 0.0))
        return Loss(value, ratio, {f"{self.name}/dropped_tokens": share})

    @override
    def problems(self, config: Any) -> Iterator[str]:
        yield from refuse_changed(config, OF_TRLS_LOSS, "does not use it: it is not a loss of TRL's")
        yield from super().problems(config)


class _DPPO(_TokenLoss):
    own_options = ("divergence_threshold",)

    @override
    def _dropped(self, config: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logps = batch.per_token_logps, batch.sampling_per_token_logps
        return dppo_tv_loss(*logps, batch.advantages, batch.mask, config.divergence_threshold)

    @override
    def ratio_bounds(self, config: Any) -> tuple[Bounds, Bounds]:
        return NO_BOUNDS, NO_BOUNDS

    @override
    def contradictions(self, config: Any) -> Iterator[str]:
        yield from super().contradictions(config)
        for name in ("epsilon", "epsilon_high"):
            if getattr(config, name) is not None:
                yield (
                    f"{name}={getattr(config, name)!r} is not honoured: objective='dppo-tv' bounds the change of a token's "
                    "probability, by `divergence_threshold`, and not its ratio."
                )

    @override
    def problems(self, config: Any) -> Iterator[str]:
        yield from problems_of_threshold(config)
        threshold = config.divergence_threshold
        if threshold >= 1:
            yield (
                f"divergence_threshold={threshold!r} bounds a change of probability, which is below 1. Choose such as 0.2."
            )
        yield from super().problems(config)


class _ACR(_TokenLoss):
    @override
    def _dropped(self, config: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        bounds = *clip_offsets(config), config.vllm_importance_sampling_clip_max
        logps = batch.per_token_logps, batch.old_per_token_logps, batch.sampling_per_token_logps
        return acr_loss(*logps, batch.advantages, batch.mask, *bounds)

    @property
    @override
    def _unused_bounds(self) -> tuple[str, ...]:
        return tuple(name for name in BOUNDS_OF_MISMATCH if name != "vllm_importance_sampling_clip_max")

    @override
    def token_weight_bounds(self, config: Any) -> Bounds:
        return None, config.vllm_importance_sampling_clip_max


DPPO_TV = _DPPO("dppo-tv", OPTIONS, {"divergence_threshold": 0.2})
ACR = _ACR("acr", OPTIONS)
