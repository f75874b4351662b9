"""Draws docs/headline.png from study.json (needs matplotlib and scipy): `python benchmarks/study/headline.py`."""

import json
import statistics
import sys
from pathlib import Path


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cells import RESULTS, group_cells, half_width  # noqa: E402


PICTURE = HERE.parents[1] / "docs" / "headline.png"
SCHEMES = {"w4a16-g128": "4-bit weights", "w3a16-g32": "3-bit weights"}
RUNS = {
    ("rollout-only", "grpo-tis"): ("rollout only, GRPO", "#d55e00"),
    ("rollout-only", "tbpo"): ("rollout only, TBPO", "#e69f00"),
    ("QaRL", "grpo-tis"): ("QaRL, GRPO", "#56b4e9"),
    ("QaRL", "gspo"): ("QaRL, GSPO", "#009e73"),
    ("QaRL", "tbpo"): ("QaRL, TBPO", "#0072b2"),
}
BASELINE = ("long", "bf16", "bf16", "grpo-tis")
# Held-out problems solved greedily before training, in percent of 256 ("Results" in README.md).
BEFORE = {"w4a16-g128": 62, "w3a16-g32": 32}


def read_scores(cells: list[dict]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return mean and 95 % half width of the deployed policy's greedy scores in percent, by scheme and run."""
    groups = group_cells(cells)

    def score(key) -> tuple[float, float]:
        values = [cell["scores"]["greedy"] for cell in groups[key]]
        return round(statistics.fmean(values), 1), round(half_width(values), 1)

    found = {
        title: {label: score(("long", scheme, *run)) for run, (label, _) in RUNS.items()}
        for scheme, title in SCHEMES.items()
    }
    return {"bf16": {"bf16, GRPO": score(BASELINE)}, **found}


def draw_scores(cells: list[dict], scores: dict[str, dict[str, tuple[float, float]]]) -> None:
    """Draw a dot with its 95 % interval for each run, small dots for its seeds, and a band for bf16."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    groups = group_cells(cells)
    mean, width = scores["bf16"]["bf16, GRPO"]
    for axes, (scheme, title) in zip(panels, SCHEMES.items(), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eceff2")
        axes.set_axisbelow(True)
        axes.axhspan(mean - width, mean + width, color="#d9dee3", lw=0)
        axes.axhline(mean, color="#1a1a1a", lw=1)
        axes.text(-0.45, mean + width + 1.5, f"bf16: {mean:.0f} %", fontsize=10)
        axes.axhline(BEFORE[scheme], color="#767676", lw=1, ls=":")
        axes.text(-0.45, BEFORE[scheme] + 1.5, "before training", fontsize=9, color="#767676")
        for place, (run, (label, color)) in enumerate(RUNS.items()):
            score, half = scores[title][label]
            axes.errorbar(place, score, half, fmt="o", ms=7, capsize=4, color=color)
            seeds = [cell["scores"]["greedy"] for cell in groups["long", scheme, *run]]
            axes.plot([place - 0.16] * len(seeds), seeds, "o", ms=3, alpha=0.6, color=color)
            axes.annotate(f"{score:.0f}", (place, score), (9, -4), textcoords="offset points", fontsize=11)
        axes.set_xticks(range(len(RUNS)), [label.replace(", ", "\n") for label, _ in RUNS.values()], fontsize=9)
        axes.set_xlim(-0.5, len(RUNS) - 0.35)
        axes.set_ylim(20, 100)
        axes.set_title(title, fontsize=12, loc="left")
        axes.yaxis.set_major_formatter("{x:.0f} %")
    figure.tight_layout()
    # White also on dark pages. The picture carries its numbers, so that a test can compare them.
    figure.savefig(PICTURE, facecolor="white", dpi=160, metadata={"Description": repr(scores)})


if __name__ == "__main__":
    results = json.loads(RESULTS.read_text())
    draw_scores(results, read_scores(results))
