"""
Training runs as their files tell them, and groups of runs that differ only by their seed.

Runs that were killed leave incomplete lines, resumed ones log some steps twice: what can be read is used, and
everything else becomes a note of the run.
"""

import itertools
import json
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from ..telemetry.run_files import DISTRIBUTIONS_FILE, HISTOGRAM_EDGES, METRICS_FILE, RUN_FILE
from .grid import check_evaluation, label_parts


FINAL_REWARD = "final reward"
# `figures.mplstyle` has the colors.
NUM_COLORS, LINES = 8, ("-", "--", "-.", ":")
# Metrics logged at equal distances; others are left out of a row if there is nothing to count.
EVERY_BATCH = ("reward", "entropy", "mismatch/abs_logp_mean")
# Not 0 in a healthy run, except at the first update: nothing was there to compare with, or the learning rate is 0.
_CHANGES = ("quant/code_flip_rate", "quant/update_to_step")
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError)


@dataclass
class Run:
    """
    One training run. `metrics` has a row for each logged step and a column for each metric: infinity where a value was
    not finite, NaN where none was logged. `results` are the shares solved by evaluation and, in a group, the `final
    reward`.
    """

    name: str
    config: dict[str, Any]
    metrics: pandas.DataFrame
    distributions: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, dict[str, int]] = field(default_factory=dict)
    evals: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    path: Path = Path()
    results: dict[str, float] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        return int(self.metrics.index[-1])

    @property
    def progress(self) -> str:
        return f"{self.last_step} of {self.config.get('max_steps', '?')}"

    def values(self, metric: str) -> pandas.Series:
        """Return the finite values of a metric by step."""
        found = self.metrics.get(metric, pandas.Series(dtype=float))
        return found[np.isfinite(found)]

    def rows(self) -> list[dict[str, float]]:
        """Return what was logged, step by step."""
        rows = self.metrics.reset_index().to_dict("records")
        return [{name: value for name, value in row.items() if not math.isnan(value)} for row in rows]

    def irregularities(self) -> list[str]:
        """Return the notes, and sentences about values that are not finite, about updates that changed nothing, and
        about values that are missing between others. Metrics with the same problem share a sentence."""
        found: dict[str, list[str]] = {}
        for metric, logged in self.metrics.items():
            unchanged = logged.index[1:][logged.iloc[1:] <= 0] if metric in _CHANGES else ()
            for problem, steps in (("not finite", logged.index[np.isinf(logged)]), ("0", unchanged)):
                if len(steps):
                    where = f"step{'s' * (len(steps) > 1)} {_enumerate(steps)}"
                    found.setdefault(f"{problem} at {where}", []).append(str(metric))
            for a, b in find_holes(logged.dropna().index) if metric in EVERY_BATCH else ():
                found.setdefault(f"nothing logged between steps {a} and {b}", []).append(str(metric))
        return self.notes + [f"{', '.join(metrics)}: {problem}." for problem, metrics in found.items()]


@dataclass
class Group:
    """
    Runs that share everything but the seed, under a label and a color that no other group of the report has.
    `settings` is `config` as text by dotted name, `-` for what is not set.
    """

    config: dict[str, Any]
    settings: dict[str, str]
    runs: list[Run] = field(default_factory=list)
    label: str = ""
    color: str = "C0"
    line: str = "-"

    @property
    def seeds(self) -> list[Any]:
        return list(dict.fromkeys(run.config.get("seed") for run in self.runs))

    @property
    def title(self) -> str:
        return f"{self.label} ({count_of(len(self.seeds), 'seed')})"

    def results(self, name: str = FINAL_REWARD) -> pandas.Series:
        """Return the results of each seed, by the names in [`Run.results`]: runs of one seed count once."""
        found = pandas.Series([run.results.get(name) for run in self.runs], dtype=float)
        return found.groupby([str(run.config.get("seed")) for run in self.runs], sort=False).mean().dropna()

    def distributions(self, kind: tuple[str, str]) -> list[dict[str, Any]]:
        """Return the rows of one quantity and one sign of the advantage."""
        return [row for run in self.runs for row in run.distributions if (row["name"], row["sign"]) == kind]


