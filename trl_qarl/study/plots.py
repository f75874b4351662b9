"""
The figures of `trl-qarl report`: which panels there are and how each is drawn. One colour per group of runs, bands
over seeds. `figures.mplstyle` styles them.
"""

import io
import itertools
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..quantization.precisions import NESTING_BITS
from ..telemetry.advisor import DROPPED_AIM, STALLED_FLIP_RATE, mismatch_bands
from ..telemetry.run_files import LOG_EDGES
from .groups import Group
from .runs import EVERY_BATCH, find_holes


_styled = matplotlib.rc_context(fname=Path(__file__).with_name("figures.mplstyle"))
LEVEL_COLORS = {"fine": "#2da44e", "watch": "#bf8700", "bad": "#cf222e"}


class Metric(NamedTuple):
    """
    A metric over updates: the `figure` that it is in; its `name` in `metrics.jsonl`; what it is, with its unit;
    `limits` that the axis always shows; the scale of the axis; and ranges to shade with the level of each.
    """

    figure: str
    name: str
    title: str
    limits: tuple[float, ...] = ()
    scale: str = "linear"
    bands: tuple[tuple[float, float, str], ...] = ()


@dataclass
class Figure:
    """Panels under one heading: pairs of a title and what draws it on axes. `name` is that of its PNG file. `exact`
    says which metrics are 0 at every update, which no logarithmic axis can show."""

    name: str
    heading: str
    groups: list[Group]
    panels: list[tuple[str, Callable]] = field(default_factory=list)
    exact: list[str] = field(default_factory=list)

    @_styled
    def draw(self) -> Picture:
        """Draw all panels, at most three side by side, under a legend of several groups."""
        columns = min(len(self.panels), 2 + len(self.panels) % 2)
        rows = -(-len(self.panels) // columns)
        picture = Picture((11 * columns / max(columns, 2), 2.6 * rows + 0.12 * len(self.groups)))
        for place, (title, draw) in enumerate(self.panels, 1):
            axes = picture.add_subplot(rows, columns, place)
            draw(axes)
            axes.set_title(title)
        lines = [Line2D([], [], color=of.color, ls=of.line, label=_plain(of.title)) for of in self.groups]
        if len(lines) > 1:
            picture.legend(handles=lines, loc="outside upper left", ncols=columns)
        return picture


_SHARE = (0.0, 1.0)
_DROPPED = "tbpo/dropped/"
_HEADINGS = {
    "reward": "Reward and entropy",
    "bits": "Reward at each precision",
    "mismatch": "Mismatch between learner and rollout",
    "dropped": "Share of dropped sequences",
    "codes": "Codes changed",
    "spread": "Reward spread",
    "length": "Length",
    "text": "Sound text",
    "distributions": "Distributions",
}
_METRICS = (
    Metric("reward", "reward", "mean reward of the sampled completions"),
    Metric("reward", "eval_reward", "mean reward on the evaluation set"),
    Metric("reward", "entropy", "entropy of the policy (nats per token)"),
    *(Metric("bits", f"reward/{bits}_bits", f"mean reward of the batches at {bits} bits") for bits in NESTING_BITS),
    # The same range in every report, from what rounding leaves to what unaligned weights do.
    Metric("mismatch", "mismatch/abs_logp_mean", "mean |log-prob difference| (nats per token)", (1e-4, 3.0), "log"),
    Metric("mismatch", "mismatch/abs_logp_max", "largest |log-prob difference| (nats)", scale="log"),
    Metric("mismatch", "mismatch/k3", "KL estimate k3 (nats per token)", scale="log"),
    Metric("dropped", f"{_DROPPED}total", "all with A other than 0", _SHARE, bands=((*DROPPED_AIM, "fine"),)),
    Metric("dropped", f"{_DROPPED}positive_high", "A > 0, ratio above its band", _SHARE),
    Metric("dropped", f"{_DROPPED}negative_low", "A < 0, ratio below its band", _SHARE),
    Metric("dropped", f"{_DROPPED}negative_high", "A < 0, ratio above its band", _SHARE),
    Metric("dropped", "mismatch/rejected_share", "rejected for their mismatch", _SHARE),
    Metric("codes", "quant/code_flip_rate", "share of codes changed", (), "log", ((0, STALLED_FLIP_RATE, "bad"),)),
    Metric("codes", "quant/update_to_step", "update of a master, in quantization steps", scale="log"),
    Metric("spread", "reward_std", "standard deviation of the rewards"),
    Metric("spread", "frac_reward_zero_std", "prompts whose completions all earn the same", _SHARE),
    Metric("length", "completions/mean_length", "tokens per completion"),
    Metric("length", "completions/clipped_ratio", "share cut at the length limit", _SHARE),
    Metric("text", "rollout/repetition_share", "share of completions with a loop", _SHARE),
    Metric("text", "rollout/garbled_share", "share of garbled completions", _SHARE),
    Metric("text", "rollout/error_token_share", "share of tokens unlikely under both", _SHARE),
)
_DISTRIBUTIONS = {
    "token_ratio": ("ratio of tokens", "learner now / learner at rollout"),
    "token_mismatch_weight": ("mismatch weight of tokens", "learner at rollout / sampler"),
    "ratio": ("ratio of sequences", "learner now / learner at rollout"),
    "mismatch_weight": ("mismatch weight of sequences", "learner at rollout / sampler"),
}


def make_figures(groups: list[Group]) -> list[Figure]:
    """Return the figures of which a run has values, over updates and of distributions."""
    figures = {name: Figure(name, heading, groups) for name, heading in _HEADINGS.items()}
    for metric in _METRICS:
        values = {group.label: pandas.concat([run.values(metric.name) for run in group.runs]) for group in groups}
        logged = {label for label, of in values.items() if len(of)}
        exact = [label for label in values if metric.scale == "log" and label in logged and not values[label].any()]
        if exact:
            whose = f"{', '.join(exact)}: exactly" if len(groups) > 1 else "Exactly"
            figures[metric.figure].exact.append(f"{whose} 0 at every logged update: {metric.title}.")
        if drawn := [group for group in groups if group.label in logged.difference(exact)]:
            draw = partial(_draw_metric, groups=drawn, metric=metric)
            figures[metric.figure].panels.append((metric.title, draw))
    rows = [row for group in groups for run in group.runs for row in run.distributions if any(row["counts"])]
    found = {(row["name"], row["sign"]) for row in rows}
    for name, sign in itertools.product(_DISTRIBUTIONS, ("positive", "negative")):
        if (name, sign) in found:
            title = f"{_DISTRIBUTIONS[name][0]}, A {'>' if sign == 'positive' else '<'} 0"
            draw = partial(_draw_distribution, groups=groups, kind=(name, sign))
            figures["distributions"].panels.append((title, draw))
    return [figure for figure in figures.values() if figure.panels or figure.exact]


@_styled
def save_pngs(figures: list[Figure], output: Path) -> None:
    """Draw figures as files next to `output`."""
    for name in _HEADINGS:
        # A figure of an earlier report at the same place must not pass for one of this.
        output.with_name(f"{output.stem}-{name}.png").unlink(missing_ok=True)
    for drawn in figures:
        if drawn.panels:
            drawn.draw().savefig(output.with_name(f"{output.stem}-{drawn.name}.png"), dpi=120)


def _draw_metric(axes: Axes, groups: list[Group], metric: Metric) -> None:
    """Draw a metric over updates: the mean over the seeds of each group, and a band from the smallest to the largest.
    A cross marks a value that is not finite."""
    axes.set_yscale(metric.scale)
    for group in groups:
        logged = {run.path: run.metrics[metric.name].dropna() for run in group.runs if metric.name in run.metrics}
        frame = pandas.DataFrame(logged)
        gaps = frame.index[np.isinf(frame).any(axis=1)]
        # A line across steps that were not logged would pass for their values.
        holes = find_holes(frame.index) if metric.name in EVERY_BATCH else ()
        frame = frame.reindex(sorted([*frame.index, *((a + b) / 2 for a, b in holes)])).replace(np.inf, np.nan)
        axes.plot(frame.mean(axis=1), color=group.color, ls=group.line)
        axes.fill_between(frame.index, frame.min(axis=1), frame.max(axis=1), color=group.color, alpha=0.2, lw=0)
        axes.plot(gaps, [0.05] * len(gaps), "x", transform=axes.get_xaxis_transform(), color=group.color, ms=5)
    bands = metric.bands
    if metric.name == "mismatch/abs_logp_mean":
        of_groups = {mismatch_bands({**group.config.get("options", {}), **group.config}) for group in groups}
        fine, bad = of_groups.pop()
        bands = ((0, fine, "fine"), (fine, bad, "watch"), (bad, math.inf, "bad")) if bad and not of_groups else ()
    shown = (*axes.get_ylim(), *metric.limits)
    low, high = min(shown), max(shown)
    for start, end, level in bands:
        if max(start, low) < min(end, high):
            axes.axhspan(max(start, low), min(end, high), color=LEVEL_COLORS[level], alpha=0.10, lw=0, zorder=0)
    axes.set_ylim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.set_xlabel("update")


def _draw_distribution(axes: Axes, groups: list[Group], kind: tuple[str, str]) -> None:
    """Draw the distribution of the logarithm of one quantity with one sign of the advantage, all steps and seeds of a
    group together, with the clip bounds of the last step."""
    for group in groups:
        rows = [row for run in group.runs for row in run.distributions if (row["name"], row["sign"]) == kind]
        counts = np.sum([row["counts"] for row in rows], axis=0)
        if not np.any(counts):
            continue
        axes.stairs(counts / counts.sum(), LOG_EDGES, color=group.color, ls=group.line, lw=1.6)
        for bound in filter(None, max(rows, key=lambda row: row["step"])["bounds"]):
            axes.axvline(math.log(bound), color=group.color, ls="--", lw=1, marker="")
    axes.set_xscale("symlog", linthresh=min(map(abs, LOG_EDGES)))
    axes.set(yscale="log", xticks=[-1, -1e-2, -1e-4, 0, 1e-4, 1e-2, 1], xlabel=f"log({_DISTRIBUTIONS[kind[0]][1]})")
    axes.minorticks_off()


@_styled
def draw_finals(groups: list[Group]) -> Picture:
    """Draw final rewards by group: a dot for the mean, a whisker from the smallest to the largest seed, a ring for
    each."""
    picture = Picture((6.5, 0.8 + 0.34 * len(groups)))
    axes = picture.subplots()
    for index, group in enumerate(groups):
        seeds, color = group.results(), group.color
        axes.plot(seeds, [index] * len(seeds), color=color, markerfacecolor="none", markersize=5, lw=2)
        axes.plot([seeds.mean()], [index], color=color, markersize=8)
    names = [textwrap.fill(_plain(group.label), 32, break_long_words=False) for group in groups]
    axes.set(yticks=range(len(groups)), yticklabels=names, ylim=(len(groups) - 0.5, -0.5), xlabel="final reward")
    axes.margins(x=0.08)
    axes.grid(visible=False, axis="y")
    return picture


@_styled
def to_svg(picture: Picture) -> Markup:
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    picture.savefig(file, format="svg", transparent=True, metadata=nothing)
    return Markup(file.getvalue()[file.getvalue().index("<svg") :])


def printable(text: str) -> str:
    """Replace control characters, which neither HTML nor a font has."""
    return "".join(char if char in "\n\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _plain(text: str) -> str:
    """A `$` in a name would start a formula."""
    return printable(text).replace("$", r"\$")
