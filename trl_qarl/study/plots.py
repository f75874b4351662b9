"""Figures of `trl-qarl report`: one colour per group of runs, bands over seeds, nothing left out without a mark."""

import itertools
import math
import statistics
import textwrap
from pathlib import Path

from .runs import EVERY_BATCH, find_holes, printable
from .statistics import Group, merge_histograms


__all__ = ["plot_bars", "plot_distribution", "plot_lines", "scale_around_one", "ticks_around_one"]

# Okabe and Ito's palette without its yellow, which is pale on white; distinguishable with every kind of colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")


def plot_lines(groups: list[Group], panels: list[tuple[str, str, bool]], path: Path) -> list[str]:
    """
    Metrics over steps: mean over the seeds of each group, and a band from the smallest to the largest.

    Args:
        groups (`list[Group]`):
            Groups of runs.
        panels (`list[tuple[str, str, bool]]`):
            Metric, label of its axis, and whether the axis is logarithmic. Panels without a value are left out.
        path (`Path`):
            PNG to write, unless no panel has a value.

    Returns:
        The metrics that were drawn.
    """
    plt = _pyplot()
    panels = [panel for panel in panels if any(run.values(panel[0]) for group in groups for run in group.runs)]
    if not panels:
        return []
    columns = 2 if len(panels) == 4 else 1
    rows = len(panels) // columns
    size = (8.5, 1.1 + (4.2 if rows == 1 else 2.7 * rows) + 0.2 * len(groups))
    figure, grid = plt.subplots(rows, columns, figsize=size, sharex=True, layout="constrained", squeeze=False)
    has_gaps = has_zeros = False
    for axes, (metric, ylabel, is_log) in zip(grid.flat, panels, strict=True):
        marked = 0
        for index, group in enumerate(groups):
            gaps, zeros = _draw(axes, index, group, metric, is_log, marked)
            marked += gaps or zeros
            has_gaps |= gaps
            has_zeros |= zeros
        axes.set(ylabel=ylabel)
        if is_log:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in grid[-1]:
        axes.set_xlabel("update")
    handles = [
        plt.Line2D([], [], **_style(index), label=_plain(group.title) + ", mean and range" * (len(group.seeds) > 1))
        for index, group in enumerate(groups)
    ]
    if has_gaps:
        handles.append(plt.Line2D([], [], color="black", marker="x", ls="", label="a value that is not finite"))
    if has_zeros:
        handles.append(plt.Line2D([], [], color="black", marker="v", ls="", label="a value of 0 or below"))
    _save(figure, handles, path)
    return [metric for metric, _, _ in panels]


