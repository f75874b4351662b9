r"""
The objectives that the [QaRL paper](https://huggingface.co/papers/2604.07853) compares with TBPO, as presets of TRL's loss.

With the token ratio `r = pi_learner(theta) / pi_learner(theta_old)`, the token mismatch
`w = pi_learner(theta_old) / pi_sampler(theta_old)` and their products or means over a completion of `L` tokens:

    grpo-tis        min(w, C) min(r A, clip(r) A)                     TIS: the mismatch truncated token by token
    positive-only   the same with max(A, 0) instead of A
    on-policy       the same with one update per generation batch
    dual-clip       min(w, C) max(min(r A, clip(r) A), c A)           for A < 0, as grpo-tis otherwise
    gspo            min(R A, clip(R) A)                               R = exp(mean_t log r)
    mis-gspo        1[W <= C] W min(R A, clip(R) A)                   MIS: rejection by W = exp(sum_t log w)

Token terms are averaged over each completion, then over completions (`loss_type="grpo"`). TRL computes all of it; what it
leaves to us is the weight of the mismatch where rollouts do not come from vLLM, and the positive part of the advantages.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


__all__ = [
    "OBJECTIVES",
    "PRESETS",
    "Preset",
    "mismatch_ratio",
    "rejects_by_product",
    "sequence_bounds",
    "token_bounds",
    "weigh_advantages",
]


@dataclass(frozen=True)
class Preset:
    """
    One objective in TRL's options.

    Args:
        options (`Mapping[str, Any]`):
            Options that make the objective what it is; any other value contradicts its name.
        defaults (`Mapping[str, Any]`, *optional*):
            Options that it has a value of its own for, which may be changed.
        is_positive_only (`bool`, *optional*, defaults to `False`):
            Whether completions with a negative advantage are left out.
        is_on_policy (`bool`, *optional*, defaults to `False`):
            Whether each generation batch makes exactly one update.
    """

    options: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_positive_only: bool = False
    is_on_policy: bool = False

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the loss is weighted by the mismatch between learner and sampler."""
        return self.options["vllm_importance_sampling_correction"]


_TOKEN_TIS = {
    "importance_sampling_level": "token",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
}
# Table 2 of the paper: `seq_clip_ratio_low` and `seq_clip_ratio_high`, bounds of a geometric mean.
_SEQUENCE_CLIP = {"epsilon": 3e-4, "epsilon_high": 4e-4}

PRESETS = {
    "grpo-tis": Preset(_TOKEN_TIS),
    "positive-only": Preset(_TOKEN_TIS, is_positive_only=True),
    "on-policy": Preset(_TOKEN_TIS, is_on_policy=True),
    "dual-clip": Preset(_TOKEN_TIS, {"delta": 3.0}),
    "gspo": Preset(
        {"importance_sampling_level": "sequence", "vllm_importance_sampling_correction": False}, _SEQUENCE_CLIP
    ),
    "mis-gspo": Preset(
        {
            "importance_sampling_level": "sequence",
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "sequence_mask",
        },
        _SEQUENCE_CLIP,
    ),
}
"""The presets; all have `loss_type="grpo"`."""

