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
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from ..forward import Batch
from .objective import Loss, Objective
from .ratios import mismatch_weight, sequence_log_ratio


# Far outside every trust band, far below overflow: exp(89) is inf in float32, and the gradient 0 * inf of a dropped
# sequence would be NaN.
MAX_LOG_RATIO = 20.0

_RESHAPES = "it reshapes the sampling distribution, so sampling log-probs and the learner's would differ"

REFUSED_BY_TBPO = {
    "epsilon": "TBPO's bounds are `positive_epsilon_high`, `negative_epsilon_low` and `negative_epsilon_high`",
    "epsilon_high": "it bounds a token's ratio; TBPO's bound of a sequence's mean ratio is `positive_epsilon_high`, 4e-4 "
    "in the paper",
    "delta": "the upper bound for negative advantages is `negative_epsilon_high`",
    "importance_sampling_level": "TBPO's ratio is the geometric mean over the sequence; leave it out",
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), "it belongs to `loss_type='sapo'`"),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), "it belongs to `loss_type='vespo'`"
    ),
    "off_policy_mask_threshold": "TBPO drops off-policy sequences by its band; narrow `negative_epsilon_low/high` instead",
    "top_entropy_quantile": "a token mask would change the geometric mean; use `loss_type='grpo'`",
    **dict.fromkeys(
        ("entropy_coef", "use_adaptive_entropy"),
        "the entropy bonus is a token-level term; use `loss_type='grpo'`",
    ),
    **dict.fromkeys(
        (
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_cap",
        ),
        "TBPO's mismatch weight is the sequence's geometric mean; its bound is `mismatch_cap`",
    ),
    "top_p": f"{_RESHAPES}; use 1.0",
    "top_k": f"{_RESHAPES}; use 0",
    "min_p": f"{_RESHAPES}; leave it unset",
    "repetition_penalty": f"{_RESHAPES}; use 1.0",
}
"""Inherited options that TBPO replaces, or that have no meaning for one clipped ratio per sequence, with reasons."""


class TBPOOutput(NamedTuple):
    """Effect of [`tbpo_loss`] on each sequence: detached tensors of shape `(B,)`; flags are `bool`."""

    ratio: torch.Tensor
    mismatch_weight: torch.Tensor
    dropped_positive_high: torch.Tensor
    dropped_negative_low: torch.Tensor
    dropped_negative_high: torch.Tensor
    is_empty: torch.Tensor


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


def tbpo_loss(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    sampling_per_token_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    positive_epsilon_high: float,
    negative_epsilon_low: float,
    negative_epsilon_high: float,
    mismatch_cap: float,
) -> tuple[torch.Tensor, TBPOOutput]:
    """
    Return the TBPO loss of a batch, to be minimised, and its effect on each sequence (equations at the top).

    Tensors are those of a [`~trl_qarl.forward.Batch`]; only `per_token_logps` receives gradient. Without
    `sampling_per_token_logps` every mismatch weight is 1. The epsilons are arguments of [`trust_band_clip`],
    `mismatch_cap` is that of [`mismatch_weight`]. Advantages of another shape than `(B,)` raise `ValueError`.
    """
    # A (B, 1) tensor, as in TRL's own loss, would silently broadcast to (B, B).
    if advantages.shape != per_token_logps.shape[:1]:
        raise ValueError(f"advantages must have shape ({len(per_token_logps)},), got {tuple(advantages.shape)}.")
    log_ratio = sequence_log_ratio(per_token_logps, old_per_token_logps.detach(), mask)  # (B,)
    ratio = torch.exp(torch.where(log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, log_ratio))
    clipped_ratio = trust_band_clip(
        ratio, advantages, positive_epsilon_high, negative_epsilon_low, negative_epsilon_high
    )
    if sampling_per_token_logps is None:
        weight = torch.ones_like(ratio)
    else:
        weight = mismatch_weight(old_per_token_logps, sampling_per_token_logps, mask, mismatch_cap)
    is_empty = ~mask.bool().any(-1)
    objective = torch.where(is_empty, 0.0, weight * clipped_ratio * advantages)  # (B,)

    ratio = ratio.detach()
    output = TBPOOutput(
        ratio=ratio,
        mismatch_weight=weight.detach(),
        dropped_positive_high=(advantages > 0) & (ratio > 1.0 + positive_epsilon_high),
        dropped_negative_low=(advantages < 0) & (ratio < 1.0 - negative_epsilon_low),
        dropped_negative_high=(advantages < 0) & (ratio > 1.0 + negative_epsilon_high),
        is_empty=is_empty,
    )
    return -objective.mean(), output


def tbpo_metrics(output: TBPOOutput, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Return one value per sequence for each `tbpo/*` metric, shape `(B,)`, NaN if the sequence does not count.

    Gather over processes, then call [`~trl_qarl.objectives.objective.reduce_metrics`]: the result is exact for any
    split of the batch. `tbpo/ratio/*` counts completions that are not empty. Among these,
    `tbpo/dropped/positive_high` counts positive advantages, `tbpo/dropped/negative_{low,high}` negative ones, and
    `tbpo/dropped/total` both.
    """
    ratio = output.ratio.masked_fill(output.is_empty, math.nan)
    positive, negative = advantages > 0, advantages < 0
    total = output.dropped_positive_high | output.dropped_negative_low | output.dropped_negative_high

    def share(dropped: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return dropped.to(ratio.dtype).masked_fill(~counts | output.is_empty, math.nan)

    return {
        "tbpo/ratio/mean": ratio,
        "tbpo/ratio/min": ratio,
        "tbpo/ratio/max": ratio,
        "tbpo/dropped/positive_high": share(output.dropped_positive_high, positive),
        "tbpo/dropped/negative_low": share(output.dropped_negative_low, negative),
        "tbpo/dropped/negative_high": share(output.dropped_negative_high, negative),
        "tbpo/dropped/total": share(total, positive | negative),
    }


class TBPO(Objective):
    """Trust-Band Policy Optimization, with the options of [`QaRLConfig`]."""

    skips_zero_advantages = True

    @override
    def loss(self, config: Any, batch: Batch) -> Loss:
        now, old = batch.per_token_logps, batch.old_per_token_logps
        assert now is not None
        value, output = tbpo_loss(
            now,
            old,
            batch.sampling_per_token_logps,
            batch.advantages,
            batch.mask,
            positive_epsilon_high=config.positive_epsilon_high,
            negative_epsilon_low=config.negative_epsilon_low,
            negative_epsilon_high=config.negative_epsilon_high,
            mismatch_cap=config.mismatch_cap,
        )
        ratio = sequence_log_ratio(now, old, batch.mask).exp().unsqueeze(1)
        return Loss(value, tbpo_metrics(output, batch.advantages), ratio)

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
