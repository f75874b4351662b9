"""
The page of `trl-qarl report`: `page.html` with `page.css` and figures inline, no script, filled with what the runs
wrote. The template escapes it. At its top: is the run healthy, and is one setting better than another?
"""

import json
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from ..telemetry.advisor import LEVELS, Finding, assess
from .groups import Group, count_of, describe_differences, differing_settings, find_gaps, format_number
from .plots import Figure, draw_finals, printable
from .runs import EVAL_COLUMNS, Run, eval_rows


__all__ = ["MAIN_CARDS", "assess_group", "make_page", "summarize_findings"]

MAIN_CARDS = ("Learning", "Aligned", "Updating")
_WORDS = {"fine": "fine", "watch": "look at it", "bad": "not healthy", "": ""}
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
_FIELDS = ("model", "quantize_learner", "objective", "scheme", "group_size", "use_vllm", "learning_rate", "max_steps")


def assess_group(group: Group) -> list[tuple[Finding, str]]:
    """Return the worst finding of each rule about the runs of a group, and the run that it is about."""
    worst: dict[str, tuple[Finding, str]] = {}
    for run in group.runs:
        for finding in assess([{"step": step, **row} for step, row in run.rows.items()], group.config):
            known = worst.get(finding.rule)
            if known is None or LEVELS.index(finding.level) > LEVELS.index(known[0].level):
                worst[finding.rule] = (finding, run.name)
    return list(worst.values())


def summarize_findings(findings: list[tuple[Finding, str]]) -> str:
    """Return one line for the console: the main numbers, and what is not fine."""
    main = [finding.value for finding, _ in findings if finding.card in MAIN_CARDS]
    troubled = list(dict.fromkeys(f"{f.card} ({_WORDS[f.level]})" for f, _ in findings if f.level != "fine"))
    return "; ".join(main) + (f". Not fine: {', '.join(troubled)}" if troubled else ". All fine" if main else "")