def find_holes(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Return neighbours among increasing `steps` that lie further apart than most of them do, such as `(9, 31)` among
    1, 3, ..., 9, 31, ... Fewer than three steps have no usual distance."""
    pairs = list(itertools.pairwise(steps))
    usual = statistics.mode(sorted(b - a for a, b in pairs)) if len(pairs) > 1 else math.inf
    return [(a, b) for a, b in pairs if b - a > usual]


def read_runs(paths: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """Read the runs in directories, or in the directories inside one that is itself no run, as `trl-qarl compare`
    makes; return them, and notes on what was left out. Models of the same content get the name of the first of them.
    `ValueError` is raised for a path that holds no readable run."""
    found: dict[Path, Run] = {}
    notes = []
    for path in map(Path, paths):
        runs, problems = {}, []
        names = (METRICS_FILE, RUN_FILE, "cell.json")
        cells = [child for child in sorted(path.iterdir()) if any((child / name).is_file() for name in names)]
        for folder in [path] if (path / METRICS_FILE).is_file() else cells:
            try:
                runs[folder.resolve()] = read_run(folder)
            except ValueError as error:
                problems.append(str(error))
        if not runs:
            missing = f"{path} has no {METRICS_FILE}, nor has a directory in it"
            raise ValueError(problems[-1] if problems else f"{missing}; give directories that training runs wrote.")
        notes += [f"Left out: {problem}" for problem in problems]
        found |= runs
    models: dict[str, Any] = {}
    above = os.path.commonpath([path.parent for path in found])
    for path, run in found.items():
        run.name = str(path.relative_to(above))
        if (digest := run.config.pop("model_sha256", None)) is not None:
            run.config["model"] = models.setdefault(digest, run.config.get("model"))
    return list(found.values()), notes


def read_run(path: str | Path) -> Run:
    """Read one run. `ValueError` is raised if its configuration or every row of its metrics is missing or
    unreadable."""
    path, notes = Path(path).resolve(), []
    for name, what in ((METRICS_FILE, "no step of it was logged"), (RUN_FILE, "it holds the configuration of a run")):
        if not (path / name).is_file():
            raise ValueError(f"{path} has no {name}: {what}.")
    try:
        config = dict(json.loads((path / RUN_FILE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path / RUN_FILE} does not hold the configuration of a run: {error}.") from error
    # Rows of evaluations and the summary at the end share their step with an update, and only an update has a loss.
    rows = _read_rows(path / METRICS_FILE, lambda row: "loss" in row or None, notes)
    if not rows:
        raise ValueError(f"{path / METRICS_FILE} has no complete row: no step was logged.")
    run = Run(path.name, config, make_metrics(rows), notes=notes, path=path)
    max_steps = config.get("max_steps")
    if isinstance(max_steps, (int, float)) and 0 < max_steps != run.last_step > 0:
        notes.append(f"The run ended at step {run.last_step} of {max_steps}.")
    run.distributions = _read_rows(path / DISTRIBUTIONS_FILE, _kind_of_distribution, notes)
    if (path / "evaluation.json").is_file():
        try:
            run.evaluation = check_evaluation((path / "evaluation.json").read_text(encoding="utf-8"))
        except ValueError as error:
            notes.append(f"evaluation.json is not used: {error}.")
    run.results = {name: score["correct"] / score["total"] for name, score in run.evaluation.items()}
    run.evals = read_evals(path, notes)
    return run


def make_metrics(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return [`Run.metrics`] of rows with their `step`. `null`, and the `NaN` that JSON does not have but Python
    writes, are not finite, nor is a number whose square is not."""

    def number(value: float | None) -> float:
        return math.inf if value is None or not abs(value) < 1e100 else value

    kept = [{name: number(of) for name, of in row.items() if type(of) in (int, float, type(None))} for row in rows]
    return pandas.DataFrame(kept).groupby("step").last()


def read_evals(path: Path, notes: list[str]) -> list[dict[str, str]]:
    """Read the results of `trl-qarl eval`, `eval.json` or `eval-NAME.json`, in a run's folder and in those inside it,
    where exports lie, as rows for a table; add notes on files that are not used."""
    found, patterns = [], ("eval.json", "eval-*.json", "*/eval.json", "*/eval-*.json")
    for file in sorted(file for pattern in patterns for file in path.glob(pattern)):
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            options, first, differences = result["options"], result["results"][0], result.get("differences", {})
            found += [
                _eval_row(row, options, differences if row["model"] == first["model"] else {})
                for row in result["results"]
            ]
        except _UNREADABLE:
            notes.append(f"{file.relative_to(path)} has another form than `trl-qarl eval` writes and is not used.")
    return found


def _eval_row(row: dict[str, Any], options: dict[str, Any], differences: dict[str, Any]) -> dict[str, str]:
    """Return cells by the name of their column; raises what a file of another form raises."""

    def percent(mean: float, error: float | None, sign: str = "") -> str:
        return f"{mean:{sign}.1%}" + ("" if error is None else f" ±{error:.1%}")

    model, task = row["model"], row["task"]
    difference = differences.get(task)
    how = "temperature {temperature:g}, top_p {top_p:g}" if options["temperature"] else "greedy"
    return {
        # Of a folder on this machine the last two names say enough.
        "model": "/".join(model.rstrip("/").split("/")[-2:]) if model.startswith(("/", ".")) else model,
        "task": Path(task).name,
        "pass@1": percent(row["pass@1"], row["standard_error"]),
        "difference": percent(difference["mean"], difference["standard_error"], "+") if difference else "-",
        "problems": str(len(row["scores"])),
        "samples of each": str(options["samples"]),
        "sampling": f"{'vLLM' if options['vllm'] else 'transformers'}, {how.format(**options)}",
    }


def make_groups(runs: list[Run]) -> list[Group]:
    """
    Group runs that share everything but the seed; labels name what the groups differ in. Each run gets its final
    reward: the mean of `reward` over the logged steps in the last quarter before the largest step that any run with
    the same `max_steps` has reached, and none if it ended before.
    """
    found: dict[str, Group] = {}
    for run in runs:
        config = {name: value for name, value in run.config.items() if name != "seed"}
        found.setdefault(json.dumps(config, sort_keys=True), Group(config, _flatten(config))).runs.append(run)
        last = max(other.last_step for other in runs if other.config.get("max_steps") == config.get("max_steps"))
        rewards = run.values("reward")
        if len(rewards := rewards[rewards.index > 0.75 * last]):
            run.results[FINAL_REWARD] = rewards.mean()
    groups = list(found.values())
    for place, group in enumerate(groups):
        group.color, group.line = f"C{place % NUM_COLORS}", LINES[place // NUM_COLORS % len(LINES)]
        parts = label_parts(group.config)
        names = differing_settings([other for other in groups if label_parts(other.config) == parts])
        parts += [f"{name}={group.settings.get(name, 'not recorded')}" for name in names]
        group.label = ", ".join(parts) or "runs"
        if len(group.seeds) < len(group.runs):
            has = f"{group.label} has {len(group.runs)} runs of {count_of(len(group.seeds), 'seed')}"
            group.runs[0].notes.append(f"{has}: runs of one seed count once.")
    return groups


def differing_settings(groups: Iterable[Group]) -> list[str]:
    """Return the names of the settings in which groups differ."""
    settings = pandas.DataFrame([group.settings for group in groups])
    return list(settings.columns[settings.nunique(dropna=False) > 1])


def _flatten(config: dict[str, Any]) -> dict[str, str]:
    def text(value: Any) -> str:
        return "-" if value is None else ", ".join(map(str, value if isinstance(value, list) else [value]))

    (flat,) = pandas.json_normalize(config).to_dict("records")
    return {str(name): text(value) for name, value in flat.items()}


def compare_groups(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    """
    Return the difference of two groups, of one result for each seed, the noise between seeds that it is held against,
    `t s sqrt(1 / n_a + 1 / n_b)` of Student's test at 5 % with the pooled standard deviation `s`, and the verdict:
    `"exceeds"`, `"within"`, or `"unknown"` where a group has fewer than two seeds.
    """
    # The quickstart, which compares nothing, is installed without.
    from scipy.stats import ttest_ind

    difference = sum(a) / len(a) - sum(b) / len(b) if len(a) and len(b) else None
    if difference is None or min(len(a), len(b)) < 2:
        return {"difference": difference, "noise": None, "verdict": "unknown"}
    # scipy warns of seeds that end alike.
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        interval = ttest_ind(a, b).confidence_interval(0.95)
    noise = (interval.high - interval.low) / 2
    return {"difference": difference, "noise": noise, "verdict": "exceeds" if abs(difference) > noise else "within"}


def describe_differences(groups: list[Group], name: str = FINAL_REWARD) -> dict[str, list[str]]:
    """
    Return one sentence per pair of groups that train the same model for the same reward, about their final rewards or
    an evaluation of that `name`, by the verdicts of [`compare_groups`]; pairs that differ in the fewest settings come
    first, then larger differences.
    """
    what, ends = (name, "ends at") if name == FINAL_REWARD else (f"{name} score", f"has a {name} score of")
    found: dict[str, list[tuple[int, float, str]]] = {"exceeds": [], "within": [], "unknown": []}
    for a, b in itertools.combinations(groups, 2):
        if any(a.config.get(key) != b.config.get(key) for key in ("model", "reward_funcs")):
            continue
        judged = compare_groups(list(a.results(name)), list(b.results(name)))
        if (difference := judged["difference"]) is None:
            without = " and ".join(group.label for group in (a, b) if group.results(name).empty)
            sentence = f"{a.label} and {b.label}: no {what} of {without}."
        else:
            high, low = (a, b) if difference >= 0 else (b, a)
            means = [format_number(group.results(name).mean()) for group in (high, low)]
            size, noise = format_number(abs(difference)), format_number(judged["noise"])
            single = " and of ".join(group.label for group in (high, low) if len(group.results(name)) == 1)
            exceeds = "exceeds" if judged["verdict"] == "exceeds" else "does not exceed"
            verdict = f"the difference of {size} {exceeds} the seed noise of {noise}"
            if judged["verdict"] == "unknown":
                verdict = f"the seed noise of this difference of {size} cannot be judged, with one seed of {single}"
            sentence = f"{high.label} {ends} {means[0]}, {low.label} {ends.split()[-1]} {means[1]}: {verdict}."
        distance = sum(a.config.get(key) != b.config.get(key) for key in a.config.keys() | b.config.keys())
        found[judged["verdict"]].append((distance, -abs(difference or 0.0), sentence))
    return {verdict: [text for *_, text in sorted(lines)] for verdict, lines in found.items()}


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _read_rows(path: Path, kind_of: Callable[[dict], Any], notes: list[str]) -> list[dict[str, Any]]:
    """
    Return rows by rising step, all numbers but it as floats, and add notes on lines that are none. A step that goes
    back, or a second row of the same step and kind, is the first one after a resume: what the killed process had
    logged from there on is void.
    """
    rows: dict[tuple[int, Any], dict[str, Any]] = {}
    repeated, broken, last = 0, [], 0
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    lines = [line for line in text.split("\n") if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line, parse_int=float)
            # A row without a kind repeats none.
            step, kind = int(row["step"]), kind_of(row) or -number
            is_again = step < last or (step, kind) in rows
        except _UNREADABLE:
            broken.append(number)
            continue
        if is_again:
            repeated += len({known for known, _ in rows if known >= step})
            rows = {key: known for key, known in rows.items() if key[0] < step}
        rows[step, kind], last = row | {"step": step}, step
    if repeated and path.name == METRICS_FILE:
        again = f"{repeated} logged steps were trained again"
        notes.append(f"The run was resumed: {again}, the later values are used.")
    if broken and broken[-1] == len(lines):
        notes.append(f"The last line of {path.name} is incomplete; the rows before it are used.")
        broken.pop()
    if broken:
        notes.append(f"{path.name}: {len(broken)} unreadable lines are not used (line {_enumerate(broken)}).")
    return list(rows.values())


def _kind_of_distribution(row: dict[str, Any]) -> tuple[str, str]:
    # Raises `ValueError` for other numbers of edges, too.
    is_whole = len(row["counts"]) == len(HISTOGRAM_EDGES) - 1 and np.allclose(row["edges"], HISTOGRAM_EDGES, 1e-9, 0)
    if not is_whole or min(row["counts"]) < 0:
        raise ValueError("The histogram has other edges, or values below 0.")
    return row["name"], row["sign"]


def _enumerate(numbers: Iterable[int]) -> str:
    texts = list(map(str, numbers))
    return ", ".join(texts[:10]) + (" and more" if len(texts) > 10 else "")
