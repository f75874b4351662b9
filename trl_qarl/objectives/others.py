r"""
Objectives of other projects against the mismatch between learner and sampler.

With `r` and `w` of `presets.py`, `b = r w` the token ratio to the sampler, `W_g = exp(mean_t log w)`, and `p` and
`p_s` the probabilities of a token under learner and sampler:

    icepop          1[low <= w <= high] w min(r A, clip(r) A)         https://huggingface.co/papers/2510.18855
    kpop            1[KL <= d] w min(r A, clip(r) A)                  https://ringtech.notion.site/kpop; the KL of
                                                                      (p_old, 1 - p_old) and (p_s, 1 - p_s), the
                                                                      larger of both directions
    geo-mask        1[low <= W_g <= high] min(r A, clip(r) A)         the first step of SkyRL's ladder
    bypass          min(b A, clip(b) A)                               no forward that scores the rollout
    dppo-tv         1[sign(A) (p - p_s) <= d] min(b, 20) A log p      https://huggingface.co/papers/2602.04879;
                                                                      min(b, 20) is a constant
    acr             min(w, C) min(r A, clip(r, 1 - e, (1 + e_high) max(1, w / C)) A)
                                                                      https://huggingface.co/papers/2602.13953

The first four are TRL's loss of a batch with other weights or log-probs. TRL has no option for the last two; as in
`loss_type="grpo"`, their terms are averaged over the tokens of a completion, then over completions. A token with an
unknown sampling log-prob has `w = 1`; under `bypass` and `dppo-tv`, which have no other ratio, it does not count.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from ..forward import Batch
from .objective import NO_BOUNDS, Bounds, Loss
from .options import OF_TRLS_LOSS, clip_offsets, refuse_changed
from .presets import TOKEN, Preset
from .ratios import geometric_mask, kpop_weight, mismatch_ratio


MAX_RATIO = 20.0
"""Upper bound of the ratio to the sampler that weighs a token in `dppo-tv`, from
https://huggingface.co/papers/2602.04879."""


