"""
The figures of `trl-qarl report`: which panels there are and how each is drawn. One colour per group of runs, bands
over seeds, nothing left out without a mark. Loads matplotlib and pandas.
"""

import io
import math
import textwrap
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib


matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas
from matplotlib.ticker import LogLocator

from ..quantization.precisions import NESTING_BITS
from ..telemetry.advisor import DROPPED_AIM, STALLED_FLIP_RATE, mismatch_bands
from ..telemetry.run_files import LOG_EDGES
from .groups import EVERY_BATCH, Group, find_holes


__all__ = ["Figure", "draw_figures", "draw_finals", "printable", "save_pngs", "to_png", "to_svg"]

LEVEL_COLORS = {"fine": "#2da44e", "watch": "#bf8700", "bad": "#cf222e"}


class Metric(NamedTuple):
    """
    A metric over updates: its `name` in `metrics.jsonl`; what it is, with its unit; `"linear"`, `"log"`, or `"share"`,
    which always goes from 0 to 1; `limits` that the axis always shows; and ranges to shade with the level of each.
    """

    name: str
    title: str
    scale: str = "linear"
    limits: tuple[float, float] | None = None
    bands: tuple[tuple[float, float, str], ...] = ()


@dataclass
class Figure:
    """Panels under one heading: pairs of a title and what draws it on axes. `name` is that of its PNG file. `exact`
    says which metrics are 0 at every update, which no logarithmic axis can show."""

    heading: str
    name: str
    caption: str
    panels: list[tuple[str, Callable]] = field(default_factory=list)
    exact: list[str] = field(default_factory=list)

    @property
    def is_wide(self) -> bool:
        """True if panels stand in two columns rather than in three, so that rows are full."""
        return len(self.panels) % 2 == 0 or len(self.panels) == 1

    def svgs(self) -> list[tuple[str, str]]:
        """Return title and SVG of each panel."""
        size = (6.2, 2.8) if self.is_wide else (4.4, 2.6)
        return [(title, to_svg(draw, f"{self.name}{i}", size)) for i, (title, draw) in enumerate(self.panels)]


_DROPPED = "tbpo/dropped/"
_METRICS: dict[tuple[str, str], tuple[Metric, ...]] = {
    ("Reward and entropy", "reward"): (
        Metric("reward", "mean reward of the sampled completions"),
        Metric("eval_reward", "mean reward on the evaluation set"),
        Metric("entropy", "entropy of the policy (nats per token)"),
    ),
    ("Reward at each precision", "bits"): tuple(
        Metric(f"reward/{bits}_bits", f"mean reward of the batches at {bits} bits") for bits in NESTING_BITS
    ),
    ("Mismatch between learner and rollout", "mismatch"): (
        # The same range in every report, from what rounding leaves to what unaligned weights do.
        Metric("mismatch/abs_logp_mean", "mean |log-prob difference| (nats per token)", "log", (1e-4, 3.0)),
        Metric("mismatch/abs_logp_max", "largest |log-prob difference| (nats)", "log"),
        Metric("mismatch/k3", "KL estimate k3 (nats per token)", "log"),
    ),
    ("Share of dropped sequences", "dropped"): (
        Metric(f"{_DROPPED}total", "all with A other than 0", "share", None, ((*DROPPED_AIM, "fine"),)),
        Metric(f"{_DROPPED}positive_high", "A > 0, ratio above its band", "share"),
        Metric(f"{_DROPPED}negative_low", "A < 0, ratio below its band", "share"),
        Metric(f"{_DROPPED}negative_high", "A < 0, ratio above its band", "share"),
        Metric("mismatch/rejected_share", "rejected for their mismatch", "share"),
    ),
    ("Codes changed", "codes"): (
        Metric("quant/code_flip_rate", "share of codes changed by an update", "log"),
        Metric("quant/update_to_step", "update of a master, in quantization steps", "log"),
    ),
    ("Reward spread", "spread"): (
        Metric("reward_std", "standard deviation of the rewards"),
        Metric("frac_reward_zero_std", "share of prompts whose completions all earn the same", "share"),
    ),
    ("Length", "length"): (
        Metric("completions/mean_length", "tokens per completion"),
        Metric("completions/clipped_ratio", "share cut at the length limit", "share"),
    ),
    ("Sound text", "text"): (
        Metric("rollout/repetition_share", "share of completions with a loop", "share"),
        Metric("rollout/garbled_share", "share of garbled completions", "share"),
        Metric("rollout/error_token_share", "share of tokens unlikely under both", "share"),
    ),
}
_CAPTIONS = {
    "dropped": (
        "Shares are of the sequences with that sign of the advantage. Updates without such a sequence have none. What a mask "
        "rejects is a share of all sequences, or of all tokens where it looks at tokens. Green: what to aim at."
    ),
    "spread": "Completions of one prompt that all earn the same teach nothing.",
}
_TRIANGLE = "A triangle marks a value of 0 or below, which a logarithmic axis cannot show."
_TOGETHER = (
    "All logged steps and seeds of a group together, as shares in a bin. The axis is logarithmic in the distance from 1, and so are "
    "the bins: fewer in a bin next to 1 are not fewer near 1. Dashed: clip bounds."
)
_RATIO, _WEIGHT = "ratio r, learner now / learner at rollout", "weight w, learner at rollout / sampler"
_OF_SEQUENCES = "Geometric means over the tokens of a sequence (products where the objective bounds them)."
_DISTRIBUTIONS = (
    ("Ratio of tokens", "token_ratio", "tokens", _RATIO, "Token by token."),
    ("Mismatch weight of tokens", "token_mismatch_weight", "tokens", _WEIGHT, "Token by token."),
    ("Ratio of sequences", "ratio", "sequences", _RATIO, _OF_SEQUENCES),
    ("Mismatch weight of sequences", "mismatch_weight", "sequences", _WEIGHT, _OF_SEQUENCES),
)


