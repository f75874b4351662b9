"""
The page of `trl-qarl report`: `page.html` with `page.css` and figures inline, no script, filled with what the runs
wrote, which the template escapes. Figures have one colour per group of runs and bands over seeds.
"""

import io
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..quantization.precisions import NESTING_BITS
from ..telemetry.advisor import DROPPED_AIM, LEVELS, STALLED_FLIP_RATE, Finding, assess, mismatch_bands
from ..telemetry.run_files import LOG_EDGES
from .runs import (
    EVERY_BATCH,
    FINAL_REWARD,
    Group,
    count_of,
    describe_differences,
    differing_settings,
    find_holes,
    format_number,
    make_groups,
    read_runs,
)


Findings = list[tuple[Finding, str]]
"""Results of rules, each with the name of the run that it is about."""

_LEVEL_COLORS = {"fine": "#2da44e", "watch": "#bf8700", "bad": "#cf222e"}
_WORDS = {"fine": "fine", "watch": "look at it", "bad": "not healthy"}
_MAIN_CARDS = ("Learning", "Aligned", "Updating")
_REFRESH_SECONDS = 10
_TIMES = {
    "step_time": "update without optimizer, s",
    "rollout/seconds": "rollout, s",
    "rollout/wait_seconds": "waiting for a rollout drawn ahead, s",
    "publish/seconds": "weight sync, s",
    "step/scoring_seconds": "rewards and log-probs of a rollout, s",
    "step/forward_backward_seconds": "forward and backward, s",
    "step/optimizer_seconds": "optimizer and quantizing, s",
    "rollout/tokens_per_second": "tokens per second of rollouts",
}
# Figure, which `page.html` gives a heading; name in `metrics.jsonl`; what it is, with its unit; and axis: a scale of
# matplotlib, or `share` for 0 to 1.
_METRICS = (
    ("reward", "reward", "mean reward of the sampled completions", "linear"),
    ("reward", "eval_reward", "mean reward on the evaluation set", "linear"),
    ("reward", "entropy", "entropy of the policy (nats per token)", "linear"),
    *(("bits", f"reward/{n}_bits", f"mean reward of the batches at {n} bits", "linear") for n in NESTING_BITS),
    ("mismatch", "mismatch/abs_logp_mean", "mean |log-prob difference| (nats per token)", "log"),
    ("mismatch", "mismatch/abs_logp_max", "largest |log-prob difference| (nats)", "log"),
    ("mismatch", "mismatch/k3", "KL estimate k3 (nats per token)", "log"),
    ("dropped", "tbpo/dropped/total", "all with A other than 0", "share"),
    ("dropped", "tbpo/dropped/positive_high", "A > 0, ratio above its band", "share"),
    ("dropped", "tbpo/dropped/negative_low", "A < 0, ratio below its band", "share"),
    ("dropped", "tbpo/dropped/negative_high", "A < 0, ratio above its band", "share"),
    ("dropped", "mismatch/rejected_share", "rejected for their mismatch", "share"),
    ("codes", "quant/code_flip_rate", "share of codes changed", "log"),
    ("codes", "quant/update_to_step", "update of a master, in quantization steps", "log"),
    ("spread", "reward_std", "standard deviation of the rewards", "linear"),
    ("spread", "frac_reward_zero_std", "prompts whose completions all earn the same", "share"),
    ("length", "completions/mean_length", "tokens per completion", "linear"),
    ("length", "completions/clipped_ratio", "share cut at the length limit", "share"),
    ("text", "rollout/repetition_share", "share of completions with a loop", "share"),
    ("text", "rollout/garbled_share", "share of garbled completions", "share"),
    ("text", "rollout/error_token_share", "share of tokens unlikely under both", "share"),
)
_BANDS = {"tbpo/dropped/total": [(*DROPPED_AIM, "fine")], "quant/code_flip_rate": [(0, STALLED_FLIP_RATE, "bad")]}
_DISTRIBUTIONS = {
    "token_ratio": ("ratio of tokens", "learner now / learner at rollout"),
    "token_mismatch_weight": ("mismatch weight of tokens", "learner at rollout / sampler"),
    "ratio": ("ratio of sequences", "learner now / learner at rollout"),
    "mismatch_weight": ("mismatch weight of sequences", "learner at rollout / sampler"),
}


