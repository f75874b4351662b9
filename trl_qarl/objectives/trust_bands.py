r"""
Automatic trust bands (`trust_band="auto"`): TBPO's offsets, estimated from the ratios of recent updates.

With `x = r - 1` of the completions of recent updates, and `Q` the quantile that `trust_band_share` of them exceed:

    positive_epsilon_high = max(0, Q(x))             over completions with A > 0
    negative_epsilon_low  = 3 s                      s = max(0, Q(max(-x / 3, x / 7))) over those with A < 0
    negative_epsilon_high = 7 s

The bands of negative advantages keep the proportion of the paper's, 3e-4 to 7e-4. Every band includes the ratio 1.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


# Far outside every trust band, far below overflow: exp(89) is inf in float32, and the gradient 0 * inf of a dropped
# sequence would be NaN.
MAX_LOG_RATIO = 20.0

NEGATIVE_LOW, NEGATIVE_HIGH = 3.0, 7.0
MIN_TAIL = 2
"""Completions that have to lie on either side of a quantile. With fewer, nothing is dropped."""

MIN_COMPLETIONS, MIN_BATCHES = 256, 2
"""Smallest window of an estimate: it spans whole generation batches with at least this many completions."""

MOVED = 1e-6
"""Largest `|log r|` of an update whose ratios are all 1, except for rounding."""


class Bands(NamedTuple):
    """Offsets of TBPO's bands from a ratio of 1, with the names of the options; `inf` for no bound."""

    positive_epsilon_high: float
    negative_epsilon_low: float
    negative_epsilon_high: float


OPEN = Bands(math.inf, math.inf, math.inf)


@torch.no_grad()
def estimate_bands(log_ratios: torch.Tensor, advantages: torch.Tensor, share: float) -> Bands:
    """
    Return the bands outside of which a `share`, in (0, 1), of the completions of each sign lies; `inf` for a sign with
    too few completions to estimate the quantile. The module docstring has the equations.

    `log_ratios`, `(N,)`, are means over tokens of the change of their log-probs, in nats; the computation is in
    float64. The signs of `advantages`, `(N,)`, choose the band; 0 counts for neither.
    """
    offsets = torch.expm1(log_ratios.double().clamp(max=MAX_LOG_RATIO))
    positive, negative = offsets[advantages > 0], offsets[advantages < 0]
    scale = _exceeded_by(torch.maximum(-negative / NEGATIVE_LOW, negative / NEGATIVE_HIGH), share)
    return Bands(_exceeded_by(positive, share), NEGATIVE_LOW * scale, NEGATIVE_HIGH * scale)


def _exceeded_by(values: torch.Tensor, share: float) -> float:
    if len(values) * min(share, 1 - share) < MIN_TAIL:
        return math.inf
    return max(values.quantile(1 - share).item(), 0.0)


class EstimatedBands:
    """
    Bands of a run, and the log-ratios from which they are estimated.

    Updates whose ratios are all 1 carry no information: those on a fresh batch, and those after an update with a
    learning rate of 0. They are left out, but keep their place in the window, which therefore always spans whole
    generation batches, of `batch_size` completions over all processes and with `updates_per_batch`.

    `share` is the share of completions with a changed ratio to drop. `bands` are the current bands, the same in every
    process, open until there is enough to estimate them from.
    """

    def __init__(self, share: float, batch_size: int, updates_per_batch: int):
        self.share, self.bands = share, OPEN
        num_batches = max(MIN_BATCHES, math.ceil(MIN_COMPLETIONS / batch_size))
        self._window: deque[torch.Tensor] = deque(maxlen=num_batches * updates_per_batch)
        self._update: list[torch.Tensor] = []

    def observe(self, log_ratio: torch.Tensor, advantages: torch.Tensor, is_empty: torch.Tensor) -> None:
        """Keep the completions of a micro-batch, `(B,)` each, until the update ends; empty ones do not count."""
        self._update.append(torch.stack([log_ratio.detach(), advantages.masked_fill(is_empty, 0.0)], dim=1))

    def end_update(self, gather: Callable[[torch.Tensor], torch.Tensor], is_on_policy: bool) -> None:
        """Estimate the bands of the next update, with the arguments of `Objective.end_update`."""
        rows = gather(torch.cat(self._update)).cpu()
        self._update = []
        rows = rows[(rows[:, 1] != 0) & rows[:, 0].isfinite()]
        has_moved = not is_on_policy and bool((rows[:, 0].abs() > MOVED).any())
        self._window.append(rows if has_moved else rows.new_empty(0, 2))
        self._estimate()

    def _estimate(self) -> None:
        self.bands = estimate_bands(*torch.cat([*self._window]).unbind(1), self.share)

    def state(self) -> dict[str, Any]:
        """Return the state with which a resumed run continues with the same bands."""
        return {"trust_band_share": self.share, "window": [*self._window]}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from the state of [`~EstimatedBands.state`]."""
        self._window.clear()
        self._window.extend(state["window"])
        if self._window:
            self._estimate()