def draw_figures(groups: list[Group]) -> tuple[list[Figure], list[Figure]]:
    """Return the figures of which a run has values, over updates and of distributions."""
    over_updates = [_over_updates(groups, heading, name, metrics) for (heading, name), metrics in _METRICS.items()]
    distributions = [_distribution(groups, *spec) for spec in _DISTRIBUTIONS]
    return [figure for figure in over_updates if figure], [figure for figure in distributions if figure]


def save_pngs(figures: Iterable[Figure], groups: list[Group], output: Path) -> None:
    """Draw figures as files next to `output`."""
    for name in (*(name for _, name in _METRICS), *(spec[1] for spec in _DISTRIBUTIONS)):
        # A figure of an earlier report at the same place must not pass for one of this.
        output.with_name(f"{output.stem}-{name}.png").unlink(missing_ok=True)
    for figure in figures:
        if figure.panels:
            to_png(figure.panels, groups, output.with_name(f"{output.stem}-{figure.name}.png"))


def _over_updates(groups: list[Group], heading: str, name: str, metrics: Iterable[Metric]) -> Figure | None:
    figure = Figure(heading, name, "")
    notes, zeros = [_CAPTIONS.get(name, "")], {}
    for metric in metrics:
        values = {group.label: [x for run in group.runs for x in run.values(metric.name).values()] for group in groups}
        is_log = metric.scale == "log"
        exact = [label for label, of in values.items() if is_log and of and not any(of)]
        drawn = [group for group in groups if group.label not in exact]
        logged = [x for group in drawn for x in values[group.label]]
        if exact:
            zeros.setdefault(", ".join(exact) if logged else "All groups", []).append(metric.title)
        if not logged:
            continue
        if metric.name == "mismatch/abs_logp_mean":
            of_groups = {mismatch_bands({**group.config.get("options", {}), **group.config}) for group in drawn}
            fine, bad = of_groups.pop() if len(of_groups) == 1 else (0.0, 0.0)
            if bad:
                metric = metric._replace(bands=((0.0, fine, "fine"), (fine, bad, "watch"), (bad, 1e9, "bad")))
                notes.append("Green: rounding. Amber: noisy. Red: learner and sampler are two policies.")
        if metric.name == "quant/code_flip_rate" and any(0 < x < STALLED_FLIP_RATE for x in logged):
            metric = metric._replace(bands=((0, STALLED_FLIP_RATE, "bad"),))
            notes.append("Red: the low-bit policy is stalled.")
        if is_log and min(logged) <= 0:
            notes.append(_TRIANGLE)
        figure.panels.append((metric.title, partial(_draw_metric, groups=drawn, metric=metric)))
    figure.caption = " ".join(filter(None, dict.fromkeys(notes)))
    figure.exact = [
        f"{f'{whose}: exactly' if len(groups) > 1 else 'Exactly'} 0 at every logged update: {', '.join(titles)}."
        for whose, titles in zeros.items()
    ]
    return figure if figure.panels or figure.exact else None