def dppo_tv_loss(batch: Batch, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """
    DPPO with the total variation of one token: a token counts while its probability differs from the sampler's, in the
    direction of its advantage, by at most `threshold`, in (0, 1).

    Return the loss, with gradient only to `per_token_logps`, and a mask of dropped tokens: `bool`, `(B, T)`.
    """
    mask = batch.mask.bool()
    advantages = batch.advantages.unsqueeze(1)
    is_known = mask & ~batch.sampling_per_token_logps.isnan()
    now = torch.where(is_known, batch.per_token_logps, 0.0)
    sampling = torch.where(is_known, batch.sampling_per_token_logps, 0.0)
    moved = (torch.exp(now) - torch.exp(sampling)).detach() * advantages.sign()
    keeps = is_known & (moved <= threshold)
    ratio = torch.exp((now - sampling).detach().clamp(max=math.log(MAX_RATIO)))
    return -_mean(torch.where(keeps, ratio * advantages * now, 0.0), mask), mask & ~keeps


def acr_loss(
    batch: Batch, epsilon: float, epsilon_high: float, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Clipped token loss weighted by the truncated mismatch `min(w, cap)`. For truncated weights the upper clip widens by
    `w / cap`, the factor by which truncation has scaled down the ratio to the sampler. `epsilon` and `epsilon_high`
    are offsets of the clip; a `cap` of `None` truncates nothing.

    Return the loss, with gradient only to `per_token_logps`, and a mask of dropped tokens: `bool`, `(B, T)`.
    """
    old, sampling, mask = batch.rollout
    mask = mask.bool()
    advantages = batch.advantages.unsqueeze(1)
    log_weight = torch.where(mask & ~sampling.isnan(), old - sampling, 0.0)
    log_cap = math.inf if cap is None else math.log(cap)
    low, high = (math.log1p(-epsilon) if epsilon < 1 else -math.inf), math.log1p(epsilon_high)
    widening = (log_weight - log_cap).clamp(min=0.0)
    log_ratio = torch.where(mask, batch.per_token_logps, 0.0) - torch.where(mask, old, 0.0)
    is_above = (advantages > 0) & (log_ratio > high + widening)
    is_below = ~(advantages > 0) & (log_ratio < low)
    # A clipped ratio is constant at its bound, without gradient and without overflow.
    bounded = torch.where(is_below, low, torch.where(is_above, high + widening, log_ratio))
    terms = torch.exp(log_weight.clamp(max=log_cap)) * torch.exp(bounded) * advantages
    return -_mean(torch.where(mask, terms, 0.0), mask), mask & (is_above | is_below) & (advantages != 0)


def _mean(terms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (terms.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


class _SamplerRule(Preset):
    weighs_by_sampler = True

    @override
    def rejects(self, config: Any) -> bool:
        return True

    @override
    def problems(self, config: Any) -> Iterator[str]:
        if "divergence_threshold" in self.own_options and not config.divergence_threshold > 0:
            yield (
                f"divergence_threshold={config.divergence_threshold!r} must be greater than 0: at 0 no token would be trained on."
            )
        yield from super().problems(config)


class _Band(_SamplerRule):
    own_options = ("mismatch_low", "mismatch_high")

    @override
    def problems(self, config: Any) -> Iterator[str]:
        low, high = config.mismatch_low, config.mismatch_high
        if not 0 < low < 1 < high:
            yield (
                f"mismatch_low={low!r}, mismatch_high={high!r} must be bounds of a ratio around 1: 0 < mismatch_low < 1 < "
                "mismatch_high."
            )
        yield from super().problems(config)


class _IcePop(_Band):
    @override
    def weight(self, config: Any, batch: Batch) -> torch.Tensor:
        return mismatch_ratio(*batch.rollout, "token_mask", config.mismatch_low, config.mismatch_high)

    @override
    def token_weight_bounds(self, config: Any) -> Bounds:
        return config.mismatch_low, config.mismatch_high


class _GeoMask(_Band):
    @override
    def weight(self, config: Any, batch: Batch) -> torch.Tensor:
        return geometric_mask(*batch.rollout, config.mismatch_low, config.mismatch_high)

    @override
    def sequence_bounds(self, config: Any) -> dict[str, tuple[Bounds, Bounds]]:
        """Bounds only the weight: the ratio is one of tokens."""
        band = config.mismatch_low, config.mismatch_high
        return {"ratio": (NO_BOUNDS, NO_BOUNDS), "mismatch_weight": (band, band)}


class _KPop(_SamplerRule):
    own_options = ("divergence_threshold",)

    @override
    def weight(self, config: Any, batch: Batch) -> torch.Tensor:
        return kpop_weight(*batch.rollout, config.divergence_threshold)


class _Bypass(_SamplerRule):
    needs_scores = False

    @override
    def for_trl(self, config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Replaces the learner's log-probs at rollout by the sampler's; a token without one gets advantage 0."""
        sampling = inputs["sampling_per_token_logps"]
        advantages = inputs["advantages"].unsqueeze(1) * ~sampling.isnan()
        return inputs | {"old_per_token_logps": sampling.nan_to_num(0.0), "advantages": advantages}


class _TokenLoss(_SamplerRule):
    has_own_loss = True

    def _as_loss(self, batch: Batch, value: torch.Tensor, dropped: torch.Tensor) -> Loss:
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
    def loss(self, config: Any, batch: Batch) -> Loss:
        return self._as_loss(batch, *dppo_tv_loss(batch, config.divergence_threshold))

    @override
    def ratio_bounds(self, config: Any) -> tuple[Bounds, Bounds]:
        return NO_BOUNDS, NO_BOUNDS

    @override
    def contradictions(self, config: Any) -> Iterator[str]:
        yield from super().contradictions(config)
        why = "bounds the change of a token's probability, with `divergence_threshold`, and not its ratio"
        yield from refuse_changed(config, ("epsilon", "epsilon_high"), why)

    @override
    def problems(self, config: Any) -> Iterator[str]:
        threshold = config.divergence_threshold
        if threshold >= 1:
            yield (
                f"divergence_threshold={threshold!r} bounds a change of probability, which is below 1. Choose, for example, 0.2."
            )
        yield from super().problems(config)


class _ACR(_TokenLoss):
    bounds_of_mismatch = ("vllm_importance_sampling_clip_max",)

    @override
    def loss(self, config: Any, batch: Batch) -> Loss:
        return self._as_loss(batch, *acr_loss(batch, *clip_offsets(config), config.vllm_importance_sampling_clip_max))

    @override
    def token_weight_bounds(self, config: Any) -> Bounds:
        return None, config.vllm_importance_sampling_clip_max


OTHERS = (
    _IcePop("icepop", TOKEN, {"mismatch_low": 0.5, "mismatch_high": 5.0}),
    _KPop("kpop", TOKEN, {"divergence_threshold": 0.1}),
    _GeoMask("geo-mask", TOKEN, {"mismatch_low": 0.99, "mismatch_high": 1.01}),
    _Bypass("bypass", TOKEN),
    _DPPO("dppo-tv", TOKEN, {"divergence_threshold": 0.2}),
    _ACR("acr", TOKEN),
)
