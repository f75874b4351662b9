r"""
Presets of TRL's loss for the objectives that the [QaRL paper](https://huggingface.co/papers/2604.07853) compares with
TBPO.

With the token ratio `r = pi_learner(theta) / pi_learner(theta_old)`, the token mismatch
`w = pi_learner(theta_old) / pi_sampler(theta_old)` and their products or means over a completion of `L` tokens:

    grpo-tis        min(w, C) min(r A, clip(r) A)                     TIS: the mismatch truncated token by token
    positive-only   the same with max(A, 0) instead of A
    on-policy       the same with one update per generation batch
    dual-clip       min(w, C) max(min(r A, clip(r) A), c A)           for A < 0, as grpo-tis otherwise
    gspo            min(R A, clip(R) A)                               R = exp(mean_t log r)
    mis-gspo        1[W <= C] W min(R A, clip(R) A)                   MIS: rejection by W = exp(sum_t log w)

Token terms are averaged over each completion, then over completions (`loss_type="grpo"`). TRL computes all of this
except the mismatch weight of rollouts without vLLM and the positive part of the advantages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from ..forward import Batch
from .objective import Objective
from .options import BOUNDS_OF_MISMATCH, LOSS_TYPES, OF_ONE_LOSS, RESHAPES_SAMPLING, clip_offsets, refuse_changed
from .ratios import mismatch_ratio


@dataclass(frozen=True)
class Preset(Objective):
    """An objective made of TRL's options, with `loss_type="grpo"`. With `is_positive_only`, completions with negative
    advantages are left out."""

    is_positive_only: bool = False

    loss_type = "grpo"

    weighs_by_sampler: ClassVar[bool] = False
    """True if the loss uses the sampling log-probs in a way for which TRL has no option, with and without vLLM."""

    bounds_of_mismatch: ClassVar[tuple[str, ...]] = ()
    """Options of TRL's correction that the loss uses without that correction."""

    @override
    def is_corrected(self, config: Any) -> bool:
        """Includes rollouts without vLLM."""
        return bool(config.vllm_importance_sampling_correction)

    @override
    def weight(self, config: Any, batch: Batch) -> torch.Tensor | None:
        """Applies TRL's correction to rollouts without vLLM."""
        if config.use_vllm or not self.is_corrected(config):
            return None
        bounds = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
        return mismatch_ratio(*batch.rollout, config.vllm_importance_sampling_mode, *bounds)

    @override
    def for_trl(self, config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """
        Multiplies advantages `(B,)` by the weight that TRL does not apply, `(B, T)` or `(B, 1)`. Under
        `is_positive_only` negative advantages become 0, and still count in the mean over sequences.

        Every clipped loss is positively homogeneous in the advantage: for `w >= 0`, `min(r w A, clip(r) w A)` is
        `w min(r A, clip(r) A)`, so the advantage can carry a weight of the loss.
        """
        advantages = inputs["advantages"].clamp(min=0) if self.is_positive_only else inputs["advantages"]
        is_weighed_by_trl = config.use_vllm and config.vllm_importance_sampling_correction
        ratio = None if is_weighed_by_trl else inputs.get("importance_sampling_ratio")
        return inputs | {"advantages": advantages if ratio is None else advantages.unsqueeze(1) * ratio}

    @override
    def problems(self, config: Any) -> Iterator[str]:
        is_corrected = self.is_corrected(config)
        why = "does not correct the mismatch; `mis-gspo` and `grpo-tis` do"
        if self.weighs_by_sampler:
            why = "has a rule of its own for the mismatch" + "".join(f", `{name}`" for name in self.own_options)
        if not is_corrected:
            unused = [name for name in BOUNDS_OF_MISMATCH if name not in self.bounds_of_mismatch]
            yield from refuse_changed(config, unused, why)
        if (is_corrected or self.weighs_by_sampler) and not config.use_vllm:
            why = (
                "weighs by the sampling log-probs, which would not match the distribution that was sampled from; "
                "leave it at its default"
            )
            yield from refuse_changed(config, RESHAPES_SAMPLING, why)
        yield from refuse_changed(config, OF_ONE_LOSS, "does not use it; it belongs to TRL's loss of that name")
        if self.is_on_policy and config.num_iterations != 1:
            yield (
                f"num_iterations={config.num_iterations!r} contradicts objective={self.name!r}, which makes one update "
                "per generation batch. Set it to 1."
            )
        yield from super().problems(config)


class _DualClip(Preset):
    @override
    def problems(self, config: Any) -> Iterator[str]:
        _, epsilon_high = clip_offsets(config)
        if not config.delta >= 1 + epsilon_high:
            yield (
                f"delta={config.delta!r} is below 1 + epsilon_high={1 + epsilon_high:g}: the second clip of "
                "objective='dual-clip' must lie outside the first. Raise `delta`; the default is 3."
            )
        yield from super().problems(config)


TOKEN = {"importance_sampling_level": "token", "vllm_importance_sampling_correction": False}
_TIS = TOKEN | {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate"}
_SEQUENCE = TOKEN | {"importance_sampling_level": "sequence"}
_MIS = _SEQUENCE | {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask"}
# Table 2 of the paper: `seq_clip_ratio_low` and `seq_clip_ratio_high`, bounds of a geometric mean.
_SEQUENCE_CLIP = {"epsilon": 3e-4, "epsilon_high": 4e-4}

COMPARISON = (
    Preset("grpo-tis", _TIS),
    Preset("positive-only", _TIS, is_positive_only=True),
    Preset("on-policy", _TIS, is_on_policy=True),
    _DualClip("dual-clip", _TIS, {"delta": 3.0}),
    Preset("gspo", _SEQUENCE, _SEQUENCE_CLIP),
    Preset("mis-gspo", _MIS, _SEQUENCE_CLIP),
)
"""Objectives that the paper compares with TBPO."""

_CLIPS = {"cispo": "above", "sapo": "nowhere", "vespo": "nowhere"}
TRLS_LOSSES = tuple(Objective(name, clip=_CLIPS.get(name, "both")) for name in LOSS_TYPES)
"""TRL's own losses, with every option of TRL's."""
