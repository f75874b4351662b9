"""
The page of `trl-qarl report`: one file with styles inline and figures as data, no script.

Whatever the runs wrote is escaped.
"""

import base64
import itertools
import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from ..quantization.schemes import SCHEMES
from .figures import MISMATCH
from .runs import EVERY_BATCH, Run, find_holes, printable
from .statistics import Group, compare_groups, summarize


__all__ = ["count_of", "describe_differences", "find_gaps", "make_page"]

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; }
body { margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption { color: #555; font-size: .9rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
th { background: #f3f3f3; }
pre { background: #f6f6f6; padding: .6rem; overflow-x: auto; }
.warn { border-left: 4px solid #D55E00; padding-left: .8rem; }
"""

# Nothing but what is in the file may load, whatever a name of a run contains.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

RULE = (
    "The final reward of a run is the mean of its logged rewards in the last quarter of the updates; a run that ended "
    "before has none. A difference between two groups exceeds the seed noise if it is larger than "
    "t s sqrt(1/n + 1/m): n and m are the numbers of seeds, s is the pooled standard deviation of the final rewards "
    "over seeds, and t is the two-sided 95 % quantile of Student's distribution with n + m - 2 degrees of freedom. Of "
    "twenty pairs that do not differ, about one exceeds it by chance."
)


def describe_differences(groups: list[Group], score: str | None = None) -> dict[str, list[str]]:
    """
    One sentence per pair of groups that train the same model for the same reward, about their final rewards or their
    evaluation `score`. The sentences come under `"exceeds"`, `"within"` and `"unknown"` as [`compare_groups`] judges
    them, pairs that differ in the fewest settings first, then larger differences.
    """
    what, ends_at = ("final reward", "ends at") if score is None else (f"{score} score", f"has a {score} score of")
    summaries = summarize(groups, score)
    found: dict[str, list[tuple[int, float, str]]] = {"exceeds": [], "within": [], "unknown": []}
    for (a, summary_a), (b, summary_b) in itertools.combinations(zip(groups, summaries, strict=True), 2):
        if any(a.config.get(name) != b.config.get(name) for name in ("model", "reward_funcs")):
            continue
        result = compare_groups(summary_a, summary_b)
        distance = sum(a.config.get(name) != b.config.get(name) for name in a.config.keys() | b.config.keys())
        if result["difference"] is None:
            without = [group.label for group, summary in ((a, summary_a), (b, summary_b)) if summary["mean"] is None]
            sentence = f"{a.label} and {b.label}: no {what} of {' and '.join(without)}."
            found["unknown"].append((distance, 0.0, sentence))
            continue
        if result["difference"] < 0:
            (a, summary_a), (b, summary_b) = (b, summary_b), (a, summary_a)
        size = abs(result["difference"])
        sentence = (
            f"{a.label} {ends_at} {_number(summary_a['mean'])}, "
            f"{b.label} {ends_at.split()[-1]} {_number(summary_b['mean'])}: "
        )
        if result["verdict"] == "unknown":
            single = [group.label for group, summary in ((a, summary_a), (b, summary_b)) if summary["sd"] is None]
            sentence += (
                f"the seed noise of this difference of {_number(size)} cannot be judged, with one seed of "
                f"{' and of '.join(single)}."
            )
        else:
            relation = "exceeds" if result["verdict"] == "exceeds" else "does not exceed"
            sentence += f"the difference of {_number(size)} {relation} the seed noise of {_number(result['noise'])}."
        found[result["verdict"]].append((distance, -size, sentence))
    return {verdict: [text for *_, text in sorted(lines)] for verdict, lines in found.items()}


def find_gaps(run: Run) -> list[str]:
    """
    Sentences about values that are not finite, or not positive where an axis is logarithmic, or missing between others
    of the run. Metrics with the same gaps share a sentence.
    """
    logarithmic = [metric for metric, _, is_log in MISMATCH if is_log]
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for metric in dict.fromkeys(metric for row in run.rows.values() for metric in row):
        zeros = [step for step, value in run.values(metric).items() if value <= 0] if metric in logarithmic else []
        for steps, problem in ((run.gaps(metric), "not finite"), (zeros, "0 or below")):
            if steps:
                found.setdefault((problem, tuple(steps)), []).append(metric)
    holes: dict[tuple[int, int], list[str]] = {}
    for metric in EVERY_BATCH:
        for hole in find_holes(sorted(run.values(metric).keys() | set(run.gaps(metric)))):
            holes.setdefault(hole, []).append(metric)
    return [
        f"{', '.join(metrics)} {'is' if len(metrics) == 1 else 'are'} {problem} at {count_of(len(steps), 'step')}: "
        f"{_ranges(list(steps), list(run.rows))}."
        for (problem, steps), metrics in found.items()
    ] + [f"{', '.join(metrics)}: nothing logged between steps {a} and {b}." for (a, b), metrics in holes.items()]


def make_page(groups: list[Group], figures: list[tuple[str, Path, str]], notes: list[str]) -> str:
    """
    The page.

    Args:
        groups (`list[Group]`):
            Groups of runs.
        figures (`list[tuple[str, Path, str]]`):
            Title, PNG and caption of each figure.
        notes (`list[str]`):
            What is missing, beside what is known of each run.
    """
    runs = [run for group in groups for run in group.runs]
    models = list(dict.fromkeys(str(group.config.get("model", "not recorded")) for group in groups))
    title = f"{count_of(len(runs), 'run')} in {count_of(len(groups), 'group')}"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8" />',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}" />',
        '<meta name="viewport" content="width=device-width, initial-scale=1" />',
        f"<title>trl_qarl: {title}</title>",
        f"<style>{STYLE}</style></head>",
        "<body>",
        f"<h1>{title}</h1>",
        "<p>Runs of one group share everything but the seed.</p>",
    ]
    if len(models) > 1:
        parts.append(
            f'<p class="warn">These runs train {len(models)} models: {escape(", ".join(models))}. Their groups are '
            "shown side by side and not compared with each other.</p>"
        )
    rewards = list(dict.fromkeys(str(group.config.get("reward_funcs", "not recorded")) for group in groups))
    if len(rewards) > 1:
        parts.append(
            f'<p class="warn">These runs are trained for {len(rewards)} different rewards: '
            f"{escape(', '.join(rewards))}. Their groups are shown side by side and not compared with each other.</p>"
        )
    parts += ["<h2>Differences and seed noise</h2>", *_differences(groups), f"<p>{escape(RULE)}</p>"]
    for score in ("greedy", "sampled"):
        if any(score in run.evaluation for run in runs):
            parts += [
                f"<h2>Differences of the {score} evaluation and seed noise</h2>",
                *_differences(groups, score),
                "<p>The same rule, on the share of problems solved after training.</p>",
            ]
    summaries = summarize(groups)
    parts += ["<h2>Groups</h2>", _group_table(groups, summaries)]
    parts += ["<h2>Runs</h2>", _run_table(groups, summaries)]
    parts += ["<h2>Schemes</h2>", _scheme_table(groups)]
    parts += ["<h2>Gaps and irregularities</h2>", *_notes(runs, notes)]
    for heading, path, caption in figures:
        data = base64.b64encode(path.read_bytes()).decode()
        parts += [
            f"<h2>{escape(heading)}</h2>",
            f'<figure><img alt="{escape(heading)}" src="data:image/png;base64,{data}" />',
            f"<figcaption>{escape(caption)}</figcaption></figure>",
        ]
    parts += _worst_completions(groups)
    parts.append("<h2>Configurations</h2>")
    for group in groups:
        text = json.dumps(group.config, indent=2, ensure_ascii=False)
        parts.append(f"<details><summary>{escape(group.title)}</summary><pre>{escape(text)}</pre></details>")
    return printable("\n".join([*parts, "</body>", "</html>", ""]))


def _differences(groups: list[Group], score: str | None = None) -> list[str]:
    found = describe_differences(groups, score)
    if not any(found.values()):
        return ["<p>There are no two groups of the same model and reward to compare.</p>"]
    parts = []
    for verdict, heading in (
        ("exceeds", "Differences that exceed the seed noise"),
        ("within", "Differences that do not exceed the seed noise"),
        ("unknown", "Differences whose seed noise cannot be judged"),
    ):
        if found[verdict]:
            first, rest = found[verdict][:10], found[verdict][10:]
            parts += [f"<h3>{heading}: {len(found[verdict])}</h3>", _list(first)]
            if rest:
                parts.append(f"<details><summary>{len(rest)} more</summary>{_list(rest)}</details>")
    return parts


def _group_table(groups: list[Group], summaries: list[dict[str, Any]]) -> str:
    scores = _score_names(groups)
    fields = (
        "model",
        "quantize_learner",
        "objective",
        "scheme",
        "group_size",
        "use_vllm",
        "learning_rate",
        "max_steps",
    )
    header = ["group", "seeds", "final reward, mean", "sd over seeds", "min to max", *scores, *fields]
    rows = []
    for group, summary in zip(groups, summaries, strict=True):
        span = "-" if summary["mean"] is None else f"{_number(summary['min'])} to {_number(summary['max'])}"
        rows.append(
            [
                group.label,
                ", ".join(map(str, group.seeds)),
                _number(summary["mean"]),
                _number(summary["sd"]) if summary["sd"] is not None else "one seed" if summary["by_seed"] else "-",
                span,
                *(_pooled_score([run.evaluation.get(name) for run in group.runs]) for name in scores),
                *(str(group.config.get(name, "-")) for name in fields),
            ]
        )
    return _table(header, rows)


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
                    _number(final) if final is not None else _why_no_reward(run),
                    *(_score(run.evaluation.get(name)) for name in scores),
                ]
            )
    return _table(["run", "group", "seed", "last step", "final reward", *scores], rows)


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
            f"{'FP8 E4M3' if scheme.weight_type == 'float' else f'INT{scheme.num_bits}'}"
            if scheme.is_quantized
            else "16-bit"
        )
        shared = f"{group_size} input features" if group_size else "output channel" if scheme.is_quantized else "-"
        activations = {"int": "INT8, per token", "float": "FP8 E4M3, per token", None: "16-bit"}[
            scheme.activation_type
        ]
        bits = scheme.num_bits + 16 / group_size if group_size else scheme.num_bits
        rows.append([name, weights, shared, activations, f"{bits:g}"])
    return _table(["scheme", "weights", "one scale per", "activations", "bits per weight"], rows)


def _worst_completions(groups: list[Group], number: int = 2) -> list[str]:
    rows = []
    for group in groups:
        found = [(row, run) for run in group.runs for row in run.worst]
        for kind in dict.fromkeys(row["kind"] for row, _ in found):
            worst = sorted((pair for pair in found if pair[0]["kind"] == kind), key=lambda pair: -pair[0]["nats"])
            for row, run in worst[:number]:
                texts = [row[name].replace("\n", "⏎") for name in ("prompt", "completion")]
                rows.append([group.label, run.name, str(row["step"]), kind, _number(row["nats"]), *texts])
    if not rows:
        return []
    caption = (
        "Of each group the completions where learner and sampler differ most on a token (mismatch), and those with "
        "the token least likely under both (improbable, by its negative log-prob). The span is between ⟦ and ⟧."
    )
    header = ["group", "run", "step", "kind", "nats", "prompt", "completion"]
    return ["<h2>Worst completions</h2>", f"<p>{caption}</p>", _table(header, rows)]


def _notes(runs: list[Run], notes: list[str]) -> list[str]:
    lines = list(notes)
    for run in runs:
        lines += [f"{run.name}: {note}" for note in run.notes + find_gaps(run)]
    return [_list(lines)] if lines else ["<p>None: every line could be read, and every value is finite.</p>"]


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


def _table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _list(lines: list[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "\n</ul>"


def _ranges(steps: list[int], logged: list[int]) -> str:
    """Steps as ranges of neighbours among those that were logged, at most ten of them."""
    position = {step: index for index, step in enumerate(logged)}
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and position[step] == position[ranges[-1][-1]] + 1:
            ranges[-1].append(step)
        else:
            ranges.append([step])
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in ranges]
    return ", ".join(texts[:10]) + (" and more" if len(texts) > 10 else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
