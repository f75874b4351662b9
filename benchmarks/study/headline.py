"""
Draws docs/headline.png and the figures of benchmarks/study/README.md from study.json (needs matplotlib):

    python benchmarks/study/headline.py

study-bits.png, study-length.png and study-shapes.png are only drawn if `long_tables.py --collect` has added the cells
of bits.yaml, length_1000.yaml and shapes.yaml to study.json.
"""

import json
import statistics
import sys
from pathlib import Path


HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
sys.path.insert(0, str(HERE))

from long_tables import BITS, group_cells, half_width, read_at_bits, smooth  # noqa: E402
from palette import COLORS  # noqa: E402


RESULTS, SECONDS, PICTURE = HERE / "study.json", HERE / "seconds.jsonl", DOCS / "headline.png"
SCHEMES = {"w4a16-g128": "4-bit weights", "w3a16-g32": "3-bit weights"}
RUNS = {
    ("rollout-only", "grpo-tis"): ("rollout only, GRPO", "vermillion"),
    ("rollout-only", "tbpo"): ("rollout only, TBPO", "orange"),
    ("QaRL", "grpo-tis"): ("QaRL, GRPO", "sky"),
    ("QaRL", "gspo"): ("QaRL, GSPO", "green"),
    ("QaRL", "tbpo"): ("QaRL, TBPO", "blue"),
}
BASELINE = ("long", "bf16", "bf16", "grpo-tis")
# Held-out problems solved greedily before training, in percent of 256 ("before training" in README.md).
BEFORE = {"bf16": 74, "w4a16-g128": 62, "w3a16-g32": 32}
# Recipes of benchmarks/study/bits.yaml: plain in the left panel, with `-warm` in the right one.
RECIPES = {
    "nested-4": ("4", "ink"),
    "nested-3": ("3", "blue"),
    "nested-2": ("2", "vermillion"),
    "nested-43": ("4, 3 in turn", "sky"),
    "nested-432": ("4, 3, 2 in turn", "green"),
    "nested-4to3": ("4, then 3", "orange"),
    "nested-4to3to2": ("4, then 3, then 2", "pink"),
}


# Studies of one recipe at several answer lengths.
LENGTHS = {"length_150": "150 tokens", "length_400": "400 tokens", "length_1000": "1,000 tokens"}
LENGTH_SCHEME = AGE_SCHEME = "w4a16-g128-signed"
# Runs of the picture task, benchmarks/study/shapes.yaml.
SHAPES_RUNS = (("bf16", "grpo-tis"), ("QaRL", "grpo-tis"), ("rollout-only", "grpo-tis"))


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
    """Draw the headline: a dot with its 95 % interval for each run, small dots for its seeds, and a band for bf16."""
    figure, panels = _panels(figsize=(9, 3.4), sharey=True)
    groups = group_cells(cells)
    mean, width = scores["bf16"]["bf16, GRPO"]
    for axes, (scheme, title) in zip(panels, SCHEMES.items(), strict=True):
        axes.axhspan(mean - width, mean + width, color="#d9dee3", lw=0)
        axes.axhline(mean, color=COLORS["ink"], lw=1)
        axes.text(-0.45, mean + width + 1.5, f"bf16: {mean:.0f} %", fontsize=10)
        axes.axhline(BEFORE[scheme], color=COLORS["grey"], lw=1, ls=":")
        axes.text(-0.45, BEFORE[scheme] + 1.5, "before training", fontsize=9, color=COLORS["grey"])
        for place, (run, (label, color)) in enumerate(RUNS.items()):
            score, half = scores[title][label]
            axes.errorbar(place, score, half, fmt="o", ms=7, capsize=4, color=COLORS[color])
            seeds = [cell["scores"]["greedy"] for cell in groups["long", scheme, *run]]
            axes.plot([place - 0.16] * len(seeds), seeds, "o", ms=3, alpha=0.6, color=COLORS[color])
            axes.annotate(f"{score:.0f}", (place, score), (9, -4), textcoords="offset points", fontsize=11)
        axes.set_xticks(range(len(RUNS)), [label.replace(", ", "\n") for label, _ in RUNS.values()], fontsize=9)
        axes.set_xlim(-0.5, len(RUNS) - 0.35)
        axes.set_ylim(20, 100)
        axes.set_title(title, fontsize=12, loc="left")
        axes.yaxis.set_major_formatter("{x:.0f} %")
    figure.tight_layout()
    # White also on dark pages. The picture carries its numbers, so that a test can compare them.
    figure.savefig(PICTURE, facecolor="white", dpi=160, metadata={"Description": repr(scores)})


