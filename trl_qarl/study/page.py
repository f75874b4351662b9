"""
The page of `trl-qarl report`: `page.html` with `page.css` and figures inline, no script, filled with what the runs
wrote. The template escapes it. At its top: is the run healthy, and is one setting better than another?
"""

import json
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from ..telemetry.advisor import LEVELS, Finding, assess
from .groups import (
    FINAL_REWARD,
    Group,
    count_of,
    describe_differences,
    differing_settings,
    format_number,
    make_groups,
    summarize_differences,
)
from .plots import draw_finals, make_figures, printable, save_pngs, to_svg
from .runs import Run, read_runs


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.filters |= {
    "svg": to_svg,
    # Names between backticks are code; the span that a completion is shown for is marked.
    "prose": lambda text: Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text)))),
    "mark": lambda text: Markup(re.sub("⟦[^⟦⟧]*⟧", r"<mark>\g<0></mark>", str(escape(text)))),
}

_REFRESH_SECONDS = 10
_MAIN_CARDS = ("Learning", "Aligned", "Updating")
_WORDS = {"fine": "fine", "watch": "look at it", "bad": "not healthy"}
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


def write_page(
    run_dirs: Iterable[str | Path], output: Path, with_png: bool = False, is_followed: bool = False
) -> tuple[bool, list[str]]:
    """
    Write the page about runs in directories. Return whether all of them are finished, and lines about them for the
    console. With `is_followed` a browser loads the page again while they are not, and PNG files wait for their end.
    """
    read, notes = read_runs(run_dirs)
    is_finished = not notes and all(run.is_finished for run in read)
    is_final = is_finished or not is_followed
    groups = make_groups(read)
    figures = make_figures(groups)
    if with_png and is_final:
        save_pngs(figures, output)
    runs = [run for group in groups for run in group.runs]
    findings = [_assess_group(group) for group in groups]
    cards = _unique(finding.card for found in findings for finding, _ in found)
    scores = sorted({name for run in runs for name in run.evaluation}, key=lambda name: (name != "before", name))
    judged = [FINAL_REWARD, *(name for name in scores if name in ("greedy", "sampled"))] if len(groups) > 1 else []
    differences = {name: describe_differences(groups, name) for name in judged}
    sentence = summarize_differences(differences[FINAL_REWARD]) if differences else ""
    page = _ENVIRONMENT.get_template("page.html").render(
        refresh=None if is_final else _REFRESH_SECONDS,
        title=_title(groups),
        subtitle=_subtitle(runs),
        groups=groups,
        sentence=sentence,
        finals=draw_finals(groups) if differences and any(FINAL_REWARD in run.results for run in runs) else None,
        cards=[{card: [pair for pair in found if pair[0].card == card] for card in cards} for found in findings],
        level_of=lambda found: max(found, key=_level_of)[0].level if found else "",
        words=_WORDS,
        advice=[f"{group.label}: {f}" for group, of in zip(groups, findings, strict=True) for f, _ in of if f.advice],
        differences={name: found for name, found in differences.items() if any(found.values())},
        evaluation=_evaluation(runs),
        figures=figures,
        times=_times(groups),
        worst=_worst_completions(groups),
        group_table=_group_table(groups, scores),
        run_table=_run_table(groups),
        irregularities=notes + [f"{run.name}: {note}" for run in runs for note in run.irregularities()],
        configs=[(group.title, json.dumps(group.config, indent=2, ensure_ascii=False)) for group in groups],
    )
    # A browser must not read half a page.
    draft = output.with_name(f".{output.name}.part")
    draft.write_text(printable(page), encoding="utf-8")
    draft.replace(output)
    lines = [
        f"{group.label}, step {', '.join(run.progress for run in group.runs)}: {_summarize_findings(found)}"
        for group, found in zip(groups, findings, strict=True)
    ]
    return is_finished, lines + [sentence] * (len(groups) > 1)


def _assess_group(group: Group) -> list[tuple[Finding, str]]:
    """Return the worst finding of each rule about the runs of a group, and the run that it is about."""
    found = [(finding, run.name) for run in group.runs for finding in assess(run.rows(), group.config)]
    rules = dict.fromkeys(finding.rule for finding, _ in found)
    return [max((pair for pair in found if pair[0].rule == rule), key=_level_of) for rule in rules]


