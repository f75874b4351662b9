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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


__all__ = ["OBJECTIVES", "PRESETS", "Preset", "is_corrected", "rejects_by_product"]


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


def rejects_by_product(config: Any) -> bool:
    """Whether the loss is weighted by TRL's mismatch of a whole sequence, the product of token ratios."""
    return is_corrected(config) and config.vllm_importance_sampling_mode.startswith("sequence")


def is_corrected(config: Any) -> bool:
    """Whether TRL's mismatch weight, of tokens or of sequences, is part of the loss."""
    is_applied = config.use_vllm or config.objective in PRESETS
    return config.objective != "tbpo" and is_applied and bool(config.vllm_importance_sampling_correction)
