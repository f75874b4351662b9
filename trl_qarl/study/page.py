"""
The page of `trl-qarl report`: one file with styles and figures inline, no script.

Whatever the runs wrote is escaped.
"""

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from typing import Any

from ..quantization.schemes import E4M3, INT8, SCHEMES
from .evals import HEADER, eval_rows
from .figures import Figure
from .html import POLICY, STYLE, bullets, details, table
from .runs import Run, printable
from .sentences import count_of, find_gaps, format_number
from .statistics import Group, flatten, summarize
from .verdict import final_words, legend, make_verdict


__all__ = ["make_page"]

_FIELDS = (
    "model",
    "quantize_learner",
    "objective",
    "scheme",
    "group_size",
    "use_vllm",
    "learning_rate",
    "max_steps",
)


def make_page(groups: list[Group], figures: list[Figure], notes: list[str], refresh: int | None = None) -> str:
    """
    Return the page.

    Args:
        groups (`list[Group]`):
            Groups of runs.
        figures (`list[Figure]`):
            Of [`~trl_qarl.study.figures.draw_figures`].
        notes (`list[str]`):
            What is missing, beside what is known of each run.
        refresh (`int`, *optional*):
            Seconds after which a browser loads the page again, while a run goes on.
    """
    runs = [run for group in groups for run in group.runs]
    summaries = summarize(groups)
    lines = legend(groups)
    sections = [("Verdict", [*_warnings(groups), *make_verdict(groups, summaries)])]
    scores = [[run.name, *row] for run in runs for result in run.evals for row in eval_rows(result)]
    if scores:
        sections.append(("Evaluation", _evaluation(scores, len(runs))))
    distributions = [figure for figure in figures if "ratio" in figure.name or "weight" in figure.name]
    for figure in figures:
        if figure not in distributions and figure.name != "time":
            sections.append((figure.heading, [lines, *_panels(figure)]))
    if distributions:
        parts = [part for figure in distributions for part in (f"<h3>{escape(figure.heading)}</h3>", *_panels(figure))]
        sections.append(("Distributions", parts))
    sections += [(figure.heading, _panels(figure)) for figure in figures if figure.name == "time"]
    worst = _worst_completions(groups)
    if worst:
        sections.append(("Worst completions", worst))
    sections.append(("Groups and runs", [*_group_table(groups, summaries), _run_table(groups, summaries)]))
    lines = list(notes) + [f"{run.name}: {note}" for run in runs for note in run.notes + find_gaps(run)]
    if lines:
        sections.append(("Irregularities", [bullets(lines)]))
    sections.append(("Settings", [details("What each scheme stores", _scheme_table(groups)), *_configs(groups)]))
    return _document(_title(groups, summaries), _subtitle(runs), sections, refresh)


def _document(title: str, subtitle: str, sections: list[tuple[str, list[str]]], refresh: int | None) -> str:
    ids = {heading: re.sub(r"\W+", "-", heading.lower()) for heading, _ in sections}
    links = "".join(f'<a href="#{ids[heading]}">{escape(_short(heading))}</a>' for heading, _ in sections)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8" />',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}" />',
        *([f'<meta http-equiv="refresh" content="{refresh}" />'] if refresh else []),
        '<meta name="viewport" content="width=device-width, initial-scale=1" />',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head>",
        "<body>",
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>",
        f"<nav><div>{links}</div></nav>",
        "<main>",
    ]
    for heading, content in sections:
        parts += [f'<section id="{ids[heading]}"><h2>{escape(heading)}</h2>', *content, "</section>"]
    return printable("\n".join([*parts, "</main>", "</body>", "</html>", ""]))


def _short(heading: str) -> str:
    """Return what a link to a section says, so that all fit into one line."""
    names = {
        "Mismatch between learner and rollout": "Mismatch",
        "Share of dropped sequences": "Dropped",
        "Codes changed": "Codes",
        "Reward spread": "Spread",
        "Entropy and length": "Entropy, length",
        "Sound text": "Text",
        "Worst completions": "Worst",
        "Groups and runs": "Runs",
    }
    return names.get(heading, heading)


