"""[`Objective`], a loss in place of TRL's, and TRL's own losses by name. Needs no torch."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple


if TYPE_CHECKING:
    import torch

    from ..forward import Batch


LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
"""TRL's values of `loss_type`."""

TBPO_OPTIONS = ("positive_epsilon_high", "negative_epsilon_low", "negative_epsilon_high", "mismatch_cap")


class Loss(NamedTuple):
    """
    Result of [`Objective.loss`].

    Args:
        value (`torch.Tensor`):
            Scalar to be minimised.
        metrics (`dict[str, torch.Tensor]`, *optional*):
            Metrics to log, one value for each sequence, `(B,)`, NaN if the sequence does not count.
            [`reduce_metrics`] reduces them.
        kl_ratio (`torch.Tensor`, *optional*):
            Ratio by which `use_bias_correction_kl` multiplies the KL term of each token, `(B, 1)` or `(B, T)`.
            Defaults to the token's own ratio.
    """

    value: "torch.Tensor"
    metrics: "Mapping[str, torch.Tensor]" = {}
    kl_ratio: "torch.Tensor | None" = None


class Objective:
    """
    Loss of a training in place of TRL's. A subclass of your own is chosen by `loss_type="module:Class"`; it is called
    with `objective_kwargs`, so the fields of a dataclass become its settings.

    The trainer adds the KL term (`beta`), the auxiliary loss of a mixture, and the division by the number of
    micro-batches. TRL's options of a loss, such as `epsilon`, have no effect unless the class reads them.

    Attributes:
        skips_zero_advantages (`bool`):
            Whether a sequence with an advantage of 0 has no gradient, so that its log-probs need not be computed: it
            then has those at rollout. Defaults to `False`.
    """

    skips_zero_advantages = False

    def loss(self, config: Any, batch: "Batch") -> Loss:
        """Compute the loss of a micro-batch. `config` is the [`QaRLConfig`]; only `batch.per_token_logps` has a
        gradient."""
        raise NotImplementedError(f"{type(self).__name__} has no `loss`.")

    def problems(self, config: Any) -> Iterator[str]:
        """Yield problems of the options before anything is loaded: value, allowed values, reason and remedy."""
        yield from ()


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
