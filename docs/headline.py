"""Draws headline.png from the first table of results in study.md: `python docs/headline.py` (needs matplotlib)."""

import re
from pathlib import Path


STUDY, PICTURE = (Path(__file__).with_name(name) for name in ("study.md", "headline.png"))
ROWS = {"counting, `w4a16`": "counting, 19 tokens", "sums, `w4a16`": "addition, 4 tokens"}
RUNS = {
    "bf16, GRPO": ("bf16 (GRPO)", "#9aa5b1"),
    "QaRL, TBPO": ("INT4 with QaRL (TBPO)", "#1f6feb"),
    "rollout-only, TBPO": ("INT4 rollout only (TBPO)", "#e08a3c"),
    "rollout-only, GRPO": ("INT4 rollout only (GRPO)", "#b4472e"),
}


def read_scores(page: str) -> dict[str, dict[str, int | None]]:
    """Per cent of held-out problems solved, by task and run; `None` where a run was not made."""
    header, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.search(r"^\| held-out problems solved.*?\n\n", page, re.DOTALL | re.MULTILINE)[0].splitlines()
        if line and not line.startswith("|---")
    ]
    scores = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    return {task: {run: int(scores[task][run]) if scores[task][run] != "-" else None for run in RUNS} for task in ROWS}


def draw(scores: dict[str, dict[str, int | None]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.6), dpi=160)
    for position, (run, (label, colour)) in enumerate(RUNS.items()):
        for index, task in enumerate(ROWS):
            x, score = index + 0.2 * (position - 1.5), scores[task][run]
            axes.bar(x, score or 0, 0.18, color=colour, label=label if index == 0 else None)
            axes.text(x, (score or 0) + 2, "not run" if score is None else f"{score} %", ha="center", fontsize=11)
    axes.set_xticks(range(len(ROWS)), ROWS.values(), fontsize=12)
    axes.set_ylim(0, 112)
    axes.set_yticks([])
    axes.tick_params(length=0)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title("Held-out problems solved by the deployed policy, SmolLM2-135M", fontsize=12, pad=12)
    figure.legend(loc="lower center", ncols=4, frameon=False, fontsize=10.5, handlelength=1, columnspacing=1.4)
    figure.subplots_adjust(left=0.02, right=0.98, top=0.88, bottom=0.2)
    # White also on a dark page. The numbers are kept with the picture, so that a test can compare them.
    figure.savefig(PICTURE, facecolor="white", metadata={"Description": repr(scores)})


if __name__ == "__main__":
    draw(read_scores(STUDY.read_text()))