def _title(groups: list[Group], summaries: list[dict[str, Any]]) -> str:
    models = list(dict.fromkeys(str(group.config.get("model", "model not recorded")) for group in groups))
    schemes = list(dict.fromkeys(str(group.config["scheme"]) for group in groups if "scheme" in group.config))
    schemes = [scheme for scheme in schemes if scheme != "bf16"] or schemes
    # Of a local model the folder says enough.
    parts = [model.rstrip("/").split("/")[-1] if model.startswith("/") else model for model in models]
    about = ", ".join([*parts, *(scheme for scheme in schemes if scheme not in groups[0].label or len(groups) > 1)])
    runs = [run for group in groups for run in group.runs]
    if len(groups) > 1:
        return f"{about}: {count_of(len(runs), 'run')} in {count_of(len(groups), 'group')}"
    title = f"{about}, {groups[0].label}: {count_of(max(run.last_step for run in runs), 'update')}"
    title += f", {count_of(len(groups[0].seeds), 'seed')}" if len(groups[0].seeds) > 1 else ""
    return title + (f", final reward {final_words(summaries[0])}" if summaries[0]["mean"] is not None else "")


def _subtitle(runs: list[Run]) -> str:
    times = [time for run in runs if run.times for time in run.times]
    folders = list(dict.fromkeys(str(run.path.parent) for run in runs)) if len(runs) > 1 else [str(runs[0].path)]
    when = ""
    if times:
        start, end = (datetime.fromtimestamp(time, UTC) for time in (min(times), max(times)))
        end_text = f"{end:%H:%M}" if start.date() == end.date() else f"{end:%Y-%m-%d %H:%M}"
        when = f"{start:%Y-%m-%d %H:%M} to {end_text} UTC, "
    short = [run for run in runs if run.last_step < (run.config.get("max_steps") or 0)]
    left = f", {short[0].last_step} of {short[0].config['max_steps']} updates" if short else ""
    if short and len(runs) > 1:
        left = f", {count_of(len(short), 'run')} without all updates"
    return f"{when}{', '.join(folders)}{left}"


def _warnings(groups: list[Group]) -> list[str]:
    models = list(dict.fromkeys(str(group.config.get("model", "not recorded")) for group in groups))
    rewards = list(dict.fromkeys(str(group.config.get("reward_funcs", "not recorded")) for group in groups))
    shown = "Their groups are shown side by side and not compared with each other."
    parts = []
    if len(models) > 1:
        parts.append(f"These runs train {len(models)} models: {', '.join(models)}. {shown}")
    if len(rewards) > 1:
        parts.append(f"These runs are trained for {len(rewards)} different rewards: {', '.join(rewards)}. {shown}")
    return [f'<p class="warn">{escape(part)}</p>' for part in parts]


def _evaluation(scores: list[list[str]], num_runs: int) -> list[str]:
    """
    Return results of `trl-qarl eval`, without the columns that say nothing: the run where there is one, differences
    where there are none.
    """
    header = ["run", *HEADER]
    kept = [i for i in range(len(header)) if (i > 0 or num_runs > 1) and any(row[i] != "-" for row in scores)]
    note = "By trl-qarl eval. pass@1 is the share of right completions, ± its standard error over the problems."
    if header.index("difference") in kept:
        note += " A difference is from the model that was evaluated beside this one, on the same problems."
    rows = [[row[i] for i in kept] for row in scores]
    return [table([header[i] for i in kept], rows), f'<p class="note">{note}</p>']


def _panels(figure: Figure) -> list[str]:
    panels = "\n".join(
        f"<figure><h3>{escape(title.replace(chr(92) + '$', '$'))}</h3>{svg}</figure>"
        for (title, _), svg in zip(figure.panels, figure.svgs, strict=True)
    )
    note = [f'<p class="note">{escape(figure.caption)}</p>'] if figure.caption else []
    return [f'<div class="panels">{panels}</div>', *note]


def _group_table(groups: list[Group], summaries: list[dict[str, Any]]) -> list[str]:
    """Return what all groups share in one line; a table of what they differ in, and of what came out."""
    configs = [flatten(group.config) for group in groups]
    names = list(dict.fromkeys(name for config in configs for name in config))
    differing = [name for name in names if len({config.get(name) for config in configs}) > 1]
    shared = [f"{name} {configs[0][name]}" for name in _FIELDS if name in configs[0] and name not in differing]
    scores = _score_names(groups)
    header = ["group", *differing[:8], "seeds", "final reward, mean (range)", "sd over seeds", *scores]
    rows = []
    for group, config, summary in zip(groups, configs, summaries, strict=True):
        rows.append(
            [
                group.label,
                *(config.get(name, "-") for name in differing[:8]),
                ", ".join(map(str, group.seeds)),
                final_words(summary),
                format_number(summary["sd"])
                if summary["sd"] is not None
                else "one seed"
                if summary["by_seed"]
                else "-",
                *(_pooled_score([run.evaluation.get(name) for run in group.runs]) for name in scores),
            ]
        )
    sentence = f"{'All groups share' if len(groups) > 1 else 'Settings'}: {', '.join(shared)}."
    if len(groups) > 1:
        sentence += " Runs of one group share everything but the seed."
    return [f"<p>{escape(sentence)}</p>", table(header, rows)]