def _draw_metric(axes, groups: list[Group], metric: Metric) -> None:
    """Draw a metric over updates: the mean over the seeds of each group, and a band from the smallest to the largest.
    A cross marks a value that is not finite, a triangle one of 0 or below on a logarithmic axis."""
    marked = 0
    for group in groups:
        marked += _draw_group(axes, group, metric, 0.04 + 0.04 * (marked % 8))
    if metric.scale == "share":
        axes.set_ylim(-0.03, 1.03)
    if metric.scale == "log":
        axes.set_yscale("log")
    low, high = axes.get_ylim()
    if metric.limits is not None:
        low, high = min(low, metric.limits[0]), max(high, metric.limits[1])
    if metric.scale == "log":
        # At least two ticks, also where the values lie within a decade.
        middle = math.sqrt(low * high)
        low, high = (min(low, middle / 4), max(high, middle * 4)) if high / low < 10 else (low, high)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,), numticks=12))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    for start, end, level in metric.bands:
        if max(start, low) < min(end, high):
            axes.axhspan(max(start, low), min(end, high), color=LEVEL_COLORS[level], alpha=0.10, lw=0, zorder=0)
    axes.set_ylim(low, high)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set_xlabel("update")


def _draw_group(axes, group: Group, metric: Metric, height: float) -> bool:
    """Draw one group, and its marks at that height. Return whether it has marks."""
    frame = pandas.DataFrame({index: run.values(metric.name) for index, run in enumerate(group.runs)})
    gaps = {step for run in group.runs for step in run.gaps(metric.name)}
    zeros = set(frame.index[frame.min(axis=1) <= 0]) if metric.scale == "log" else set()
    steps = sorted({*frame.index, *gaps})
    # A line across steps that were not logged would pass for their values.
    if metric.name in EVERY_BATCH:
        steps = sorted([*steps, *((a + b) / 2 for a, b in find_holes(steps))])
    frame = frame.reindex(steps)
    mean, low, high = (
        of.where(of > 0) if metric.scale == "log" else of
        for of in (frame.mean(axis=1), frame.min(axis=1), frame.max(axis=1))
    )
    color = group.color
    # A point between two gaps is not a line.
    marker = {"marker": "o", "markersize": 3} if len(steps) <= 30 or gaps or zeros else {}
    axes.plot(steps, mean, color=color, ls=group.line, lw=1.6, **marker)
    if len(group.runs) > 1:
        axes.fill_between(steps, low, high, color=color, alpha=0.2, lw=0)
    for marks, symbol in ((gaps, "x"), (zeros, "v")):
        place = {"transform": axes.get_xaxis_transform(), "color": color, "marker": symbol, "markersize": 5, "ls": ""}
        axes.plot(sorted(marks), [height] * len(marks), **place)
    return bool(gaps or zeros)


def _distribution(groups: list[Group], heading: str, name: str, unit: str, xlabel: str, caption: str) -> Figure | None:
    edges = np.array(LOG_EDGES)
    signed = []
    for group in groups:
        rows = [row for run in group.runs for row in run.distributions if row["name"] == name]
        for sign, title in (
            (("positive", "A > 0"), ("negative", "A < 0")) if any(any(r["counts"]) for r in rows) else ()
        ):
            of_sign = [row for row in rows if row["sign"] == sign]
            counts = np.sum([row["counts"] for row in of_sign] or [np.zeros(len(edges) - 1)], axis=0)
            last = max(of_sign, key=lambda row: row["step"], default={"bounds": []})
            bounds = [math.log(bound) for bound in last["bounds"] if bound]
            title = f"{_plain(group.label)}: {title}, {counts.sum():,.0f} {unit}"
            signed.append((title, {"color": group.color, "counts": counts, "bounds": bounds}))
    if not signed:
        return None
    total = np.sum([of["counts"] for _, of in signed], axis=0)
    filled = np.flatnonzero(total)
    distance = np.maximum(np.abs(edges[:-1]), np.abs(edges[1:]))
    if distance[filled].max() <= distance.min():
        return Figure(heading, name, "", exact=[f"All {unit} are within {distance.min():g} of 1."])
    # Equal in all panels: linear within the middle fifth of the counts, and wide enough for all bins and bounds.
    order = np.argsort(distance)
    middle = distance[order][np.searchsorted(np.cumsum(total[order]), 0.2 * total.sum())]
    ends = [edges[filled[0]], edges[filled[-1] + 1], 0, *(bound for _, of in signed for bound in of["bounds"])]
    shared = {
        "xlabel": xlabel,
        "floor": 0.5 / max(of["counts"].sum() for _, of in signed),
        "linear": float(np.clip(middle, distance.min(), 0.1)),
        "limits": (1.05 * min(ends), 1.05 * max(ends)),
    }
    panels = [(title, partial(_draw_distribution, **of, **shared)) for title, of in signed]
    return Figure(heading, name, f"{caption} {_TOGETHER}", panels)


