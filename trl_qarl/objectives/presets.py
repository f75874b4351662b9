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

And those that others use against the mismatch, with `b = r w` the token ratio to the sampler, `W_g = exp(mean_t log w)`, and
`p` the probabilities of a token under the learner, `p_s` under the sampler:

    icepop          1[low <= w <= high] w min(r A, clip(r) A)         https://huggingface.co/papers/2510.18855
    kpop            1[KL <= d] w min(r A, clip(r) A)                  https://ringtech.notion.site/kpop; KL of (p_old, 1 - p_old)
                                                                      and (p_s, 1 - p_s), the larger of both directions
    geo-mask        1[low <= W_g <= high] min(r A, clip(r) A)         the first step of SkyRL's ladder
    bypass          min(b A, clip(b) A)                               no forward that scores the rollout
    dppo-tv         1[sign(A) (p - p_s) <= d] min(b, 20) A log p      https://huggingface.co/papers/2602.04879; min(b, 20) constant
    acr             min(w, C) min(r A, clip(r, 1 - e, (1 + e_high) max(1, w / C)) A)
                                                                      https://huggingface.co/papers/2602.13953

A token whose sampling log-prob is not known has `w = 1`, except where there is no other ratio (`bypass`, `dppo-tv`): there it
does not count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


__all__ = ["OBJECTIVES", "OWN_OPTIONS", "PRESETS", "Preset", "is_corrected", "rejects", "rejects_by_product"]


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
        is_ours (`bool`, *optional*, defaults to `False`):
            Whether TRL has no option for what it does with the sampling log-probs, which is then done here, with vLLM and
            without.
    """

    options: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_positive_only: bool = False
    is_on_policy: bool = False
    is_ours: bool = False

    @property
    def corrects_mismatch(self) -> bool:
        """Whether TRL weighs the loss by the mismatch between learner and sampler, for rollouts of vLLM."""
        return self.options["vllm_importance_sampling_correction"]


_TOKEN_TIS = {
    "importance_sampling_level": "token",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
}
_OURS = {"importance_sampling_level": "token", "vllm_importance_sampling_correction": False}
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
    "icepop": Preset(_OURS, {"mismatch_low": 0.5, "mismatch_high": 5.0}, is_ours=True),
    "kpop": Preset(_OURS, {"divergence_threshold": 0.1}, is_ours=True),
    "geo-mask": Preset(_OURS, {"mismatch_low": 0.99, "mismatch_high": 1.01}, is_ours=True),
    "bypass": Preset(_OURS, is_ours=True),
    "dppo-tv": Preset(_OURS, {"divergence_threshold": 0.2}, is_ours=True),
    "acr": Preset(_OURS, is_ours=True),
}
"""The presets; all have `loss_type="grpo"`."""

OBJECTIVES = ("tbpo", *PRESETS, "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
"""TBPO, a preset, or one of TRL's own losses by its `loss_type` name."""


OWN_OPTIONS = ("mismatch_low", "mismatch_high", "divergence_threshold")
"""Options of presets that TRL does not have."""


def rejects(config: Any) -> bool:
    """Whether the weight of the mismatch, where the loss has one, is 0 for some tokens or sequences."""
    mode = config.vllm_importance_sampling_mode or ""
    return config.objective in ("icepop", "kpop", "geo-mask") or mode.endswith("mask")


def rejects_by_product(config: Any) -> bool:
    """Whether the loss is weighted by TRL's mismatch of a whole sequence, the product of token ratios."""
    return is_corrected(config) and config.vllm_importance_sampling_mode.startswith("sequence")


def is_corrected(config: Any) -> bool:
    """Whether TRL's mismatch weight, of tokens or of sequences, is part of the loss."""
    is_applied = config.use_vllm or config.objective in PRESETS
    return config.objective != "tbpo" and is_applied and bool(config.vllm_importance_sampling_correction)
