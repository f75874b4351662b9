"""
Defines [`Objective`], the single interface through which configuration, trainer and telemetry see a training
objective.

An objective is one file: an object of this class or of a subclass, and whatever it computes with. `registry.py` lists
them. The class itself is a loss of TRL's by its `loss_type` name. Needs no torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .options import clip_offsets


if TYPE_CHECKING:
    import torch

    from ..forward import Batch


__all__ = ["NO_BOUNDS", "Bounds", "Loss", "Objective", "both_signs", "reduce_metrics"]

Bounds = tuple[float | None, float | None]
"""Lower and upper bound; `None` for a side without one."""

NO_BOUNDS: Bounds = (None, None)


class Loss(NamedTuple):
    """
    Result of an objective that has a loss of its own.

    Args:
        value (`torch.Tensor`):
            The loss, to be minimised.
        kl_ratio (`torch.Tensor`):
            Ratio that makes a KL term of tokens unbiased, `(B, 1)` or `(B, T)`.
        metrics (`dict[str, torch.Tensor]`):
            Metrics of each sequence, `(B,)`, NaN where it does not count, for [`reduce_metrics`].
    """

    value: "torch.Tensor"
    kl_ratio: "torch.Tensor"
    metrics: "dict[str, torch.Tensor]"


@dataclass(frozen=True)
class Objective:
    """
    An objective. As it stands: a loss of TRL's, with the correction of the mismatch that TRL applies to rollouts of
    vLLM.

    Args:
        name (`str`):
            What `objective` says.
        options (`Mapping[str, Any]`, *optional*):
            Options of TRL's that make the objective what it is; any other value contradicts its name.
        defaults (`Mapping[str, Any]`, *optional*):
            Options that it has a value of its own for, which may be changed.
        clip (`str`, *optional*, defaults to `"both"`):
            Where TRL's loss clips a ratio: `"both"` sides, `"above"` (at `epsilon_high` itself) or `"nowhere"`.
        is_on_policy (`bool`, *optional*, defaults to `False`):
            Whether each generation batch makes exactly one update.

    Class attributes:
        own_options (`tuple[str, ...]`):
            Options of [`QaRLConfig`] that mean something to this objective, and to others that name them too.
        has_own_loss (`bool`):
            Whether [`~Objective.loss`] is its loss, and not TRL's.
        takes_options_of_trl (`bool`):
            Whether options of TRL's loss that were not given get TRL's default.
        needs_one_policy (`bool`):
            Whether rollout, scoring and loss must see the same policy, so that nothing may be dropped at random.
        needs_scores (`bool`):
            Whether the learner's log-probs of a rollout, before the first update, mean anything to it.
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
        """TRL's `loss_type`."""
        return "grpo" if ":" in self.name else self.name

    # Computation.

    def weight(self, config: Any, batch: "Batch") -> "torch.Tensor | None":
        """Return what multiplies the loss on account of the mismatch, `(B, T)` or `(B, 1)`, where TRL does not apply
        it itself."""
        return None

    def for_trl(self, config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """A micro-batch as TRL's loss has to see it, so that it computes this objective."""
        return inputs

    def loss(self, config: Any, batch: "Batch") -> Loss:
        """The loss of a micro-batch, where it is none of TRL's."""
        raise NotImplementedError(f"objective={self.name!r} is a loss of TRL's.")

    # What a run learns about itself.

    def for_run(self, config: Any) -> "Objective":
        """Return the objective of one run: itself, unless it keeps something from one update to the next."""
        return self

    def end_update(self, gather: "Callable[[torch.Tensor], torch.Tensor]", is_on_policy: bool) -> dict[str, float]:
        """
        Take note of an update whose losses have been computed, and return what to log of it. Every process calls it:
        `gather` concatenates a tensor over them. With `is_on_policy` the learner still had the weights of the old
        log-probs.
        """
        return {}

    def state(self) -> dict[str, Any] | None:
        """Return what a resumed run needs, the same in every process, of numbers, tensors and lists; `None` for
        nothing."""
        return None

    def load(self, state: dict[str, Any] | None) -> None:
        """Continue from the `state` of a checkpoint. Raises `ValueError` if it is that of another objective or of
        other settings."""
        if state is not None:
            raise ValueError(
                f"The checkpoint has a state of its objective ({', '.join(state)}), and objective={self.name!r} keeps none. Resume with "
                "the same settings, or start a new run from its masters by passing it as the model."
            )

    # Telemetry.

    def is_corrected(self, config: Any) -> bool:
        """Return whether TRL's mismatch weight, of tokens or of sequences, is part of the loss."""
        return config.use_vllm and bool(config.vllm_importance_sampling_correction)

    def rejects(self, config: Any) -> bool:
        """Return whether the weight of the mismatch, where the loss has one, is 0 for some tokens or sequences."""
        return (config.vllm_importance_sampling_mode or "").endswith("mask")

    def rejects_by_product(self, config: Any) -> bool:
        """Return whether the loss is weighted by TRL's mismatch of a whole sequence, the product of token ratios."""
        return self.is_corrected(config) and config.vllm_importance_sampling_mode.startswith("sequence")

    def ratio_bounds(self, config: Any) -> tuple[Bounds, Bounds]:
        """Bounds of the ratio for positive and for negative advantages, at the level that the loss has."""
        low, high = clip_offsets(config)
        if self.clip == "both":
            return (None, 1 + high), (1 - low, config.delta)
        return ((None, high), (None, high)) if self.clip == "above" else (NO_BOUNDS, NO_BOUNDS)

    def token_weight_bounds(self, config: Any) -> Bounds:
        """Bounds of a token's mismatch weight."""
        if self.is_corrected(config) and config.vllm_importance_sampling_mode.startswith("token"):
            return config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
        return NO_BOUNDS

    def token_bounds(self, config: Any) -> dict[str, dict[str, Bounds]]:
        """
        Bounds of each token's `"token_ratio"` and `"token_mismatch_weight"`, for `"positive"` and `"negative"`
        advantages; `None` for a side without bound, which is every side for an objective of sequence ratios.
        """
        is_of_tokens = config.importance_sampling_level == "token"
        return {
            "token_ratio": both_signs(*self.ratio_bounds(config)) if is_of_tokens else both_signs(NO_BOUNDS),
            "token_mismatch_weight": both_signs(self.token_weight_bounds(config)),
        }

    def sequence_bounds(self, config: Any) -> dict[str, dict[str, Bounds]] | None:
        """
        Bounds of the sequence-level `"ratio"` and `"mismatch_weight"`, likewise; `None` for an objective of token
        ratios.
        """
        if config.importance_sampling_level != "sequence":
            return None
        weight: Bounds = NO_BOUNDS
        if self.rejects_by_product(config):
            weight = (config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max)
        return {"ratio": both_signs(*self.ratio_bounds(config)), "mismatch_weight": both_signs(weight)}

    def histogram_bounds(self, config: Any) -> list[tuple[str, str, Bounds]]:
        """Quantity, sign of the advantage and bounds of each histogram: tokens, and for ratios of sequences
        sequences."""
        bounds = self.token_bounds(config) | (self.sequence_bounds(config) or {})
        return [(name, sign, pair) for name, signs in bounds.items() for sign, pair in signs.items()]

    # Configuration checks.

    def contradictions(self, config: Any) -> Iterator[str]:
        """Yield what contradicts the objective's name, in the options as they were given."""
        if config.loss_type not in (None, self.loss_type):
            yield (
                f"loss_type={config.loss_type!r} contradicts objective={self.name!r}. Remove `loss_type`; "
                "`objective` takes the same names."
            )
        for name, value in self.options.items():
            if getattr(config, name) not in (None, value):
                yield (
                    f"{name}={getattr(config, name)!r} contradicts objective={self.name!r}, which is {name}={value!r}. "
                    "Remove it, or use objective='grpo', which takes every option of TRL's."
                )

    def problems(self, config: Any) -> Iterator[str]:
        """Yield what is wrong with the options of the loss, once the objective has set its own."""
        if config.importance_sampling_level not in ("token", "sequence"):
            yield (
                f"importance_sampling_level={config.importance_sampling_level!r} is unknown. Choose 'token' or 'sequence'."
            )

    def problems_of_batch(self, config: Any) -> Iterator[str]:
        """Yield what is wrong with the generation batches, once their size is known."""
        if self.is_on_policy and config.steps_per_generation != config.gradient_accumulation_steps:
            yield (
                f"steps_per_generation={config.steps_per_generation} (generation_batch_size={config.generation_batch_size}) "
                f"contradicts objective={config.objective!r}, which makes one update per generation batch: it must equal "
                f"gradient_accumulation_steps={config.gradient_accumulation_steps}. Remove it."
            )


def both_signs(positive: Bounds, negative: Bounds | None = None) -> dict[str, Bounds]:
    """Bounds by the sign of the advantage, the same for both unless `negative` is given."""
    return {"positive": positive, "negative": positive if negative is None else negative}


def reduce_metrics(metrics: "Mapping[str, torch.Tensor]") -> dict[str, float]:
    """
    Reduce gathered metrics of a [`Loss`] over the sequences that count: names in `/min` and `/max` by minimum and
    maximum, all others by mean. A metric for which no sequence counts is left out.
    """
    reduced = {}
    for name, values in metrics.items():
        values = values[~values.isnan()]
        if values.numel():
            value = values.min() if name.endswith("/min") else values.max() if name.endswith("/max") else values.mean()
            reduced[name] = value.item()
    return reduced
