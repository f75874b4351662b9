"""
Variants of TBPO with one thing changed, to find what makes it slow. `benchmarks/study/long_study.py` runs them as
`control-*`.

    python benchmarks/study/band_controls.py

compares their results in benchmarks/study/study.json and draws benchmarks/study/study-bands.png (needs matplotlib).
"""

import json
import math
import statistics
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from trl_qarl.forward import Batch
from trl_qarl.objectives.objective import Loss
from trl_qarl.objectives.tbpo import TBPO, trust_band_clip
from trl_qarl.objectives.trust_bands import Bands


HERE = Path(__file__).parent
# Generation batches whose mean reward is compared, counted from 0: updates 57 to 96, at eight updates per batch.
COMPARED, FLIPS = slice(7, 12), "quant/code_flip_rate"
# Pairs of patterns `STUDY LEARNER OBJECTIVE`: runs, and the runs they are compared with.
LEARNERS = ("QaRL", "rollout-only")
CHANGES = ("control-open", "control-kept", "control-positive", "tbpo-auto-adamw-1e-4")
PAIRS = (
    ("length_* * tbpo", "length_* * grpo-tis"),
    ("*_1000 QaRL tbpo", "*_1000 QaRL grpo-tis"),
    ("*_1000 QaRL tbpo", "*_1000 QaRL tbpo-wide"),
    ("bands_1000 QaRL tbpo", "length_1000 QaRL tbpo"),
    *((f"*_{length} QaRL {change}", f"*_{length} QaRL tbpo") for length in (1000, 150) for change in CHANGES),
    *(
        (f"{study} {learner} tbpo-auto-{optimizer}", f"{study} {learner} tbpo-{optimizer}")
        for study in ("bands_150", "bands_400", "bands_1000_auto")
        for learner in LEARNERS
        for optimizer in ("adamw-3e-5", "adamw-1e-4", "adamw-3e-4", "muon-1e-4")
    ),
)
SHOWN = {
    "*_1000 QaRL tbpo": ("TBPO, bands by hand", "blue"),
    "*_1000 QaRL control-open": ("TBPO without bands", "vermillion"),
    "bands_1000_auto QaRL tbpo-auto-adamw-1e-4": ("TBPO, bands that set themselves", "green"),
    "*_1000 QaRL grpo-tis": ("GRPO", "ink"),
}


@dataclass(frozen=True)
class Control(type(TBPO)):
    """
    TBPO without some bands, or with another mean.

    Args:
        opened (`tuple[str, ...]`, *optional*):
            Bands to switch off, by option name.
        by_kept (`bool`, *optional*, defaults to `False`):
            Divide the sum over answers by the number of kept answers instead of by all.
    """

    opened: tuple[str, ...] = ()
    by_kept: bool = False

    @override
    def _bands(self, config: Any) -> Bands:
        return super()._bands(config)._replace(**dict.fromkeys(self.opened, math.inf))

    @override
    def loss(self, config: Any, batch: Batch) -> Loss:
        loss = super().loss(config, batch)
        dropped = loss.metrics["tbpo/dropped/total"] == 1
        few = dropped_by_few_tokens(batch, self._bands(config)).double().masked_fill(~dropped, math.nan)
        kept = (~dropped).sum().clamp(min=1) if self.by_kept else len(dropped)
        return loss._replace(
            value=loss.value * len(dropped) / kept,
            metrics=loss.metrics | {"control/dropped_by_few_tokens": few},
        )


@torch.no_grad()
def dropped_by_few_tokens(batch: Batch, bands: Bands) -> torch.Tensor:
    """Mask, `(B,)`, of the answers that are inside their band once the 1 % of tokens that moved most is left out."""
    change = (batch.per_token_logps - batch.old_per_token_logps) * batch.mask
    most = change.abs().topk(math.ceil(change.shape[1] / 100)).indices
    ratio = (change.scatter(1, most, 0.0).sum(1) / batch.mask.sum(1).clamp(min=1)).exp()
    return trust_band_clip(ratio, batch.advantages, **bands._asdict()) == ratio


def select(cells: list[dict[str, Any]], pattern: str) -> dict[tuple, dict[str, Any]]:
    """Return the low-bit runs of a pattern by length, learner and seed. If a run was repeated, the last one counts."""
    found = {}
    for cell in cells:
        learner = "QaRL" if cell.get("quantize_learner") else "rollout-only"
        if cell["scheme"] != "bf16" and fnmatch(f"{cell['study']} {learner} {cell['objective']}", pattern):
            found[cell["study"].partition("_")[2], learner, cell["seed"]] = cell
    return found


def compare(cells: list[dict[str, Any]]) -> None:
    """Print mean differences with 95 % intervals for `PAIRS`, over runs with the same length, learner and seed."""
    from long_tables import interval

    def mean(cell: dict[str, Any], metric: str, batches: slice = COMPARED) -> float:
        values = [value for value in cell["course"].get(metric, [])[batches] if value is not None]
        return 100 * statistics.fmean(values) if values else 0.0

    print("| runs | against | pairs | reward, updates 57 to 96 | last quarter | solved | dropped | code flips |")
    print("|---|---|---|---|---|---|---|---|")
    for names in PAIRS:
        one, other = (select(cells, name) for name in names)
        pairs = [(one[run], other[run]) for run in sorted(one) if run in other]
        if not pairs:
            continue
        lengths = [min(len(cell["course"]["reward"]) for cell in pair) for pair in pairs]
        quarters = [slice(length - length // 4, length) for length in lengths]
        dropped = [
            statistics.fmean(mean(cell, "tbpo/dropped/total") for cell in group) for group in zip(*pairs, strict=True)
        ]
        columns = (
            *names,
            str(len(pairs)),
            interval([mean(a, "reward") - mean(b, "reward") for a, b in pairs]),
            interval([mean(a, "reward", q) - mean(b, "reward", q) for (a, b), q in zip(pairs, quarters, strict=True)]),
            interval(
                [
                    a["scores"]["greedy"] - b["scores"]["greedy"]
                    for a, b in pairs
                    if len(a["course"]["reward"]) == len(b["course"]["reward"])
                ]
            ),
            " against ".join(f"{share:.0f} %" for share in dropped),
            f"{interval([100 * mean(a, FLIPS) / mean(b, FLIPS) for a, b in pairs])} %",
        )
        rewards = [", ".join(f"{mean(cell, 'reward'):.0f}" for cell in group) for group in zip(*pairs, strict=True)]
        print(f"| {' | '.join(columns)} |", *(rewards if len(pairs) < 8 else ()), sep="  ")


def draw(cells: list[dict[str, Any]]) -> None:
    """Draw QaRL's rewards over the updates, smoothed over five generation batches: each run and the mean of all."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from long_tables import smooth
    from palette import COLORS

    figure, axes = plt.subplots(figsize=(7, 3.6))
    for pattern, (name, color) in SHOWN.items():
        courses = [cell["course"]["reward"][: COMPARED.stop] for cell in select(cells, pattern).values()]
        for members in [*([course] for course in courses), courses]:
            rewards = [100 * reward for reward in smooth(members)]
            style = {"lw": 2.6, "label": f"{name} ({len(courses)} seeds)"} if members is courses else {"lw": 0.8}
            axes.plot(range(8, 8 * len(rewards) + 1, 8), rewards, color=COLORS[color], **style)
    axes.set_xlabel("updates")
    axes.set_ylabel("reward, %")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    figure.tight_layout()
    figure.savefig(HERE / "study-bands.png", facecolor="white", dpi=130)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    recorded = json.loads((HERE / "study.json").read_text())
    compare(recorded)
    draw(recorded)
