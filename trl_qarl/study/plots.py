"""
What the figures of `trl-qarl report` draw, one panel at a time: one colour per group of runs, bands over seeds, nothing left out
without a mark.
"""

import itertools
import math
import statistics
import textwrap
from typing import Any, NamedTuple

from .names import COLORS
from .runs import EVERY_BATCH, Run, find_holes, printable
from .statistics import Group, merge_histograms


__all__ = [
    "LEVEL_COLORS",
    "Metric",
    "draw_bars",
    "draw_distribution",
    "draw_finals",
    "draw_metric",
    "has_values",
    "scale_around_one",
    "share_axis",
    "ticks_around_one",
]

LEVEL_COLORS = {"fine": "#2da44e", "watch": "#bf8700", "bad": "#cf222e"}


class Metric(NamedTuple):
    """
    A metric over updates.

    Args:
        name (`str`):
            Its name in `metrics.jsonl`.
        title (`str`):
            What it is, with its unit.
        scale (`str`, *optional*, defaults to `"linear"`):
            `"linear"`, `"log"`, or `"share"`, which always goes from 0 to 1.
        limits (`tuple[float, float]`, *optional*):
            What the axis shows in every report; values beyond widen it.
        bands (`tuple[tuple[float, float, str], ...]`, *optional*, defaults to `()`):
            Shaded ranges with their level.
    """

    name: str
    title: str
    scale: str = "linear"
    limits: tuple[float, float] | None = None
    bands: tuple[tuple[float, float, str], ...] = ()


def has_values(groups: list[Group], metric: str) -> bool:
    return any(run.values(metric) for group in groups for run in group.runs)


def draw_metric(axes, groups: list[Group], metric: Metric) -> None:
    """
    Draw a metric over updates: the mean over the seeds of each group, and a band from the smallest to the largest. A
    cross marks a value that is not finite, a triangle one of 0 or below on a logarithmic axis.
    """
    marked = 0
    for group in groups:
        marked += _draw_group(axes, group, metric, marked)
    if metric.scale == "share":
        axes.set_ylim(-0.03, 1.03)
    if metric.scale == "log":
        axes.set_yscale("log")
    if metric.limits is not None:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, metric.limits[0]), max(high, metric.limits[1]))
    if metric.scale == "log":
        _tick_logarithmic(axes)
    low, high = axes.get_ylim()
    for start, end, level in metric.bands:
        start, end = max(start, low), min(end, high)
        if start < end:
            axes.axhspan(start, end, color=LEVEL_COLORS[level], alpha=0.10, lw=0, zorder=0)
    axes.set_ylim(low, high)
    axes.grid(alpha=0.4)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("update")


def _draw_group(axes, group: Group, metric: Metric, marked: int) -> bool:
    """Draw one group, its marks above those of the `marked` groups that have some already. Return whether it has marks."""
    values: dict[float, list[float]] = {}
    for run in group.runs:
        for step, value in run.values(metric.name).items():
            values.setdefault(step, []).append(value)
    is_log = metric.scale == "log"
    gaps = {step for run in group.runs for step in run.gaps(metric.name)}
    zeros = {step for step, seeds in values.items() if is_log and min(seeds) <= 0}
    steps = sorted(values.keys() | gaps)
    # A line across steps that were not logged would pass for their values.
    if metric.name in EVERY_BATCH:
        steps = sorted([*steps, *((a + b) / 2 for a, b in find_holes(steps))])
    nan = float("nan")

    def series(reduce) -> list[float]:
        reduced = [reduce(values[step]) if step in values else nan for step in steps]
        return [nan if is_log and not value > 0 else value for value in reduced]

    color = COLORS[group.color][0]
    # A point between two gaps is no line.
    marker = {"marker": "o", "markersize": 3} if len(steps) <= 30 or gaps or zeros else {}
    axes.plot(steps, series(statistics.fmean), color=color, ls=group.line, lw=1.6, **marker)
    if len(group.runs) > 1:
        axes.fill_between(steps, series(min), series(max), color=color, alpha=0.2, lw=0)
    height = 0.04 + 0.04 * (marked % 8)
    for marks, symbol in ((gaps, "x"), (zeros, "v")):
        place = {"transform": axes.get_xaxis_transform(), "color": color, "marker": symbol, "markersize": 5, "ls": ""}
        axes.plot(sorted(marks), [height] * len(marks), **place)
    return bool(gaps or zeros)


def _tick_logarithmic(axes) -> None:
    """Set at least two ticks, also where the values lie within a decade."""
    from matplotlib.ticker import LogLocator

    low, high = axes.get_ylim()
    if high / low < 10:
        middle = math.sqrt(low * high)
        low, high = min(low, middle / 4), max(high, middle * 4)
        axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,), numticks=12))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def draw_distribution(axes, group: Group, rows: list[dict[str, Any]], xlabel: str, shared: dict[str, Any]) -> None:
    """
    Draw the distribution of one quantity over the tokens or sequences of a group with one sign of the advantage, all
    steps and seeds together, with the clip bounds of the last step.

    Args:
        axes:
            Where to draw.
        group (`Group`):
            Whose colour it has.
        rows (`list[dict]`):
            Rows of `distributions.jsonl`.
        xlabel (`str`):
            Label of the axis.
        shared (`dict`):
            `{"scale", "low", "high", "floor"}` of [`share_axis`], equal in all panels of a figure.
    """
    total = sum(sum(row["counts"]) for row in rows)
    if total:
        edges, counts = merge_histograms(rows)
        axes.stairs([count / total for count in counts], edges, fill=True, color=COLORS[group.color][0], alpha=0.7)
        for bound in max(rows, key=lambda row: row["step"])["bounds"]:
            if bound is not None:
                axes.axvline(bound, color=axes.xaxis.label.get_color(), ls="--", lw=1)
    axes.set_yscale("log")
    axes.set_ylim(shared["floor"], 1.5)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.4)
    axes.set_xscale("function", functions=shared["scale"])
    axes.set_xlim(shared["low"], shared["high"])
    ticks = ticks_around_one(shared["low"], shared["high"], shared["scale"][0])
    axes.set_xticks(ticks, [f"{tick:.10g}" for tick in ticks], rotation=45, ha="right")
    axes.minorticks_off()
    axes.set_xlabel(xlabel)