@matplotlib.rc_context(fname=Path(__file__).with_name("figures.mplstyle"))
def write_page(
    run_dirs: Iterable[str | Path], output: Path, with_png: bool = False, is_followed: bool = False
) -> tuple[bool, list[str]]:
    """
    Write the page about runs in directories. Return whether all of them are finished, and lines about them for the
    console. With `is_followed` a browser loads the page again while they are not, and PNG files wait for their end.
    """
    read, notes = read_runs(run_dirs)
    # Training that ends normally logs its duration last.
    is_finished = not notes and all(run.last_step in run.values("train_runtime") for run in read)
    is_final = is_finished or not is_followed
    groups = make_groups(read)
    runs = [run for group in groups for run in group.runs]
    findings = [_assess_group(group) for group in groups]
    names = dict.fromkeys(finding.card for found in findings for finding, _ in found)
    cards = [{name: [pair for pair in found if pair[0].card == name] for name in names} for found in findings]
    scores = sorted({name for run in runs for name in run.evaluation}, key=lambda name: (name != "before", name))
    judged = [FINAL_REWARD, *(name for name in scores if name in ("greedy", "sampled"))] if len(groups) > 1 else []
    differences = {name: describe_differences(groups, name) for name in judged}
    sentence = ""
    if differences:
        exceeding, within, unknown = map(len, differences[FINAL_REWARD].values())
        above = f"{count_of(exceeding, 'difference')} of final reward above the seed noise"
        sentence = f"{above}, {within} within it, {unknown} that cannot be judged"
    figures = _make_figures(groups)
    irregularities = notes + [f"{run.name}: {note}" for run in runs for note in run.irregularities()]
    title, subtitle = _make_titles(groups)
    page = _ENVIRONMENT.get_template("page.html").render(
        refresh=None if is_final else _REFRESH_SECONDS,
        title=title,
        subtitle=subtitle,
        groups=groups,
        sentence=sentence,
        finals=_draw_finals(groups) if differences and any(FINAL_REWARD in run.results for run in runs) else None,
        cards=cards[0],
        health=pandas.DataFrame([{"group": group.label, **of} for group, of in zip(groups, cards, strict=True)]),
        words=_WORDS,
        advice=[f"{group.label}: {f}" for group, of in zip(groups, findings, strict=True) for f, _ in of if f.advice],
        differences={name: found for name, found in differences.items() if any(found.values())},
        contents={**figures, **_make_tables(groups, scores), "irregularities": {"lines": irregularities}},
    )
    # A browser must not read half a page.
    draft = output.with_name(f".{output.name}.part")
    draft.write_text(_printable(page), encoding="utf-8")
    draft.replace(output)
    for name, figure in figures.items() if with_png and is_final else ():
        path = output.with_name(f"{output.stem}-{name}.png")
        # A figure of an earlier report at the same place must not pass for one of this.
        path.unlink(missing_ok=True)
        if figure["picture"]:
            figure["picture"].savefig(path, dpi=120)
    lines = [
        f"{group.label}, step {', '.join(run.progress for run in group.runs)}: {_summarize_findings(found)}"
        for group, found in zip(groups, findings, strict=True)
    ]
    return is_finished, lines + [sentence] * (len(groups) > 1)


def _assess_group(group: Group) -> Findings:
    """Return the worst finding of each rule about the runs of a group."""
    found = [(finding, run.name) for run in group.runs for finding in assess(run.rows(), group.config)]
    rules = dict.fromkeys(finding.rule for finding, _ in found)
    return [
        max((of for of in found if of[0].rule == rule), key=lambda of: LEVELS.index(of[0].level)) for rule in rules
    ]


def _worst_level(findings: Findings) -> str:
    return max((finding.level for finding, _ in findings), key=LEVELS.index, default="")


def _summarize_findings(findings: Findings) -> str:
    """Return one line for the console: the main numbers, and what is not fine."""
    main = [finding.value for finding, _ in findings if finding.card in _MAIN_CARDS]
    troubled = list(dict.fromkeys(f"{f.card} ({_WORDS[f.level]})" for f, _ in findings if f.level != "fine"))
    return "; ".join(main) + (f". Not fine: {', '.join(troubled)}" if troubled else ". All fine" if main else "")


def _make_titles(groups: list[Group]) -> tuple[str, str]:
    """Return models and number of runs, or the result of a single group; and when and where they ran."""
    runs = [run for group in groups for run in group.runs]
    models = dict.fromkeys(str(group.config.get("model", "model not recorded")) for group in groups)
    # Of a local model the folder says enough.
    about = ", ".join(model.rstrip("/").split("/")[-1] if model.startswith("/") else model for model in models)
    if len(groups) > 1:
        title = f"{about}: {count_of(len(runs), 'run')} in {count_of(len(groups), 'group')}"
    else:
        updates = count_of(max(run.last_step for run in runs), "update")
        title = f"{about}, {groups[0].title}: {updates}, {FINAL_REWARD} {_spread(groups[0].results())}"
    times = [datetime.fromtimestamp(time, UTC) for run in runs for time in run.values("time")]
    when = [f"{min(times):%Y-%m-%d %H:%M} to {max(times):%Y-%m-%d %H:%M} UTC"] if times else []
    where = dict.fromkeys(str(run.path.parent if len(runs) > 1 else run.path) for run in runs)
    return title, ", ".join([*when, *where])