def _draw_distribution(
    axes, color: str, counts, bounds: list[float], xlabel: str, floor: float, linear: float, limits: tuple
) -> None:
    """Draw the distribution of one quantity with one sign of the advantage, all steps and seeds of a group together,
    with the clip bounds of the last step, on the axis of its logarithm."""
    axes.set_xscale("symlog", linthresh=linear)
    axes.set_yscale("log")
    if counts.any():
        axes.stairs(counts / counts.sum(), LOG_EDGES, fill=True, color=color, alpha=0.7)
    for bound in bounds:
        axes.axvline(bound, color="#1f2328", ls="--", lw=1)
    ticks = {f"{value:.10g}": math.log(value) for value in _TICKS}
    ticks = {name: x for name, x in ticks.items() if limits[0] <= x <= limits[1] and (x == 0 or abs(x) >= linear / 3)}
    axes.set_xticks(list(ticks.values()), list(ticks), rotation=45, ha="right")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlim=limits, ylim=(floor, 1.5), xlabel=xlabel)


_TICKS = [1.0, 0.5, 2.0, 0.1, 10.0, 0.001, 1000.0, *(1 + sign * 10.0**-k for k in range(1, 6) for sign in (1, -1))]


def draw_finals(groups: list[Group]) -> str:
    """Draw final rewards by group as SVG: a dot for the mean, a whisker from the smallest to the largest seed, a ring
    for each."""

    def draw(axes) -> None:
        for index, group in enumerate(groups):
            seeds, style = group.results(), {"color": group.color, "marker": "o"}
            axes.plot(seeds, [index] * len(seeds), markerfacecolor="none", markersize=5, lw=2, **style)
            axes.plot([np.mean(seeds)] if seeds else [], [index] * bool(seeds), markersize=8, **style)
        names = [textwrap.fill(_plain(group.label), 24, break_long_words=False) for group in groups]
        axes.set(yticks=range(len(groups)), yticklabels=names, ylim=(len(groups) - 0.5, -0.5), xlabel="final reward")
        axes.margins(x=0.08)
        axes.grid(visible=False, axis="y")

    return to_svg(draw, "final", (5.2, 0.8 + 0.34 * len(groups)))


def to_svg(draw: Callable, name: str, size: tuple[float, float]) -> str:
    """Draw one panel of `size` inches with `draw(axes)`, as an `<svg>` element. Its ids are made of `name`, and have
    to be unique on the page."""
    # Neither a date nor random names, so that a page of the same runs is the same.
    with _axes(size, hashsalt=name) as (figure, (axes,)):
        draw(axes)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    return file.getvalue()[file.getvalue().index("<svg") :]


def to_png(panels: list[tuple[str, Callable]], groups: list[Group], path: Path) -> None:
    """Draw panels with their titles in two columns, under a legend, for papers and slides."""
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    with _axes((4.6 * columns, 2.9 * rows + 0.2 * len(groups)), rows, columns) as (figure, grid):
        for axes in grid[len(panels) :]:
            axes.remove()
        for axes, (title, draw) in zip(grid, panels, strict=False):
            draw(axes)
            axes.set_title(title, fontsize="medium")
        lines = [plt.Line2D([], [], color=of.color, ls=of.line, label=_plain(of.title)) for of in groups]
        figure.legend(handles=lines, loc="outside upper left", ncols=2, frameon=False)
        figure.savefig(path, dpi=120)


@contextmanager
def _axes(size: tuple[float, float], rows: int = 1, columns: int = 1, hashsalt: str = ""):
    with matplotlib.rc_context({"svg.hashsalt": hashsalt}, Path(__file__).with_name("figures.mplstyle")):
        figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        try:
            yield figure, list(grid.flat)
        finally:
            plt.close(figure)


def printable(text: str) -> str:
    """Replace control characters, which HTML does not allow, and surrogates, which UTF-8 does not."""
    return "".join(char if char in "\n\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _plain(text: str) -> str:
    """Leave out what a font cannot draw; a `$` in a name would start a formula."""
    return printable(text).replace("$", r"\$")