def _run_table(groups: list[Group], summaries: list[dict[str, Any]]) -> str:
    scores = _score_names(groups)
    rows = []
    for group, summary in zip(groups, summaries, strict=True):
        for run in group.runs:
            max_steps = run.config.get("max_steps")
            final = summary["by_run"][run.name]
            rows.append(
                [
                    run.name,
                    group.label,
                    str(run.config.get("seed", "-")),
                    f"{run.last_step} of {max_steps}" if max_steps else str(run.last_step),
                    format_number(final) if final is not None else _why_no_reward(run),
                    *(_score(run.evaluation.get(name)) for name in scores),
                ]
            )
    return table(["run", "group", "seed", "last step", "final reward", *scores], rows)


def _why_no_reward(run: Run) -> str:
    max_steps = run.config.get("max_steps")
    has_last_quarter = isinstance(max_steps, int) and run.last_step > 0.75 * max_steps
    return "no finite reward in the last quarter" if has_last_quarter else "ended before the last quarter"


def _scheme_table(groups: list[Group]) -> str:
    rows = []
    for name, group_size in dict.fromkeys((str(g.config.get("scheme")), g.config.get("group_size")) for g in groups):
        scheme = SCHEMES.get(name)
        if scheme is None:
            rows.append([name, *["-"] * 4])
            continue
        weights = (
            (
                f"FP{scheme.grid.num_bits} {scheme.grid.name.upper()}"
                if scheme.grid.type == "float"
                else f"INT{scheme.grid.num_bits}"
            )
            + (f" in INT{scheme.container.num_bits}" if scheme.grid.num_bits < scheme.container.num_bits else "")
            + (", signed scales" if scheme.grid.has_signed_scales else "")
            + (", zero points" if scheme.grid.has_zero_points else "")
            if scheme.is_quantized
            else "16-bit"
        )
        shared = f"{group_size} input features" if group_size else "output channel" if scheme.is_quantized else "-"
        activations = {INT8: "INT8, per token", E4M3: "FP8 E4M3, per token", None: "16-bit"}[scheme.activation]
        scale_bits = 16 if scheme.container.scale_dtype is None else 8
        scale_bits += scheme.container.num_bits * scheme.container.has_zero_points
        bits = scheme.container.num_bits + (scale_bits / group_size if group_size else 0)
        rows.append([name, weights, shared, activations, f"{bits:g}"])
    return table(["scheme", "weights", "one scale per", "activations", "bits per weight"], rows)


def _worst_completions(groups: list[Group], number: int = 2) -> list[str]:
    rows = []
    for group in groups:
        found = [(row, run) for run in group.runs for row in run.worst]
        for kind in dict.fromkeys(row["kind"] for row, _ in found):
            worst = sorted((pair for pair in found if pair[0]["kind"] == kind), key=lambda pair: -pair[0]["nats"])
            for row, run in worst[:number]:
                texts = [row[name].replace("\n", "⏎") for name in ("prompt", "completion")]
                rows.append([group.label, run.name, str(row["step"]), kind, format_number(row["nats"]), *texts])
    if not rows:
        return []
    caption = (
        "Of each group the completions where learner and sampler differ most on a token (mismatch), and those with "
        "the token least likely under both (improbable, by its negative log-prob). The span is between ⟦ and ⟧."
    )
    # The marks are put around text that is escaped already.
    marked = re.sub(
        "⟦[^⟦⟧]*⟧",
        lambda match: f"<mark>{match[0]}</mark>",
        table(["group", "run", "step", "kind", "nats", "prompt", "completion"], rows),
    )
    return [marked, details("What these are", f"<p>{caption}</p>")]


def _configs(groups: list[Group]) -> list[str]:
    return [
        details(group.title, f"<pre>{escape(json.dumps(group.config, indent=2, ensure_ascii=False))}</pre>")
        for group in groups
    ]


def _score_names(groups: list[Group]) -> list[str]:
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.evaluation)
    order = {"before": 0, "greedy": 1, "sampled": 2}
    return sorted(names, key=lambda name: (order.get(name, 3), name))


def _score(score: dict[str, int] | None) -> str:
    return f"{score['correct']} of {score['total']} ({score['correct'] / score['total']:.1%})" if score else "-"


def _pooled_score(scores: Iterable[dict[str, int] | None]) -> str:
    shares = [score["correct"] / score["total"] for score in scores if score]
    if not shares:
        return "-"
    mean = f"{sum(shares) / len(shares):.1%}"
    return f"{mean} ({min(shares):.1%} to {max(shares):.1%}, {len(shares)} runs)" if len(shares) > 1 else mean