def _summarize_findings(findings: list[tuple[Finding, str]]) -> str:
    """Return one line for the console: the main numbers, and what is not fine."""
    main = [finding.value for finding, _ in findings if finding.card in _MAIN_CARDS]
    troubled = list(dict.fromkeys(f"{f.card} ({_WORDS[f.level]})" for f, _ in findings if f.level != "fine"))
    return "; ".join(main) + (f". Not fine: {', '.join(troubled)}" if troubled else ". All fine" if main else "")


def _level_of(pair: tuple[Finding, str]) -> int:
    return LEVELS.index(pair[0].level)


def _unique(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(map(str, values)))


def _title(groups: list[Group]) -> str:
    models = _unique(group.config.get("model", "model not recorded") for group in groups)
    # Of a local model the folder says enough.
    about = ", ".join(model.rstrip("/").split("/")[-1] if model.startswith("/") else model for model in models)
    runs = [run for group in groups for run in group.runs]
    if len(groups) > 1:
        return f"{about}: {count_of(len(runs), 'run')} in {count_of(len(groups), 'group')}"
    updates = count_of(max(run.last_step for run in runs), "update")
    return f"{about}, {groups[0].title}: {updates}, {FINAL_REWARD} {_spread(groups[0].results())}"


def _subtitle(runs: list[Run]) -> str:
    times = [datetime.fromtimestamp(time, UTC) for run in runs for time in run.values("time")]
    when = [f"{min(times):%Y-%m-%d %H:%M} to {max(times):%Y-%m-%d %H:%M} UTC"] if times else []
    return ", ".join(when + _unique(run.path.parent if len(runs) > 1 else run.path for run in runs))


def _evaluation(runs: list[Run]) -> pandas.DataFrame:
    """Return results of `trl-qarl eval`."""
    table = pandas.DataFrame([{"run": run.name, **row} for run in runs for row in run.evals])
    return _without_empty(table.drop(columns="run", errors="ignore") if len(runs) == 1 else table)


def _times(groups: list[Group]) -> pandas.DataFrame:
    """Return mean seconds over the logged steps of each run, with the range over the runs of a group."""
    means = {
        title: [_spread(run.values(name).mean() for run in group.runs) for group in groups]
        for name, title in _TIMES.items()
    }
    return _without_empty(pandas.DataFrame(means, index=[group.label for group in groups])).reset_index(names="group")


def _without_empty(table: pandas.DataFrame) -> pandas.DataFrame:
    return table.loc[:, (table != "-").any()]


def _worst_completions(groups: list[Group]) -> pandas.DataFrame:
    """Return the two worst of each kind and group."""
    header = ["group", "run", "step", "kind", "nats", "prompt", "completion"]
    runs = [(group.label, run) for group in groups for run in group.runs]
    rows = [{"group": label, "run": run.name, **row} for label, run in runs for row in run.worst]
    table = pandas.DataFrame(rows, columns=header).sort_values("nats", ascending=False)
    table = table[table["nats"] > 0].groupby(["group", "kind"]).head(2).sort_values(["group", "kind"], kind="stable")
    return table.assign(nats=table["nats"].map(format_number)).replace("\n", "⏎", regex=True)


def _group_table(groups: list[Group], scores: list[str]) -> pandas.DataFrame:
    """Return what groups differ in, and what came out."""
    rows = [
        {
            "group": group.label,
            **{name: group.settings.get(name, "-") for name in differing_settings(groups)[:8]},
            "seeds": ", ".join(map(str, group.seeds)),
            f"{FINAL_REWARD}, mean (range)": _spread(group.results()),
            **{name: _spread(group.results(name), "{:.1%}".format) for name in scores},
        }
        for group in groups
    ]
    return pandas.DataFrame(rows)


def _run_table(groups: list[Group]) -> pandas.DataFrame:
    rows = [
        {
            "run": run.name,
            "group": group.label,
            "seed": run.config.get("seed", "-"),
            "last step": run.progress,
            FINAL_REWARD: format_number(run.results.get(FINAL_REWARD)),
            **{
                name: f"{of['correct']} of {of['total']} ({run.results[name]:.1%})"
                for name, of in run.evaluation.items()
            },
        }
        for group in groups
        for run in group.runs
    ]
    return pandas.DataFrame(rows).fillna("-")


def _spread(values: Iterable[float], form: Callable[[float], str] = format_number) -> str:
    """Return the mean with the range."""
    found = pandas.Series(list(values), dtype=float).dropna()
    if found.empty:
        return "-"
    low, mean, high = map(form, (found.min(), found.mean(), found.max()))
    return mean if len(found) == 1 else f"{mean} ({low} to {high})"
