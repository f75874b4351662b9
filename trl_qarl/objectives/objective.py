"""
Defines [`Objective`], the only interface to a training objective for configuration, trainer and telemetry.

An objective is one file with an instance of this class, or of a subclass, and its computations. `registry.py` lists
all objectives. An instance of the class itself is one of TRL's losses, by its `loss_type` name. Needs no torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .options import LOSS_TYPES, clip_offsets


if TYPE_CHECKING:
    import torch

    from ..forward import Batch


Bounds = tuple[float | None, float | None]
"""Lower and upper bound; `None` for no bound."""

NO_BOUNDS: Bounds = (None, None)


class Loss(NamedTuple):
    """The loss of an objective, to be minimised; the ratio that makes a token-level KL term unbiased, `(B, 1)` or
    `(B, T)`; and metrics of each sequence for [`reduce_metrics`], `(B,)`, NaN if the sequence does not count."""

    value: "torch.Tensor"
    kl_ratio: "torch.Tensor"
    metrics: "dict[str, torch.Tensor]"


@dataclass(frozen=True)
class Objective:
    """
    A training objective. The base class is a loss of TRL, with TRL's correction of the mismatch of vLLM rollouts.

    - `name`: value of the option `objective`.
    - `options`: options of TRL that define the objective; any other value contradicts its name.
    - `defaults`: options with a default of this objective, which may be changed.
    - `clip`: sides at which TRL's loss clips a ratio: `"both"`, `"above"` (at `epsilon_high` itself) or `"nowhere"`.
    - `is_on_policy`: true if each generation batch makes exactly one update.

    Class attributes:

    - `own_options`: options of [`QaRLConfig`] that only this objective, and others that list them, use.
    - `has_own_loss`: true if [`~Objective.loss`] replaces TRL's loss.
    - `takes_options_of_trl`: true if options of TRL's loss that were not given get TRL's default.
    - `needs_one_policy`: true if rollout, scoring and loss must see the same policy, so that dropout must be off.
    - `needs_scores`: true if it uses the learner's log-probs of a rollout, before the first update.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    clip: str = "both"
    is_on_policy: bool = False

    own_options: ClassVar[tuple[str, ...]] = ()
    has_own_loss: ClassVar[bool] = False
    takes_options_of_trl: ClassVar[bool] = True
    needs_one_policy: ClassVar[bool] = False
    needs_scores: ClassVar[bool] = True

    @property
    def loss_type(self) -> str:
        """TRL's `loss_type`: the name if TRL has a loss of this name."""
        return self.name if self.name in LOSS_TYPES else "grpo"

    def weight(self, config: Any, batch: "Batch") -> "torch.Tensor | None":
        """Return the mismatch weight of the loss, `(B, T)` or `(B, 1)`; `None` if there is none or TRL applies it."""
        return None

    def for_trl(self, config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the micro-batch from which TRL's loss computes this objective."""
        return inputs

    def loss(self, config: Any, batch: "Batch") -> Loss:
        """Compute the loss of a micro-batch if the objective has its own."""
        raise NotImplementedError(f"objective={self.name!r} is a loss of TRL's.")

    def for_run(self, config: Any) -> "Objective":
        """Return the objective of one run: itself, unless it keeps state from one update to the next."""
        return self

    def end_update(self, gather: "Callable[[torch.Tensor], torch.Tensor]", is_on_policy: bool) -> dict[str, float]:
        """
        Finish an update whose losses have been computed, and return its metrics. Every process calls this: `gather`
        concatenates a tensor over processes. With `is_on_policy` the learner had the weights of the old log-probs.
        """
        return {}

    def state(self) -> dict[str, Any] | None:
        """Return the state for a resumed run, the same numbers, tensors and lists in every process, or `None`."""
        return None

    def load(self, state: dict[str, Any] | None) -> None:
        """Continue from the `state` of a checkpoint. `ValueError` is raised if it belongs to another objective or
        other settings."""
        if state is not None:
            raise ValueError(
                f"The checkpoint has a state of its objective ({', '.join(state)}), and objective={self.name!r} keeps none. Resume with "
                "the same settings, or start a new run from its masters by passing it as the model."
            )

    def is_corrected(self, config: Any) -> bool:
        """Return whether TRL's mismatch weight, of tokens or of sequences, is part of the loss."""
        return config.use_vllm and bool(config.vllm_importance_sampling_correction)

    def rejects(self, config: Any) -> bool:
        """Return whether the mismatch weight, if there is one, can be 0."""
        return (config.vllm_importance_sampling_mode or "").endswith("mask")

    def rejects_by_product(self, config: Any) -> bool:
        """Return whether the loss is weighted by TRL's mismatch of a whole sequence, the product of token ratios."""
        return self.is_corrected(config) and config.vllm_importance_sampling_mode.startswith("sequence")

    def ratio_bounds(self, config: Any) -> tuple[Bounds, Bounds]:
        """Return the bounds of the loss' ratio, for positive and for negative advantages."""
        low, high = clip_offsets(config)
        if self.clip == "both":
            return (None, 1 + high), (1 - low, config.delta)
        return ((None, high), (None, high)) if self.clip == "above" else (NO_BOUNDS, NO_BOUNDS)

    def token_weight_bounds(self, config: Any) -> Bounds:
        """Return the bounds of a token's mismatch weight."""
        if self.is_corrected(config) and config.vllm_importance_sampling_mode.startswith("token"):
            return config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
        return NO_BOUNDS

    def sequence_bounds(self, config: Any) -> dict[str, tuple[Bounds, Bounds]] | None:
        """Return the bounds of the sequence-level `"ratio"` and `"mismatch_weight"`, for positive and for negative
        advantages; `None` for an objective of token ratios."""
        if config.importance_sampling_level != "sequence":
            return None
        weight: Bounds = NO_BOUNDS
        if self.rejects_by_product(config):
            weight = (config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max)
        return {"ratio": self.ratio_bounds(config), "mismatch_weight": (weight, weight)}

    def histogram_bounds(self, config: Any) -> list[tuple[str, str, Bounds]]:
        """Return quantity, sign of the advantage and bounds of each histogram: of tokens, and for an objective of
        sequence ratios also of sequences. The token ratio of the latter has no bounds."""
        is_of_tokens, weight = config.importance_sampling_level == "token", self.token_weight_bounds(config)
        bounds = {
            "token_ratio": self.ratio_bounds(config) if is_of_tokens else (NO_BOUNDS, NO_BOUNDS),
            "token_mismatch_weight": (weight, weight),
            **(self.sequence_bounds(config) or {}),
        }
        signs = ("positive", "negative")
        return [(name, *signed) for name, pairs in bounds.items() for signed in zip(signs, pairs, strict=True)]

    def contradictions(self, config: Any) -> Iterator[str]:
        """Yield the given options that contradict the objective's name."""
        if config.loss_type not in (None, self.loss_type):
            yield (
                f"loss_type={config.loss_type!r} contradicts objective={self.name!r}. Remove `loss_type`; "
                "`objective` takes the same names."
            )
        for name, value in self.options.items():
            if getattr(config, name) not in (None, value):
                yield (
                    f"{name}={getattr(config, name)!r} contradicts objective={self.name!r}, which is {name}={value!r}. "
                    "Remove it, or use objective='grpo', which takes every option of TRL."
                )

    def problems(self, config: Any) -> Iterator[str]:
        """Yield problems of the loss' options, after the objective has set its own."""
        for name in ("epsilon", "epsilon_high"):
            if not (getattr(config, name) or 0.0) >= 0.0:
                yield f"{name}={getattr(config, name)!r} must be at least 0: it is an offset from a ratio of 1."
        cap = config.vllm_importance_sampling_clip_max
        if cap is not None and not cap > 0.0:
            yield f"vllm_importance_sampling_clip_max={cap!r} must be greater than 0: it bounds a ratio of probabilities."

    def problems_of_batch(self, config: Any) -> Iterator[str]:
        """Yield problems of generation batches, once their size is known."""
        if self.is_on_policy and config.steps_per_generation != config.gradient_accumulation_steps:
            yield (
                f"steps_per_generation={config.steps_per_generation} (generation_batch_size={config.generation_batch_size}) "
                f"contradicts objective={config.objective!r}, which makes one update per generation batch: it must equal "
                f"gradient_accumulation_steps={config.gradient_accumulation_steps}. Remove it."
            )


def reduce_metrics(metrics: "Mapping[str, torch.Tensor]") -> dict[str, float]:
    """
    Reduce gathered metrics of a [`Loss`] over sequences that count: names ending in `/min` and `/max` by minimum and
    maximum, all others by mean. A metric without such sequences is left out.
    """
    reduced = {}
    for name, values in metrics.items():
        values = values[~values.isnan()]
        if values.numel():
            value = values.min() if name.endswith("/min") else values.max() if name.endswith("/max") else values.mean()
            reduced[name] = value.item()
    return reduced
