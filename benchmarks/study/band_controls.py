"""
TBPO with one thing changed, to tell what makes it slow: `benchmarks/study/long_study.py` names these controls
`control-*`.

    python benchmarks/study/band_controls.py

prints how they compare in benchmarks/study/study.json, and draws benchmarks/study/study-bands.png (needs matplotlib).
"""

import json
import math
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from trl_qarl.forward import Batch
from trl_qarl.objectives.objective import Loss
from trl_qarl.objectives.tbpo import TBPO, tbpo_loss
from trl_qarl.objectives.trust_bands import OPEN, Bands


HERE = Path(__file__).parent
# Generation batches of eight updates whose mean reward is compared, counted from 0: updates 57 to 96.
COMPARED = slice(7, 12)
SHOWN = {
    ("length_1000", "grpo-tis"): ("GRPO", "#000000", "-"),
    ("length_1000", "tbpo"): ("TBPO", "#0072b2", "-"),
    ("bands_1000", "tbpo"): ("TBPO, again on another processor", "#0072b2", "--"),
    ("length_1000", "tbpo-wide"): ("bands three times as wide", "#56b4e9", "-"),
    ("bands_1000", "control-open"): ("no bands", "#009e73", "-"),
    ("bands_1000", "control-positive"): ("wrong answers without band", "#d55e00", "-"),
    ("bands_1000", "control-random"): ("as many dropped, at random", "#cc79a7", "-"),
}


@dataclass(frozen=True)
class Control(type(TBPO)):
    """
    TBPO, changed.

    Args:
        opened (`tuple[str, ...]`, *optional*):
            Bands, by the names of their options, that bound nothing.
        is_random (`bool`, *optional*, defaults to `False`):
            Whether as many answers of each sign as lie outside their band are dropped, but drawn at random.
        by_kept (`bool`, *optional*, defaults to `False`):
            Whether the sum over answers is divided by the number that was kept, instead of by all.
    """

    opened: tuple[str, ...] = ()
    is_random: bool = False
    by_kept: bool = False
    generator: torch.Generator | None = None

    @override
    def for_run(self, config: Any) -> "Control":
        run = super().for_run(config)
        # One of its own: the rollouts are drawn as without it.
        return replace(run, generator=torch.Generator().manual_seed(config.seed))

    @override
    def _bands(self, config: Any) -> Bands:
        return super()._bands(config)._replace(**dict.fromkeys(self.opened, math.inf))

    @override
    def loss(self, config: Any, batch: Batch) -> Loss:
        loss = super().loss(config, batch)
        dropped = loss.metrics["tbpo/dropped/total"] == 1
        value = loss.value
        if self.is_random:
            dropped = shuffle_within_signs(dropped, batch.advantages, self.generator)
            # An advantage of 0 gives no gradient.
            chosen = batch._replace(advantages=batch.advantages.masked_fill(dropped, 0.0))
            value, _ = tbpo_loss(
                chosen.per_token_logps,
                chosen.old_per_token_logps,
                chosen.sampling_per_token_logps,
                chosen.advantages,
                chosen.mask,
                **OPEN._asdict(),
                mismatch_cap=config.mismatch_cap,
            )
        if self.by_kept:
            value = value * len(dropped) / (~dropped).sum().clamp(min=1)
        return loss._replace(value=value)


def shuffle_within_signs(
    dropped: torch.Tensor, advantages: torch.Tensor, generator: torch.Generator | None
) -> torch.Tensor:
    """
    Return as many flags as in `dropped`, `(B,)`, for each sign of `advantages`, but at random places.

    >>> signs = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
    >>> dropped = torch.tensor([True, False, True, True, False, False])
    >>> shuffled = shuffle_within_signs(dropped, signs, torch.Generator().manual_seed(0))
    >>> shuffled[signs > 0].sum().item(), shuffled[signs < 0].sum().item(), shuffled[5].item()
    (1, 2, False)
    """
    shuffled = dropped.clone()
    for rows in (advantages > 0, advantages < 0):
        places = rows.nonzero()[:, 0]
        shuffled[places] = dropped[places[torch.randperm(len(places), generator=generator)]]
    return shuffled


def compare(cells: list[dict]) -> None:
    """Print the runs with answers of 700 to 1,100 tokens, and TBPO minus GRPO over pairs of one learner and seed."""
    from long_tables import interval

    def early(cell: dict) -> float:
        return 100 * statistics.fmean(cell["course"]["reward"][COMPARED])

    print("| learner | objective | seed | reward, updates 57 to 96 | dropped, same updates | solved, after updates |")
    print("|---|---|---|---|---|---|")
    runs = {}
    for cell in cells:
        if cell["study"] not in ("length_1000", "bands_1000") or cell["scheme"] == "bf16":
            continue
        course, solved = cell["course"], cell["scores"]["greedy"]
        dropped = [share for share in course.get("tbpo/dropped/total", [])[COMPARED] if share is not None]
        learner = "QaRL" if cell["quantize_learner"] else "rollout-only"
        share = f"{100 * statistics.fmean(dropped):.0f}" if dropped else "-"
        print(
            f"| {learner} | {cell['objective']} | {cell['seed']} | {early(cell):.0f} | {share} "
            f"| {solved:.0f}, {8 * len(course['reward'])} |"
        )
        if cell["study"] == "length_1000":
            runs[learner, cell["objective"], cell["seed"]] = early(cell), solved
    pairs = [
        (runs[learner, "tbpo", seed], runs[learner, "grpo-tis", seed])
        for learner, name, seed in runs
        if name == "tbpo"
    ]
    for index, name in enumerate(("reward, updates 57 to 96", "solved at the end")):
        differences = [tbpo[index] - grpo[index] for tbpo, grpo in pairs]
        print(f"TBPO minus GRPO, {name}: {interval(differences)} over {len(differences)} pairs")


def draw(cells: list[dict]) -> None:
    """Draw the rewards of QaRL over the updates, a panel for each seed, means over five generation batches."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(10, 3.4), sharey=True)
    for seed, panel in enumerate(panels):
        for (study, objective), (name, color, style) in SHOWN.items():
            for cell in cells:
                is_shown = (cell["study"], cell["objective"], cell["seed"]) == (study, objective, seed)
                if not is_shown or not cell.get("quantize_learner"):
                    continue
                rewards = cell["course"]["reward"]
                smooth = [100 * statistics.fmean(rewards[max(0, end - 5) : end]) for end in range(1, len(rewards) + 1)]
                panel.plot([8 * end for end in range(1, len(smooth) + 1)], smooth, style, color=color, label=name)
        panel.set_title(f"seed {seed}", loc="left", fontsize=11)
        panel.set_xlabel("updates")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("reward, %")
    panels[0].set_ylim(bottom=0)
    labels = {name: line for panel in panels for line, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="lower center", ncols=4, frameon=False, fontsize=8.5)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(HERE / "study-bands.png", facecolor="white", dpi=130)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    recorded = json.loads((HERE / "study.json").read_text())
    compare(recorded)
    draw(recorded)
