r"""
Objectives of other projects against the mismatch between learner and sampler, around TRL's clipped loss.

With `r` and `w` of `presets.py`, `b = r w` the token ratio to the sampler and `W_g = exp(mean_t log w)`:

    icepop          1[low <= w <= high] w min(r A, clip(r) A)         https://huggingface.co/papers/2510.18855
    kpop            1[KL <= d] w min(r A, clip(r) A)                  https://ringtech.notion.site/kpop; the KL of
                                                                      (p_old, 1 - p_old) and (p_s, 1 - p_s), the
                                                                      larger of both directions
    geo-mask        1[low <= W_g <= high] min(r A, clip(r) A)         the first step of SkyRL's ladder
    bypass          min(b A, clip(b) A)                               no forward that scores the rollout

A token whose sampling log-prob is not known has `w = 1`, except under `bypass`, where there is no other ratio: there
it does not count. Losses of tokens that TRL does not have are in `token_losses.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from ..forward import Batch
from .objective import NO_BOUNDS, Bounds, both_signs
from .presets import Preset
from .ratios import geometric_mask, kpop_weight, mismatch_ratio


__all__ = ["BYPASS", "GEO_MASK", "ICEPOP", "KPOP", "OPTIONS", "SamplerRule", "problems_of_threshold"]

OPTIONS = {"importance_sampling_level": "token", "vllm_importance_sampling_correction": False}
"""TRL's options of all of these."""


@dataclass(frozen=True)
class SamplerRule(Preset):
    """A preset with a rule of its own for the mismatch."""

    weighs_by_sampler = True

    @property
    @override
    def _why_unused(self) -> str:
        return "has a rule of its own for the mismatch" + "".join(f", `{name}`" for name in self.own_options)


class _Band(SamplerRule):
    """Rejects by a ratio outside `[mismatch_low, mismatch_high]`."""

    own_options = ("mismatch_low", "mismatch_high")

    @override
    def rejects(self, config: Any) -> bool:
        return True

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
    def sequence_bounds(self, config: Any) -> dict[str, dict[str, Bounds]]:
        """Bounds of the weight only: the ratio is one of tokens."""
        band = both_signs((config.mismatch_low, config.mismatch_high))
        return {"ratio": both_signs(NO_BOUNDS), "mismatch_weight": band}


class _KPop(SamplerRule):
    own_options = ("divergence_threshold",)

    @override
    def weight(self, config: Any, batch: Batch) -> torch.Tensor:
        return kpop_weight(*batch.rollout, config.divergence_threshold)

    @override
    def rejects(self, config: Any) -> bool:
        return True

    @override
    def problems(self, config: Any) -> Iterator[str]:
        yield from problems_of_threshold(config)
        yield from super().problems(config)


class _Bypass(SamplerRule):
    needs_scores = False

    @override
    def for_trl(self, config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with the sampler's log-probs instead of the learner's at rollout; a token without one has
        advantage 0."""
        sampling = inputs["sampling_per_token_logps"]
        advantages = inputs["advantages"].unsqueeze(1) * ~sampling.isnan()
        return inputs | {"old_per_token_logps": sampling.nan_to_num(0.0), "advantages": advantages}


def problems_of_threshold(config: Any) -> Iterator[str]:
    threshold = config.divergence_threshold
    if not threshold > 0:
        yield f"divergence_threshold={threshold!r} must be greater than 0: at 0 nothing would be left to train on."


ICEPOP = _IcePop("icepop", OPTIONS, {"mismatch_low": 0.5, "mismatch_high": 5.0})
KPOP = _KPop("kpop", OPTIONS, {"divergence_threshold": 0.1})
GEO_MASK = _GeoMask("geo-mask", OPTIONS, {"mismatch_low": 0.99, "mismatch_high": 1.01})
BYPASS = _Bypass("bypass", OPTIONS)