def plot_distribution(groups: list[Group], name: str, unit: str, xlabel: str, path: Path) -> bool:
    """
    Distribution of `name` over the tokens or sequences (`unit`) by sign of the advantage, all steps and seeds
    together, with the clip bounds of the last step.

    Returns whether there was anything to draw.
    """
    plt = _pyplot()
    groups_rows = [
        (group, [row for run in group.runs for row in run.distributions if row["name"] == name]) for group in groups
    ]
    groups_rows = [(group, rows) for group, rows in groups_rows if any(sum(row["counts"]) for row in rows)]
    if not groups_rows:
        return False
    size = (8.5, 1.2 + 2.1 * len(groups_rows))
    figure, grid = plt.subplots(
        len(groups_rows), 2, figsize=size, sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    limits, largest = [], 1
    scale = scale_around_one([row for _, rows in groups_rows for row in rows])
    for axes_row, (group, rows) in zip(grid, groups_rows, strict=True):
        color = COLORS[groups.index(group) % len(COLORS)]
        for axes, sign, title in zip(axes_row, ("positive", "negative"), ("A > 0", "A < 0"), strict=True):
            signed = [row for row in rows if row["sign"] == sign]
            total = sum(sum(row["counts"]) for row in signed)
            label = textwrap.fill(_plain(group.label), 54)
            axes.set_title(f"{label}\n{title}: {total:,.0f} {unit}", fontsize="small")
            axes.grid(alpha=0.3)
            if not total:
                continue
            edges, counts = merge_histograms(signed)
            shares = [count / total for count in counts]
            axes.stairs(shares, edges, fill=True, color=color, alpha=0.6)
            axes.set_yscale("log")
            largest = max(largest, total)
            filled = [index for index, count in enumerate(counts) if count]
            limits += [edges[filled[0]], edges[filled[-1] + 1]]
            for bound in max(signed, key=lambda row: row["step"])["bounds"]:
                if bound is not None:
                    axes.axvline(bound, color="black", ls="--", lw=1)
                    limits.append(bound)
        axes_row[0].set_ylabel(f"share of {unit}\nin a bin")
    # A redistributed histogram has bins with a fraction of a sequence.
    grid[0, 0].set_ylim(bottom=0.5 / largest)
    low, high = min(limits), max(limits)
    grid[0, 0].set_xscale("function", functions=scale)
    grid[0, 0].set_xlim(low, high)
    ticks = ticks_around_one(low, high, scale[0])
    for axes in grid[-1]:
        axes.set_xlabel(xlabel)
        axes.set_xticks(ticks, [f"{tick:.10g}" for tick in ticks], rotation=45, ha="right", fontsize="small")
        axes.minorticks_off()
    handles = [plt.Line2D([], [], color="black", ls="--", lw=1, label="clip bound")]
    _save(figure, handles, path)
    return True


def scale_around_one(rows: list[dict]):
    """
    A scale for positive values around 1, and its inverse: linear in `log x` where the middle fifth of the counts lies,
    logarithmic in its distance from 0 beyond. Ratios concentrate around 1 within 1e-4, and some lie far out: no
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
    """Round values within the limits, not too near to each other on the axis, those next to the limits first."""
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


def plot_bars(groups: list[Group], panels: list[tuple[str, str]], path: Path) -> list[str]:
    """
    Mean over steps of each metric: bars are means over the runs of a group, whiskers go from smallest to largest.

    Returns the metrics that were drawn.
    """
    plt = _pyplot()
    panels = [panel for panel in panels if any(run.values(panel[0]) for group in groups for run in group.runs)]
    if not panels:
        return []
    size = (8.5, (0.8 + 0.32 * len(groups)) * len(panels))
    figure, grid = plt.subplots(len(panels), 1, figsize=size, layout="constrained", squeeze=False)
    for axes, (metric, xlabel) in zip(grid.flat, panels, strict=True):
        for index, group in enumerate(groups):
            means = [statistics.fmean(values.values()) for run in group.runs if (values := run.values(metric))]
            if not means:
                axes.text(0, index, " not logged", va="center", fontsize="small")
                continue
            mean = statistics.fmean(means)
            whisker = [[mean - min(means)], [max(means) - mean]] if len(means) > 1 else None
            axes.barh(index, mean, color=COLORS[index % len(COLORS)], alpha=0.7, xerr=whisker, capsize=3)
            axes.text(
                max(means), index, f"  {mean:,.0f}" if mean >= 100 else f"  {mean:.3g}", va="center", fontsize="small"
            )
        axes.set(xlabel=xlabel, yticks=range(len(groups)), yticklabels=[_plain(group.label) for group in groups])
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_xlim(0, axes.get_xlim()[1] * 1.08)
        axes.tick_params(axis="y", labelsize="small")
        axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [metric for metric, _ in panels]


def _draw(axes, index: int, group: Group, metric: str, is_log: bool, marked: int) -> tuple[bool, bool]:
    """
    Draw one group, its marks above those of the `marked` groups that have some already. Returns whether it has values
    that are not finite, and values that a logarithmic axis cannot show.
    """
    values: dict[float, list[float]] = {}
    for run in group.runs:
        for step, value in run.values(metric).items():
            values.setdefault(step, []).append(value)
    gaps = {step for run in group.runs for step in run.gaps(metric)}
    zeros = {step for step, seeds in values.items() if is_log and min(seeds) <= 0}
    steps = sorted(values.keys() | gaps)
    # A line across steps that were not logged would pass for their values.
    if metric in EVERY_BATCH:
        steps = sorted([*steps, *((a + b) / 2 for a, b in find_holes(steps))])
    nan = float("nan")

    def series(reduce) -> list[float]:
        reduced = [reduce(values[step]) if step in values else nan for step in steps]
        return [nan if is_log and not value > 0 else value for value in reduced]

    means = series(statistics.fmean)
    style = _style(index)
    # A point between two gaps is no line.
    marker = {"marker": "o", "markersize": 3} if len(steps) <= 60 or gaps or zeros else {}
    axes.plot(steps, means, **style, **marker)
    if len(group.runs) > 1:
        axes.fill_between(steps, series(min), series(max), color=style["color"], alpha=0.2, lw=0)
    height = 0.03 + 0.03 * (marked % 8)
    for marks, symbol in ((gaps, "x"), (zeros, "v")):
        axes.plot(
            sorted(marks),
            [height] * len(marks),
            transform=axes.get_xaxis_transform(),
            color=style["color"],
            marker=symbol,
            markersize=5,
            ls="",
        )
    return bool(gaps), bool(zeros)


def _style(index: int) -> dict[str, str]:
    return {"color": COLORS[index % len(COLORS)], "ls": STYLES[index // len(COLORS) % len(STYLES)]}


def _pyplot():
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def _plain(text: str) -> str:
    """Without what a font cannot draw; a `$` in a name would start a formula."""
    return printable(text).replace("$", r"\$")


def _save(figure, handles, path: Path) -> None:
    import matplotlib.pyplot as plt

    columns = 1 if max(len(handle.get_label()) for handle in handles) > 56 else 2
    figure.legend(handles=handles, loc="outside upper left", fontsize="small", ncols=columns, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
