"""
Reads files of training runs for comparison: metrics, distributions, configuration, evaluation.

Runs that were killed leave incomplete lines, resumed ones log some steps twice: what can be read is used, and
everything else becomes a note of the run.
"""

import itertools
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from ..telemetry.run_files import DISTRIBUTIONS_FILE, HISTOGRAM_EDGES, METRICS_FILE, RUN_FILE, WORST_FILE
from .grid import check_evaluation


# Metrics logged at equal distances; others are left out of a row if there is nothing to count.
EVERY_BATCH = ("reward", "entropy", "mismatch/abs_logp_mean")
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
# Not 0 in a healthy run, except at the first update: nothing was there to compare with, or the learning rate is 0.
_CHANGES = ("quant/code_flip_rate", "quant/update_to_step")


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
    worst: list[dict[str, Any]] = field(default_factory=list)
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

    @property
    def is_finished(self) -> bool:
        """True if training has ended normally: transformers logs its duration last."""
        return self.last_step in self.values("train_runtime")

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
            later = logged.iloc[1:]
            unchanged = later[later <= 0] if metric in _CHANGES else ()
            for problem, values in (("not finite", logged[np.isinf(logged)]), ("0", unchanged)):
                if len(values):
                    steps = f"step{'s' * (len(values) > 1)} {_enumerate(values.index)}"
                    found.setdefault(f"{problem} at {steps}", []).append(str(metric))
            for a, b in find_holes(logged.dropna().index) if metric in EVERY_BATCH else ():
                found.setdefault(f"nothing logged between steps {a} and {b}", []).append(str(metric))
        return self.notes + [f"{', '.join(metrics)}: {problem}." for problem, metrics in found.items()]


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
        digest = run.config.pop("model_sha256", None)
        if digest is not None:
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
    if 0 < (max_steps := config.get("max_steps") or 0) != run.last_step > 0:
        notes.append(f"The run ended at step {run.last_step} of {max_steps}.")
    run.distributions = _read_rows(path / DISTRIBUTIONS_FILE, _kind_of_distribution, notes)
    run.worst = _read_rows(path / WORST_FILE, lambda row: row["kind"], notes)
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
    numbers = [
        {
            name: math.inf if value is None or not abs(value) < 1e100 else value
            for name, value in row.items()
            if type(value) in (int, float, type(None))
        }
        for row in rows
    ]
    return pandas.DataFrame(numbers).groupby("step").last()


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


def _read_rows(path: Path, kind_of: Callable[[dict], Any], notes: list[str]) -> list[dict[str, Any]]:
    """
    Return rows by rising step, all numbers but it as floats, and add notes on lines that are none. A step that goes
    back, or a second row of the same step and kind, is the first one after a resume: what the killed process had
    logged from there on is void.
    """
    rows: list[tuple[Any, dict[str, Any]]] = []
    repeated, broken = 0, []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    lines = [line for line in text.split("\n") if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line, parse_int=float)
            step, kind = int(row["step"]), kind_of(row)
        except _UNREADABLE:
            broken.append(number)
            continue
        void = list(itertools.takewhile(lambda known: known[1]["step"] >= step, reversed(rows)))  # noqa: B023
        if void and (void[0][1]["step"] > step or (kind is not None and any(kind == known for known, _ in void))):
            repeated += len({known["step"] for _, known in void})
            del rows[-len(void) :]
        rows.append((kind, row | {"step": step}))
    if repeated and path.name == METRICS_FILE:
        again = f"{repeated} logged steps were trained again"
        notes.append(f"The run was resumed: {again}, the later values are used.")
    if broken and broken[-1] == len(lines):
        notes.append(f"The last line of {path.name} is incomplete; the rows before it are used.")
        broken.pop()
    if broken:
        notes.append(f"{path.name}: {len(broken)} unreadable lines are not used (line {_enumerate(broken)}).")
    return [row for _, row in rows]


def _kind_of_distribution(row: dict[str, Any]) -> tuple[str, str]:
    edges = row["edges"]
    is_whole = len(row["counts"]) + 1 == len(edges) == len(HISTOGRAM_EDGES)
    if not (is_whole and all(map(math.isclose, edges, HISTOGRAM_EDGES))):
        raise ValueError("The histogram has other edges.")
    return row["name"], row["sign"]


def _enumerate(numbers: Iterable[int]) -> str:
    texts = list(map(str, numbers))
    return ", ".join(texts[:10]) + (" and more" if len(texts) > 10 else "")
