"""[`ScoringPlan`]: whose log-probs are the old ones of a generation batch, and which of them are compared."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from .quantization.versions import KeptVersion, at_version


@dataclass(frozen=True)
class ScoringPlan:
    """
    Decision about the old log-probs of one generation batch, made when the batch arrives:

    - source `"learner"`, compared `"all"`: a forward scores the rollout with the weights that drew it.
    - source `"sampler"`, compared `"first update"`: learner and sampler give every token the same bits, so scoring the
      rollout would return the same values.
    - source `"sampler"`, compared `"none"`: nothing needs the learner's log-probs of the rollout.

    Args:
        source (`str`):
            Whose log-probs the old ones are: the `"learner"`'s, with the weights that drew the batch, or the
            `"sampler"`'s.
        compared (`str`):
            Tokens whose log-probs of learner and sampler are compared: `"none"`; those of the `"first update"`, whose
            forward runs anyway, and of one more sequence; or `"all"`.
        version (`int`):
            The update whose weights drew the batch.
        weights ([`~trl_qarl.quantization.versions.KeptVersion`], *optional*):
            These weights, if the batch was drawn before its turn. By default the learner has them when the batch
            arrives.
    """

    source: Literal["learner", "sampler"]
    compared: Literal["none", "first update", "all"]
    version: int
    weights: KeptVersion | None = field(default=None, repr=False)

    @property
    def is_stale(self) -> bool:
        """True if the learner has other weights than those that drew the batch."""
        return self.weights is not None

    def at_drawn(self, model: nn.Module) -> AbstractContextManager:
        """While open, `model` has the weights that drew the batch."""
        return nullcontext() if self.weights is None else at_version(model, self.weights)


def plan_scoring(is_exact: bool, is_needed: bool, version: int, weights: KeptVersion | None = None) -> ScoringPlan:
    """Choose the plan of a batch that was drawn by the update `version`. `is_exact` means that learner and sampler
    give every token the same bits, `is_needed` that something needs the learner's log-probs of the rollout."""
    if is_exact:
        return ScoringPlan("sampler", "first update", version, weights)
    return ScoringPlan(*(("learner", "all") if is_needed else ("sampler", "none")), version, weights)
