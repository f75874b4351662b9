"""
Draws docs/alignment.png from alignment.json: `python benchmarks/alignment.py` (needs matplotlib).

The JSON holds the results of `python -m benchmarks.bench alignment --dtypes bfloat16 --tokens 3000 --json FILE`, with
its command and machine.
"""

import json
from pathlib import Path

from bench.alignment import summarize_alignment


FOLDER = Path(__file__).parent
RESULTS = FOLDER / "alignment.json"
PICTURE = FOLDER.parent / "docs" / "alignment.png"
NUMERICS = {
    "unaligned": ("learner in high precision", "#e08a3c"),
    "fast": ("learner with the engine's weights", "#9aa5b1"),
    "engine": ("the same with engine numerics", "#1f6feb"),
}
ZERO = 0.01  # position of 0 on the logarithmic axis


def read_results() -> dict[str, list[dict]]:
    """Return one row per scheme for each kind of rollout."""
    return {name: summarize_alignment(result["rows"]) for name, result in json.loads(RESULTS.read_text()).items()}


def number(value: float) -> str:
    """Format to two significant digits; "0" means exactly 0."""
    return "0" if value == 0 else f"{value:#.2g}".rstrip(".")


def means(results: dict[str, list[dict]]) -> dict[str, dict[str, float]]:
    """Return the mean |dlogp| by scheme and numerics, for the picture."""
    return {
        row["scheme"]: {name: row[f"{name}: mean"] for name in NUMERICS if f"{name}: mean" in row}
        for row in results["colocate"]
    }


def draw(values: dict[str, dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.4), dpi=160)
    for y, row in enumerate(values.values()):
        places = {name: max(value, ZERO) for name, value in row.items()}
        axes.plot([min(places.values()), max(places.values())], [y, y], color="#d8dee4", lw=2, zorder=1)
        for name, value in row.items():
            label, colour = NUMERICS[name]
            axes.scatter(places[name], y, s=110, color=colour, zorder=2, label=label if y == 1 else None)
            # Labels above and below, because two dots of a row can lie close together.
            above = name != "fast"
            axes.annotate(
                number(value),
                (places[name], y),
                (0, 9 if above else -9),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
                fontsize=10.5,
            )
    axes.set_xscale("log")
    axes.set_xlim(ZERO / 1.4, 3)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xticks([ZERO, 0.03, 0.1, 0.3, 1], ["0", "0.03", "0.1", "0.3", "1"], fontsize=11)
    axes.set_xticks([], minor=True)
    axes.text(ZERO * 1.55, len(values) - 0.4, "//", ha="center", va="center", fontsize=12, backgroundcolor="white")
    axes.set_yticks(range(len(values)), values, fontsize=12)
    axes.tick_params(length=0)
    axes.axvline(ZERO, color="#1f6feb", lw=1, alpha=0.3, zorder=0)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title("Mean difference of a sampled token's log-prob, engine against learner (nats)", fontsize=12, pad=12)
    figure.legend(loc="lower center", ncols=3, frameon=False, fontsize=10.5, handletextpad=0.3)
    figure.subplots_adjust(left=0.09, right=0.98, top=0.88, bottom=0.2)
    # White also on dark pages. The picture carries its numbers, so that a test can compare them.
    figure.savefig(PICTURE, facecolor="white", metadata={"Description": repr(values)})


if __name__ == "__main__":
    draw(means(read_results()))
