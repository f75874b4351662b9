"""[`ScoringPlan`]: whose log-probs are the old ones of a generation batch, and which of them are compared."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from ..quantization.versions import KeptVersion, at_version


@dataclass(frozen=True)
class ScoringPlan:
    """
    Decision about the old log-probs of one generation batch, made when the batch arrives.

    Args:
        source (`str`):
            Whose log-probs the old ones are: the `"learner"`'s, with the weights that drew the batch, or the
            `"sampler"`'s, if both give every token the same bits and scoring the rollout would return the same values.
            If the learner has scored all tokens, all are compared with the sampler's, else those of the first update,
            whose forward runs anyway, and of one more sequence.
        version (`int`):
            The update whose weights drew the batch.
        weights ([`~trl_qarl.quantization.versions.KeptVersion`], *optional*):
            These weights, if the batch was drawn before its turn. By default the learner has them when the batch
            arrives.
    """

    source: Literal["learner", "sampler"]
    version: int
    weights: KeptVersion | None = field(default=None, repr=False)

    @property
    def is_stale(self) -> bool:
        """True if the learner has other weights than those that drew the batch."""
        return self.weights is not None

    def at_drawn(self, model: nn.Module) -> AbstractContextManager:
        """While open, `model` has the weights that drew the batch."""
        return nullcontext() if self.weights is None else at_version(model, self.weights)