def _make_tables(groups: list[Group], scores: list[str]) -> dict[str, dict[str, list[pandas.DataFrame]]]:
    """
    Return sections of the page with tables: what `trl-qarl eval` measured; mean seconds over the logged steps of each
    run, with the range over the runs of a group; what groups differ in and what came out, and the runs.
    """
    evals, times, outcomes, of_runs = [], [], [], []
    for group in groups:
        means = {name: _spread(run.values(name).mean() for run in group.runs) for name in _TIMES}
        times.append({"group": group.label} | {_TIMES[name]: text for name, text in means.items()})
        outcomes.append(
            {
                "group": group.label,
                **{name: group.settings.get(name, "-") for name in differing_settings(groups)[:8]},
                "seeds": ", ".join(map(str, group.seeds)),
                f"{FINAL_REWARD}, mean (range)": _spread(group.results()),
                **{name: _spread(group.results(name), "{:.1%}".format) for name in scores},
            }
        )
        for run in group.runs:
            evals += [{"run": run.name, **row} for row in run.evals]
            shares = {name: f"{of['correct']} of {of['total']}" for name, of in run.evaluation.items()}
            of_runs.append(
                {
                    "run": run.name,
                    "group": group.label,
                    "seed": run.config.get("seed", "-"),
                    "last step": run.progress,
                    FINAL_REWARD: format_number(run.results.get(FINAL_REWARD)),
                    **{name: f"{share} ({run.results[name]:.1%})" for name, share in shares.items()},
                }
            )
    # Columns without a value are left out, and tables without any other column.
    evaluation, seconds = (table.loc[:, (table != "-").any()] for table in map(pandas.DataFrame, (evals, times)))
    if len(of_runs) == 1:
        evaluation = evaluation.drop(columns="run", errors="ignore")
    return {
        "evaluation": {"tables": [evaluation] if evals else []},
        "time": {"tables": [seconds] if len(seconds.columns) > 1 else []},
        "runs": {"tables": [pandas.DataFrame(outcomes), pandas.DataFrame(of_runs).fillna("-")]},
    }


def _spread(values: Iterable[float], form: Callable[[float], str] = format_number) -> str:
    """Return the mean with the range."""
    found = pandas.Series(list(values), dtype=float).dropna()
    if found.empty:
        return "-"
    low, mean, high = map(form, (found.min(), found.mean(), found.max()))
    return mean if len(found) == 1 else f"{mean} ({low} to {high})"


def _make_figures(groups: list[Group]) -> dict[str, dict[str, Any]]:
    """Return sections of the page with figures, over updates and of distributions. A metric that is 0 at every update,
    which no logarithmic axis can show, is one of its `lines`."""
    names = [*dict.fromkeys(figure for figure, *_ in _METRICS), "distributions"]
    panels: dict[str, list[tuple[str, Callable]]] = {name: [] for name in names}
    lines: dict[str, list[str]] = {name: [] for name in names}
    for figure, name, title, axis in _METRICS:
        drawn, exact = [], []
        for group in groups:
            if len(values := pandas.concat([run.values(name) for run in group.runs])):
                (exact if axis == "log" and not values.any() else drawn).append(group)
        if exact:
            whose = f"{', '.join(group.label for group in exact)}: exactly" if len(groups) > 1 else "Exactly"
            lines[figure].append(f"{whose} 0 at every logged update: {title}.")
        if drawn:
            panels[figure].append((title, partial(_draw_metric, groups=drawn, name=name, axis=axis)))
    for kind in itertools.product(_DISTRIBUTIONS, ("positive", "negative")):
        if any(any(row["counts"]) for group in groups for row in group.distributions(kind)):
            title = f"{_DISTRIBUTIONS[kind[0]][0]}, A {'>' if kind[1] == 'positive' else '<'} 0"
            panels["distributions"].append((title, partial(_draw_distribution, groups=groups, kind=kind)))
    return {name: {"lines": lines[name], "picture": _draw(of, groups) if of else None} for name, of in panels.items()}