def share_axis(rows: list[dict[str, Any]], largest: float) -> dict[str, Any]:
    """Set what the panels of a figure of distributions have in common; the `largest` of them counts that many."""
    limits = []
    for row in rows:
        filled = [index for index, count in enumerate(row["counts"]) if count]
        if filled:
            limits += [row["edges"][filled[0]], row["edges"][filled[-1] + 1]]
            limits += [bound for bound in row["bounds"] if bound is not None]
    # A redistributed histogram has bins with a fraction of a sequence.
    return {"scale": scale_around_one(rows), "low": min(limits), "high": max(limits), "floor": 0.5 / largest}


def scale_around_one(rows: list[dict]):
    """
    Make a scale for positive values around 1, and its inverse: linear in `log x` where the middle fifth of the counts
    lies, logarithmic in its distance from 0 beyond. Ratios concentrate around 1 within 1e-4, and some lie far out: no
    ordinary axis shows both.
    """
    import numpy as np

    edges, counts = merge_histograms(rows)
    middle = sorted(
        (max(abs(math.log(max(edge, 1e-30))) for edge in pair), count)
        for pair, count in zip(itertools.pairwise(edges), counts, strict=True)
    )
    cumulative = itertools.accumulate(count for _, count in middle)
    width = next(x for (x, _), total in zip(middle, cumulative, strict=True) if total >= 0.2 * sum(counts))
    width = min(max(width, 1e-5), 0.1)

    def forward(x):
        distance = np.log(np.maximum(x, 1e-30))
        return np.sign(distance) * np.log1p(np.abs(distance) / width)

    def inverse(y):
        return np.exp(np.sign(y) * width * np.expm1(np.minimum(np.abs(y), 20.0)))

    return forward, inverse


def ticks_around_one(low: float, high: float, forward) -> list[float]:
    """Return round values within the limits, not too near to each other on the axis, those next to the limits first."""
    small = [10.0**-k for k in range(1, 7)]
    values = [
        1.0,
        *(1 + x for x in small),
        *(1 - x for x in small),
        1.5,
        2.0,
        5.0,
        0.5,
        0.2,
        *(10.0**k for k in (-4, -3, -2, -1)),
    ]
    values += [10.0**k for k in range(1, 5)]
    inside = sorted((x for x in values if low <= x <= high), key=lambda x: (x != 1, -abs(forward(x))))
    span = forward(high) - forward(low)
    ticks: list[float] = []
    for x in inside:
        if all(abs(forward(x) - forward(tick)) > 0.06 * span for tick in ticks):
            ticks.append(x)
    return sorted(ticks)


def draw_bars(axes, groups: list[Group], metric: str) -> None:
    """
    Draw the mean of a metric over steps: bars are means over the runs of a group, whiskers go from smallest to
    largest.
    """
    for index, group in enumerate(groups):
        means = _means(group.runs, metric)
        if not means:
            axes.text(0, index, " not logged", va="center")
            continue
        mean = statistics.fmean(means)
        whisker = [[mean - min(means)], [max(means) - mean]] if len(means) > 1 else None
        axes.barh(index, mean, color=COLORS[group.color][0], alpha=0.75, xerr=whisker, capsize=3, height=0.6)
        text = f"  {mean:,.0f}" if mean >= 100 else f"  {mean:.3g}"
        axes.text(max(means), index, text, va="center")
    _name_rows(axes, groups)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.2)


def draw_finals(axes, groups: list[Group], summaries: list[dict[str, Any]], xlabel: str) -> None:
    """
    Draw final results by group: a dot for the mean, a whisker from the smallest to the largest seed, a ring for each
    seed.
    """
    for index, (group, summary) in enumerate(zip(groups, summaries, strict=True)):
        color = COLORS[group.color][0]
        if summary["mean"] is None:
            continue
        axes.plot([summary["min"], summary["max"]], [index, index], color=color, lw=2)
        seeds = list(summary["by_seed"].values())
        axes.plot(seeds, [index] * len(seeds), color=color, marker="o", markerfacecolor="none", markersize=5, ls="")
        axes.plot(summary["mean"], index, color=color, marker="o", markersize=8)
    _name_rows(axes, groups)
    axes.margins(x=0.08)
    axes.set_xlabel(xlabel)


def _name_rows(axes, groups: list[Group]) -> None:
    labels = [textwrap.fill(printable(group.label).replace("$", r"\$"), 24) for group in groups]
    axes.set(yticks=range(len(groups)), yticklabels=labels if len(groups) > 1 else [""])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(alpha=0.4, axis="x")


def _means(runs: list[Run], metric: str) -> list[float]:
    return [statistics.fmean(values.values()) for run in runs if (values := run.values(metric))]