def make_page(
    groups: list[Group], figures: tuple[list[Figure], list[Figure]], notes: list[str], refresh: int | None = None
) -> str:
    """Return the page with what [`~trl_qarl.study.plots.draw_figures`] drew, and notes on what is missing. A browser
    loads it again after `refresh` seconds, while a run goes on."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    # Names between backticks are code; the span that a completion is shown for is marked.
    environment.filters["prose"] = lambda text: Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))
    environment.filters["mark"] = lambda text: Markup(re.sub("⟦[^⟦⟧]*⟧", r"<mark>\g<0></mark>", str(escape(text))))
    runs = [run for group in groups for run in group.runs]
    findings = [assess_group(group) for group in groups]
    cards = list(dict.fromkeys(finding.card for found in findings for finding, _ in found))
    cards.sort(key=lambda card: MAIN_CARDS.index(card) if card in MAIN_CARDS else len(MAIN_CARDS))
    by_card = [{card: _on_card(card, found) for card in cards} for found in findings]
    scores = sorted(
        {name for run in runs for name in run.evaluation},
        key=lambda name: ({"before": 0, "greedy": 1, "sampled": 2}.get(name, 3), name),
    )
    is_compared = len(groups) > 1
    page = environment.get_template("page.html").render(
        refresh=refresh,
        title=_title(groups),
        subtitle=_subtitle(runs),
        groups=groups,
        warnings=_warnings(groups),
        sentence=_sentence(describe_differences(groups)) if is_compared else "",
        finals=Markup(draw_finals(groups)) if is_compared and any(group.results() for group in groups) else "",
        by_card=by_card,
        main_cards=MAIN_CARDS,
        words=_WORDS,
        advice=[f"{group.label}: {f}" for group, of in zip(groups, findings, strict=True) for f, _ in of if f.advice],
        differences=[
            (score, found)
            for score in (None, "greedy", "sampled")
            if any((found := describe_differences(groups, score)).values()) and score in (None, *scores)
        ],
        evaluation=_evaluation(runs),
        figures=figures,
        runs=runs,
        times=_times(groups),
        worst=_worst_completions(groups),
        shared=_shared(groups),
        group_table=_group_table(groups, scores),
        run_table=_run_table(groups, scores),
        irregularities=notes + [f"{run.name}: {note}" for run in runs for note in run.notes + find_gaps(run)],
        configs=[(group.title, json.dumps(group.config, indent=2, ensure_ascii=False)) for group in groups],
    )
    return printable(page)


def _on_card(card: str, findings: list[tuple[Finding, str]]) -> tuple[str, list[tuple[Finding, str]]]:
    """Return the worst level of the findings on a card, and the findings."""
    found = [pair for pair in findings if pair[0].card == card]
    return max((finding.level for finding, _ in found), key=LEVELS.index, default=""), found


def _unique(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(map(str, values)))


def _title(groups: list[Group]) -> str:
    models = _unique(group.config.get("model", "model not recorded") for group in groups)
    schemes = _unique(group.config["scheme"] for group in groups if "scheme" in group.config)
    schemes = [scheme for scheme in schemes if scheme != "bf16"] or schemes
    # Of a local model the folder says enough.
    parts = [model.rstrip("/").split("/")[-1] if model.startswith("/") else model for model in models]
    about = ", ".join([*parts, *(scheme for scheme in schemes if scheme not in groups[0].label or len(groups) > 1)])
    runs = [run for group in groups for run in group.runs]
    if len(groups) > 1:
        return f"{about}: {count_of(len(runs), 'run')} in {count_of(len(groups), 'group')}"
    title = f"{about}, {groups[0].label}: {count_of(max(run.last_step for run in runs), 'update')}"
    title += f", {count_of(len(groups[0].seeds), 'seed')}" if len(groups[0].seeds) > 1 else ""
    return title + (f", final reward {_spread(groups[0].results())}" if groups[0].results() else "")


def _subtitle(runs: list[Run]) -> str:
    times = [datetime.fromtimestamp(time, UTC) for run in runs for time in run.times or ()]
    parts = []
    if times:
        start, end = min(times), max(times)
        parts.append(f"{start:%Y-%m-%d %H:%M} to {end:{'' if start.date() == end.date() else '%Y-%m-%d '}%H:%M} UTC")
    parts += _unique(run.path.parent if len(runs) > 1 else run.path for run in runs)
    short = [run for run in runs if run.last_step < (run.config.get("max_steps") or 0)]
    if short and len(runs) > 1:
        parts.append(f"{count_of(len(short), 'run')} without all updates")
    elif short:
        parts.append(f"{short[0].last_step} of {short[0].config['max_steps']} updates")
    return ", ".join(parts)


def _warnings(groups: list[Group]) -> Iterator[str]:
    for name, between, sentence in (
        ("model", ", ", "These runs train {} models: {}."),
        ("reward_funcs", "; ", "These runs are trained for {} different rewards: {}."),
    ):
        values = _unique(group.settings.get(name, "not recorded") for group in groups)
        if len(values) > 1:
            about = sentence.format(len(values), between.join(values))
            yield f"{about} Their groups are shown side by side and not compared with each other."


def _sentence(found: dict[str, list[str]]) -> str:
    if found["exceeds"]:
        first, more = found["exceeds"][0], len(found["exceeds"]) - 1
        return first + (f" {more} more {'do' if more > 1 else 'does'} as well." if more else "")
    if found["within"]:
        return "No difference of final reward exceeds the seed noise."
    if found["unknown"]:
        return "No difference of final reward can be judged: that takes two seeds with a final reward in either group."
    return "There are no two groups of the same model and reward to compare."


def _evaluation(runs: list[Run]) -> tuple[list[str], list[list[str]]]:
    """Return results of `trl-qarl eval`, without the columns that say nothing."""
    header = ["run", *EVAL_COLUMNS]
    rows = [[run.name, *row] for run in runs for result in run.evals for row in eval_rows(result)]
    kept = [i for i in range(len(header)) if (i > 0 or len(runs) > 1) and any(row[i] != "-" for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _times(groups: list[Group]) -> tuple[list[str], list[list[str]]]:
    """Return mean seconds over the logged steps of each run, with the range over the runs of a group."""
    means = {
        name: [[fmean(of.values()) for run in group.runs if (of := run.values(name))] for group in groups]
        for name in _TIMES
    }
    kept = [name for name in _TIMES if any(means[name])]
    rows = [[group.label, *(_spread(means[name][i]) for name in kept)] for i, group in enumerate(groups)]
    return ["group", *(_TIMES[name] for name in kept)], rows if kept else []


def _worst_completions(groups: list[Group]) -> list[list[str]]:
    """Return the two worst of each kind and group."""
    rows = []
    for group in groups:
        found = [(row, run.name) for run in group.runs for row in run.worst if row["nats"] > 0]
        for kind in _unique(row["kind"] for row, _ in found):
            worst = sorted((pair for pair in found if pair[0]["kind"] == kind), key=lambda pair: -pair[0]["nats"])
            for row, name in worst[:2]:
                texts = [row[part].replace("\n", "⏎") for part in ("prompt", "completion")]
                rows.append([group.label, name, str(row["step"]), kind, format_number(row["nats"]), *texts])
    return rows


def _shared(groups: list[Group]) -> str:
    differing, settings = differing_settings(groups), groups[0].settings
    same = [name for name in _FIELDS if name not in differing and settings.get(name, "-") != "-"]
    sentence = f"{'All groups share' if len(groups) > 1 else 'Settings'}: "
    sentence += f"{', '.join(f'{name} {settings[name]}' for name in same)}."
    return sentence + (" Runs of one group share everything but the seed." if len(groups) > 1 else "")


def _group_table(groups: list[Group], scores: list[str]) -> tuple[list[str], list[list[str]]]:
    """Return what groups differ in, and what came out."""
    differing, rows = differing_settings(groups)[:8], []
    for group in groups:
        results = group.results()
        sd = format_number(stdev(results)) if len(results) > 1 else "one seed" if results else "-"
        cells = [group.settings.get(name, "-") for name in differing]
        solved = [_pooled([run.evaluation.get(name) for run in group.runs]) for name in scores]
        rows.append([group.label, *cells, ", ".join(map(str, group.seeds)), _spread(results), sd, *solved])
    return ["group", *differing, "seeds", "final reward, mean (range)", "sd over seeds", *scores], rows


def _run_table(groups: list[Group], scores: list[str]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for of, run in [(group, run) for group in groups for run in group.runs]:
        max_steps, reward = run.config.get("max_steps"), format_number(final := of.result(run))
        if final is None:
            ended = not isinstance(max_steps, int) or run.last_step <= 0.75 * max_steps
            reward = "ended before the last quarter" if ended else "no finite reward in the last quarter"
        solved = [
            f"{score['correct']} of {score['total']} ({score['correct'] / score['total']:.1%})" if score else "-"
            for score in map(run.evaluation.get, scores)
        ]
        steps = f"{run.last_step} of {max_steps}" if max_steps else str(run.last_step)
        rows.append([run.name, of.label, str(run.config.get("seed", "-")), steps, reward, *solved])
    return ["run", "group", "seed", "last step", "final reward", *scores], rows


def _spread(values: list[float]) -> str:
    """Return the mean with the range."""
    if not values:
        return "-"
    numbers = min(values), fmean(values), max(values)
    low, mean, high = (f"{x:,.0f}" if x >= 1000 else format_number(x) for x in numbers)
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def _pooled(scores: Iterable[dict[str, int] | None]) -> str:
    shares = [score["correct"] / score["total"] for score in scores if score]
    if not shares:
        return "-"
    mean = f"{fmean(shares):.1%}"
    return f"{mean} ({min(shares):.1%} to {max(shares):.1%}, {len(shares)} runs)" if len(shares) > 1 else mean