def _draw(panels: list[tuple[str, Callable]], groups: list[Group]) -> Figure:
    """Draw panels, at most three side by side, under a legend of several groups."""
    columns = min(len(panels), 2 + len(panels) % 2)
    rows = -(-len(panels) // columns)
    figure = Figure((11 * columns / max(columns, 2), 2.6 * rows + 0.12 * len(groups)))
    for place, (title, draw) in enumerate(panels, 1):
        draw(figure.add_subplot(rows, columns, place, title=title))
    if len(groups) > 1:
        lines = [Line2D([], [], color=of.color, ls=of.line, label=_plain(of.title)) for of in groups]
        figure.legend(handles=lines, loc="outside upper left", ncols=columns)
    return figure


def _draw_metric(axes: Axes, groups: list[Group], name: str, axis: str) -> None:
    """Draw a metric over updates: the mean over the seeds of each group, and a band from the smallest to the largest.
    A cross marks a value that is not finite."""
    axes.set_yscale("linear" if axis == "share" else axis)
    for group in groups:
        frame = pandas.DataFrame({run.path: run.metrics[name].dropna() for run in group.runs if name in run.metrics})
        gaps = frame.index[np.isinf(frame).any(axis=1)]
        # A line across steps that were not logged would pass for their values.
        holes = find_holes(frame.index) if name in EVERY_BATCH else ()
        frame = frame.reindex(sorted([*frame.index, *((a + b) / 2 for a, b in holes)])).replace(np.inf, np.nan)
        axes.plot(frame.mean(axis=1), color=group.color, ls=group.line)
        axes.fill_between(frame.index, frame.min(axis=1), frame.max(axis=1), color=group.color, alpha=0.2, lw=0)
        axes.plot(gaps, [0.05] * len(gaps), "x", transform=axes.get_xaxis_transform(), color=group.color, ms=5)
    bands, limits = _BANDS.get(name, ()), (0.0, 1.0) if axis == "share" else ()
    if name == "mismatch/abs_logp_mean":
        # The same range in every report, from what rounding leaves to what unaligned weights do.
        limits = (1e-4, 3.0)
        of_groups = {mismatch_bands({**group.config.get("options", {}), **group.config}) for group in groups}
        fine, bad = of_groups.pop()
        bands = ((0, fine, "fine"), (fine, bad, "watch"), (bad, math.inf, "bad")) if bad and not of_groups else ()
    low, high = (pick(*axes.get_ylim(), *limits) for pick in (min, max))
    for start, end, level in bands:
        if max(start, low) < min(end, high):
            axes.axhspan(max(start, low), min(end, high), color=_LEVEL_COLORS[level], alpha=0.10, lw=0, zorder=0)
    axes.set_ylim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.set_xlabel("update")


def _draw_distribution(axes: Axes, groups: list[Group], kind: tuple[str, str]) -> None:
    """Draw the distribution of the logarithm of one quantity with one sign of the advantage, all steps and seeds of a
    group together."""
    for group in groups:
        rows = group.distributions(kind)
        if np.any(counts := np.sum([row["counts"] for row in rows], axis=0)):
            axes.stairs(counts / counts.sum(), LOG_EDGES, color=group.color, ls=group.line, lw=1.6)
    axes.set_xscale("symlog", linthresh=min(map(abs, LOG_EDGES)))
    axes.set(yscale="log", xticks=[-1, -1e-2, -1e-4, 0, 1e-4, 1e-2, 1], xlabel=f"log({_DISTRIBUTIONS[kind[0]][1]})")
    axes.minorticks_off()


def _draw_finals(groups: list[Group]) -> Figure:
    """Draw final rewards by group: a dot for the mean, a line from the smallest to the largest seed, a ring for
    each."""
    figure = Figure((6.5, 0.8 + 0.34 * len(groups)))
    axes = figure.subplots()
    for index, group in enumerate(groups):
        seeds, color = group.results(), group.color
        axes.plot(seeds, [index] * len(seeds), color=color, markerfacecolor="none", markersize=5, lw=2)
        axes.plot([seeds.mean()], [index], color=color, markersize=8)
    names = [textwrap.fill(_plain(group.label), 32, break_long_words=False) for group in groups]
    axes.set(yticks=range(len(groups)), yticklabels=names, ylim=(len(groups) - 0.5, -0.5), xlabel="final reward")
    axes.margins(x=0.08)
    axes.grid(visible=False, axis="y")
    return figure


def _to_svg(figure: Figure) -> Markup:
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    return Markup(file.getvalue()[file.getvalue().index("<svg") :])


def _printable(text: str) -> str:
    """Replace control characters, which neither HTML nor a font has."""
    return "".join(char if char in "\n\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _plain(text: str) -> str:
    """A `$` in a name would start a formula."""
    return _printable(text).replace("$", r"\$")


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.filters |= {
    "svg": _to_svg,
    "level": _worst_level,
    "json": partial(json.dumps, indent=2, ensure_ascii=False),
    # Names between backticks are code; the span that a completion is shown for is marked.
    "prose": lambda text: Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text)))),
    "mark": lambda text: Markup(re.sub("⟦[^⟦⟧]*⟧", r"<mark>\g<0></mark>", str(escape(text)))),
}