OBJECTIVES = ("tbpo", *PRESETS, "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
"""TBPO, a preset, or one of TRL's own losses by its `loss_type` name."""


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
    Probability ratio between learner and sampler at rollout, bounded: what TRL multiplies the loss of vLLM rollouts with.

        w_t = exp(old_t - sampling_t)                `token_*`, shape `(B, T)`
        W   = exp(sum_t (old_t - sampling_t))        `sequence_*`, shape `(B, 1)`

    `*_truncate` clamps to `[clip_min, clip_max]` (TIS, https://fengyao.notion.site/off-policy-rl); `*_mask` sets ratios
    outside to 0 (MIS). `None` leaves that side open. The result has no gradient.

    Args:
        old_per_token_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs of the learner at rollout, in nats.
        sampling_per_token_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs under which the tokens were sampled; NaN counts as no mismatch.
        mask (`torch.Tensor` of shape `(B, T)`):
            Nonzero for the tokens that count. The others may hold anything and have ratio 1.
        mode (`str`):
            `"token_truncate"`, `"token_mask"`, `"sequence_truncate"` or `"sequence_mask"`.
        clip_min, clip_max (`float` or `None`):
            Bounds of the ratio.
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


def weigh_advantages(
    advantages: torch.Tensor, ratio: torch.Tensor | None, is_positive_only: bool = False
) -> torch.Tensor:
    """
    Advantages that carry a preset's weights into TRL's loss: `max(A, 0)` if `is_positive_only`, times `ratio`.

    Every clipped loss is positively homogeneous in the advantage, `min(r w A, clip(r) w A) = w min(r A, clip(r) A)` for
    `w >= 0`, so a weight of the loss may stand at its advantage.

    Args:
        advantages (`torch.Tensor` of shape `(B,)`):
            One advantage per sequence.
        ratio (`torch.Tensor` of shape `(B, T)` or `(B, 1)`, or `None`):
            Weights of at least 0, without gradient; `None` for 1.
        is_positive_only (`bool`, *optional*, defaults to `False`):
            Whether sequences with a negative advantage are left out. They still count in the mean over sequences.

    Returns:
        `(B,)` without `ratio`, else the shape of `ratio`.
    """
    if is_positive_only:
        advantages = advantages.clamp(min=0)
    return advantages if ratio is None else advantages.unsqueeze(1) * ratio


Bounds = tuple[float | None, float | None]


def sequence_bounds(config: Any) -> dict[str, dict[str, Bounds]] | None:
    """
    Bounds that the objective of a [`QaRLConfig`] sets to the sequence-level `"ratio"` and `"mismatch_weight"`, for
    `"positive"` and `"negative"` advantages; `None` for a side without bound, and for an objective of token ratios.
    """
    if config.objective == "tbpo":
        cap = (1 / config.mismatch_cap, config.mismatch_cap)
        negative = (1 - config.negative_epsilon_low, 1 + config.negative_epsilon_high)
        return {
            "ratio": {"positive": (None, 1 + config.positive_epsilon_high), "negative": negative},
            "mismatch_weight": {"positive": cap, "negative": cap},
        }
    if config.importance_sampling_level != "sequence":
        return None
    positive: Bounds = (None, None)
    negative: Bounds = (None, None)
    if config.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        positive, negative = (None, 1 + epsilon_high), (1 - config.epsilon, config.delta)
    elif config.loss_type == "cispo":
        positive = negative = (None, config.epsilon if config.epsilon_high is None else config.epsilon_high)
    weight: Bounds = (None, None)
    if rejects_by_product(config):
        weight = (config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max)
    return {
        "ratio": {"positive": positive, "negative": negative},
        "mismatch_weight": {"positive": weight, "negative": weight},
    }


def token_bounds(config: Any) -> dict[str, dict[str, Bounds]]:
    """
    Bounds that the objective of a [`QaRLConfig`] sets to each token's `"token_ratio"` and `"token_mismatch_weight"`, for
    `"positive"` and `"negative"` advantages; `None` for a side without bound, which is every side for an objective of sequence
    ratios.
    """
    positive: Bounds = (None, None)
    negative: Bounds = (None, None)
    weight: Bounds = (None, None)
    if config.objective != "tbpo" and config.importance_sampling_level == "token":
        epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        if config.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
            positive, negative = (None, 1 + epsilon_high), (1 - config.epsilon, config.delta)
        elif config.loss_type == "cispo":
            positive = negative = (None, epsilon_high)
    if _is_corrected(config) and config.vllm_importance_sampling_mode.startswith("token"):
        weight = (config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max)
    return {
        "token_ratio": {"positive": positive, "negative": negative},
        "token_mismatch_weight": {"positive": weight, "negative": weight},
    }


def rejects_by_product(config: Any) -> bool:
    """Whether the loss is weighted by TRL's mismatch of a whole sequence, the product of token ratios."""
    return _is_corrected(config) and config.vllm_importance_sampling_mode.startswith("sequence")


def _is_corrected(config: Any) -> bool:
    """Whether TRL's mismatch weight, of tokens or of sequences, is part of the loss."""
    is_applied = config.use_vllm or config.objective in PRESETS
    return config.objective != "tbpo" and is_applied and bool(config.vllm_importance_sampling_correction)