def draw_courses(cells: list[dict], metric: str, label: str, picture: str, log: bool = False) -> None:
    """Draw a metric over the updates, as means over the seeds."""
    groups = group_cells(cells)
    figure, panels = _panels(figsize=(9, 3.4), sharey=True)
    for axes, (scheme, title) in zip(panels, SCHEMES.items(), strict=True):
        runs = {("long", scheme, *run): style for run, style in RUNS.items()} | {BASELINE: ("bf16, GRPO", "ink")}
        for key, (name, color) in runs.items():
            course = smooth([cell["course"][metric] for cell in groups[key]])
            axes.plot([8 * i for i in range(1, len(course) + 1)], course, color=COLORS[color], lw=1.8, label=name)
        axes.set_title(title, fontsize=12, loc="left")
        axes.set_xlabel("updates")
        if log:
            axes.set_yscale("log")
    panels[0].set_ylabel(label)
    panels[1].legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(HERE / picture, facecolor="white", dpi=130)


def draw_bits(cells: list[dict]) -> None:
    """Draw the greedy scores of each recipe's masters at 4, 3 and 2 bits, as means over the seeds."""
    groups = {scheme: members for (study, scheme, *_), members in group_cells(cells).items() if study == "bits"}
    figure, panels = _panels(figsize=(9, 3.6), sharey=True)
    for axes, suffix, title in zip(panels, ("", "-warm"), ("as the model is", "after a warm start"), strict=True):
        for recipe, (name, color) in RECIPES.items():
            if scored := groups.get(recipe + suffix):
                means = [statistics.fmean(read_at_bits(scored, bits)) for bits in BITS]
                axes.plot(range(len(BITS)), means, "o-", color=COLORS[color], lw=1.8, label=name)
        axes.set_xticks(range(len(BITS)), [f"{bits} bits" for bits in BITS])
        axes.set_title(title, fontsize=12, loc="left")
        axes.yaxis.set_major_formatter("{x:.0f} %")
    lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    panels[1].legend(
        lines.values(),
        lines,
        frameon=False,
        fontsize=8.5,
        title="trained at bits",
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    figure.tight_layout()
    figure.savefig(HERE / "study-bits.png", facecolor="white", dpi=130)


def draw_lengths(cells: list[dict]) -> None:
    """Draw rewards over the updates for the longest answers, and the deployed policy's scores by length, with a small
    dot for each seed."""
    groups = group_cells(cells)
    figure, (courses, scores) = _panels(figsize=(9, 3.6))
    found = [study for study in LENGTHS if any(study == of for of, *_ in groups)]
    runs = {(LENGTH_SCHEME, *run): style for run, style in RUNS.items()} | {BASELINE[1:]: ("bf16, GRPO", "ink")}
    for place, (run, (name, color)) in enumerate(runs.items()):
        color = COLORS[color]
        if cells_of_run := groups.get((found[-1], *run)):
            course = smooth([cell["course"]["reward"] for cell in cells_of_run])
            courses.plot([8 * i for i in range(1, len(course) + 1)], course, color=color, lw=1.8, label=name)
        for index, study in enumerate(found):
            solved = [cell["scores"]["greedy"] for cell in groups.get((study, *run), [])]
            x = index + 0.12 * (place - len(runs) / 2)
            scores.plot([x] * len(solved), solved, "o", ms=4, alpha=0.6, color=color)
            if solved:
                scores.plot(x, statistics.fmean(solved), "_", ms=14, mew=2.5, color=color)
    courses.set_title(f"rewards, answers of {LENGTHS[found[-1]]}", fontsize=12, loc="left")
    courses.set_xlabel("updates")
    scores.set_title("solved greedily at the end", fontsize=12, loc="left")
    scores.set_xticks(range(len(found)), [LENGTHS[study] for study in found])
    scores.set_xlim(-0.7, len(found) - 0.3)
    scores.yaxis.set_major_formatter("{x:.0f} %")
    courses.legend(frameon=False, fontsize=8.5, loc="lower right")
    courses.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(HERE / "study-length.png", facecolor="white", dpi=130)


def draw_shapes(cells: list[dict]) -> None:
    """Draw the picture task: rewards over the updates, with a thin line for each seed, and the deployed policy's final
    scores, with a small dot for each seed."""
    groups = {tuple(run): found for (study, _, *run), found in group_cells(cells).items() if study == "shapes"}
    figure, (courses, scores) = _panels(figsize=(9, 3.4))
    for place, run in enumerate(SHAPES_RUNS):
        name, color = RUNS.get(run, ("bf16, GRPO", "ink"))
        color = COLORS[color]
        rewards = [cell["course"]["reward"] for cell in groups[run]]
        updates = [8 * i for i in range(1, len(rewards[0]) + 1)]
        courses.plot(updates, [statistics.fmean(of) for of in zip(*rewards, strict=True)], color=color, label=name)
        for course in rewards:
            courses.plot(updates, course, color=color, lw=0.6, alpha=0.5)
        solved = [cell["scores"]["greedy"] for cell in groups[run]]
        scores.plot([place] * len(solved), solved, "o", ms=4, alpha=0.6, color=color)
        scores.plot(place, statistics.fmean(solved), "_", ms=22, mew=2.5, color=color)
    courses.set_title("rewards", fontsize=12, loc="left")
    courses.set_xlabel("updates")
    courses.set_ylim(0, 1)
    courses.legend(frameon=False, fontsize=8.5, loc="lower right")
    scores.set_title("solved greedily at the end", fontsize=12, loc="left")
    scores.set_xticks(range(len(SHAPES_RUNS)), [RUNS.get(run, ("bf16, GRPO",))[0] for run in SHAPES_RUNS], fontsize=9)
    scores.set_xlim(-0.6, len(SHAPES_RUNS) - 0.4)
    scores.set_ylim(0, 100)
    scores.yaxis.set_major_formatter("{x:.0f} %")
    figure.tight_layout()
    figure.savefig(HERE / "study-shapes.png", facecolor="white", dpi=130)


def _panels(**options):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, **options)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eceff2")
        axes.set_axisbelow(True)
    return figure, panels


def draw_ages(cells: list[dict], timed: list[dict]) -> None:
    """Draw rewards by age of the rollouts, as means over the seeds, in a column for each objective: over updates, and
    below over seconds for the `timed` runs of `seconds.py`, with and without `rollout_ahead=1`."""
    import matplotlib.pyplot as plt

    groups = {name[1:]: of for name, of in group_cells(cells).items() if name[0] == "age"}
    objectives = list(dict.fromkeys(objective for _, _, objective in groups))
    colors = {0: "ink", 1: "blue", 2: "green", 4: "vermillion"}
    figure, panels = plt.subplots(2, len(objectives), figsize=(3.6 * len(objectives), 5.8), sharey=True)
    for objective, (axes, below) in zip(objectives, panels.T, strict=True):
        for age, color in colors.items():
            of = groups.get((AGE_SCHEME + (f"-age{age}" if age else ""), "QaRL", objective), [])
            if of:
                rewards = smooth([cell["course"]["reward"] for cell in of])
                updates = range(8, 8 * len(rewards) + 1, 8)
                axes.plot(updates, rewards, color=COLORS[color], label=f"{age} ({len(of)} seeds)")
        axes.set_title(f"QaRL, {objective}", fontsize=10)
        axes.set_xlabel("update")
        axes.legend(title="age in batches", loc="upper left", fontsize=8, title_fontsize=8, frameon=False)
        for ahead in (0, 1):
            runs = [run for run in timed if (run["objective"], run["rollout_ahead"]) == (objective, ahead)]
            seconds = [statistics.fmean(times) for times in zip(*(run["seconds"] for run in runs), strict=True)]
            label = f"rollout_ahead={ahead} ({len(runs)} seeds)"
            rewards = smooth([run["reward"] for run in runs])
            below.plot(seconds, rewards, color=COLORS[colors[ahead]], label=label)
        below.set_xlabel("seconds, vLLM on a core of its own")
        below.legend(loc="lower right", fontsize=8, frameon=False)
    for axes in panels[:, 0]:
        axes.set_ylabel("reward")
    figure.tight_layout()
    figure.savefig(HERE / "study-age.png", facecolor="white", dpi=130)


if __name__ == "__main__":
    cells = json.loads(RESULTS.read_text())
    draw_scores(cells, read_scores(cells))
    draw_courses(cells, "reward", "share of sampled answers that are right", "study-long-reward.png")
    draw_courses(cells, "mismatch/abs_logp_mean", "mismatch, nats per token", "study-long-mismatch.png", log=True)
    if any(cell["study"] == "bits" for cell in cells):
        draw_bits(cells)
    if any(cell["study"] in LENGTHS for cell in cells):
        draw_lengths(cells)
    if any(cell["study"] == "age" for cell in cells):
        draw_ages(cells, [json.loads(line) for line in SECONDS.read_text().splitlines()])
    if any(cell["study"] == "shapes" for cell in cells):
        draw_shapes(cells)
