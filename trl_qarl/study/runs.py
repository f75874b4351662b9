"""
Reads files of training runs for comparison: metrics, distributions, configuration, evaluation.

Runs that were killed leave incomplete lines, resumed ones log some steps twice: what can be read is used, and
everything else becomes a note of the run.
"""

import bisect
import itertools
import json
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..telemetry.run_files import DISTRIBUTIONS_FILE, HISTOGRAM_EDGES, METRICS_FILE, RUN_FILE, WORST_FILE


__all__ = ["EVAL_COLUMNS", "Run", "eval_rows", "is_evaluation", "read_evals", "read_run", "read_runs"]

EVAL_COLUMNS = ["model", "task", "pass@1", "difference", "problems", "samples of each", "sampling"]
_UNREADABLE = (ValueError, RecursionError, LookupError, TypeError, AttributeError)


@dataclass
class Run:
    """
    One training run. `rows` maps each step to its metrics, where `None` stands for a value that is not finite. `times`
    are those of the first and the last row, in seconds since the epoch.
    """

    name: str
    config: dict[str, Any]
    rows: dict[int, dict[str, float | None]]
    distributions: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, dict[str, int]] = field(default_factory=dict)
    worst: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    path: Path = Path()
    times: tuple[float, float] | None = None

    @property
    def is_finished(self) -> bool:
        """True if training has ended normally: transformers logs its duration last."""
        return "train_runtime" in self.rows[self.last_step]

    @property
    def last_step(self) -> int:
        return max(self.rows)

    def values(self, metric: str) -> dict[int, float]:
        """Return the finite values of a metric by step."""
        return {step: value for step, row in self.rows.items() if (value := row.get(metric)) is not None}

    def gaps(self, metric: str) -> list[int]:
        """Return the steps at which the metric was logged and not finite."""
        return [step for step, row in self.rows.items() if metric in row and row[metric] is None]


def read_runs(paths: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """Read the runs in directories, or in the directories inside one that is itself no run, as `trl-qarl compare`
    makes; return them, and notes on what was left out. Models of the same content get the name of the first of them.
    `ValueError` is raised for a path that holds no readable run, or that is given twice."""
    found: dict[Path, Run] = {}
    notes = []
    for path in map(Path, paths):
        if not path.is_dir():
            problem = "is not a directory" if path.exists() else "does not exist"
            raise ValueError(f"{path} {problem}; give directories that training runs wrote.")
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
        for key in runs.keys() & found.keys():
            raise ValueError(f"{key.name} is given twice; name each run once.")
        notes += [f"Left out: {problem}" for problem in problems]
        found |= runs
    models: dict[Any, Any] = {}
    for path, run in found.items():
        parts = next(n for n in itertools.count(1) if sum(p.parts[-n:] == path.parts[-n:] for p in found) == 1)
        run.name = str(Path(*path.parts[-parts:]))
        digest = run.config.pop("model_sha256", None)
        if digest is not None:
            run.config["model"] = models.setdefault(str(digest), run.config.get("model"))
    return list(found.values()), notes


def read_run(path: str | Path) -> Run:
    """Read one run. `ValueError` is raised if its configuration or every row of its metrics is missing or
    unreadable."""
    path = Path(path).resolve()
    if not (path / METRICS_FILE).is_file():
        raise ValueError(f"{path} has no {METRICS_FILE}: no step of it was logged.")
    run = Run(path.name, _read_config(path / RUN_FILE), {}, path=path)
    # Rows of evaluations and the summary at the end share their step with an update, and only an update has a loss.
    rows, repeated = _read_rows(path / METRICS_FILE, _is_row, lambda row: "loss" in row or None, run.notes)
    for row in rows:
        run.rows.setdefault(row["step"], {}).update(_metrics(row))
    if not run.rows:
        raise ValueError(f"{path / METRICS_FILE} has no complete row: no step was logged.")
    times = [row["time"] for row in rows if _is_finite(row.get("time"))]
    run.times = (times[0], times[-1]) if times else None
    if repeated:
        again = f"{repeated} logged steps were trained again"
        run.notes.append(f"The run was resumed: {again}, the later values are used.")
    max_steps = run.config.get("max_steps")
    if _is_finite(max_steps) and 0 < max_steps != run.last_step > 0:
        run.notes.append(f"The run ended at step {run.last_step} of {max_steps}.")
    kind_of = lambda row: (row.get("name"), row.get("sign"), row.get("kind"))  # noqa: E731
    run.distributions, _ = _read_rows(path / DISTRIBUTIONS_FILE, _is_distribution, kind_of, run.notes)
    run.worst, _ = _read_rows(path / WORST_FILE, _is_worst, kind_of, run.notes)
    if (path / "evaluation.json").is_file():
        with suppress(ValueError, RecursionError):
            run.evaluation = json.loads((path / "evaluation.json").read_text(encoding="utf-8"))
        if not is_evaluation(run.evaluation):
            run.evaluation = {}
            run.notes.append("evaluation.json has another form than {name: {correct, total}} and is not used.")
    run.evals, notes = read_evals(path)
    run.notes += notes
    return run


def read_evals(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the results of `trl-qarl eval`, `eval.json` or `eval-NAME.json`, in a run's folder and in those inside it,
    where exports lie, and notes on files that are not used."""
    found, notes = [], []
    for folder in (path, *sorted(child for child in path.iterdir() if child.is_dir())):
        for file in sorted((*folder.glob("eval.json"), *folder.glob("eval-*.json"))):
            try:
                result = json.loads(file.read_text(encoding="utf-8"))
                # Made here, so that a file of another form is known before the page is written.
                eval_rows(result)
                found.append(result)
            except _UNREADABLE:
                name = file.relative_to(path)
                notes.append(f"{name} has another form than `trl-qarl eval` writes and is not used.")
    return found, notes


def eval_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return cells under [`EVAL_COLUMNS`], a row for each model and task; raises what a file of another form
    raises."""

    def percent(mean: float, error: float | None, sign: str = "") -> str:
        return f"{mean:{sign}.1%}" + ("" if error is None else f" ±{error:.1%}")

    options, rows, first = result["options"], [], result["results"][0]["model"]
    greedy = f"temperature {options['temperature']:g}, top_p {options['top_p']:g}"
    sampling = f"{'vLLM' if options['vllm'] else 'transformers'}, {greedy if options['temperature'] else 'greedy'}"
    for row in result["results"]:
        model, task = row["model"], row["task"]
        difference = result.get("differences", {}).get(task) if model == first else None
        # Of a folder on this machine the last two names say enough.
        name = "/".join(model.rstrip("/").split("/")[-2:]) if model.startswith(("/", ".")) else model
        score = percent(row["pass@1"], row["standard_error"])
        change = percent(difference["mean"], difference["standard_error"], "+") if difference else "-"
        problems, samples = str(len(row["scores"])), f"{options['samples']:d}"
        rows.append([name, Path(task).name, score, change, problems, samples, sampling])
    return rows


def is_evaluation(scores: Any) -> bool:
    """Return whether `scores` is `{name: {"correct": int, "total": int}}`, with at least one name."""
    try:
        pairs = [(score["correct"], score["total"]) for score in scores.values()]
        return bool(pairs) and all(type(a) is type(b) is int and 0 <= a <= b > 0 for a, b in pairs)
    except _UNREADABLE:
        return False


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} has no {RUN_FILE}, which holds the configuration of the run.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a mapping, not {str(config)[:40]!r}.")
    for name in ("seed", "max_steps"):
        if isinstance(config.get(name), dict | list):
            raise ValueError(f"{path}: `{name}` must be one value, not {str(config[name])[:40]!r}.")
    return config


def _read_rows(
    path: Path, is_valid: Callable[[dict], Any], kind_of: Callable[[dict], Any], notes: list[str]
) -> tuple[list[dict[str, Any]], int]:
    """
    Return the valid rows by rising step, and how many of their steps were logged twice. A step that goes back, or a
    second row of the same step and kind, is the first one after a resume: what the killed process had logged from
    there on is void.
    """
    rows: list[dict[str, Any]] = []
    repeated, broken = 0, []
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip().split("\n") if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not (_is_row(row) and is_valid(row)):
                raise ValueError
        except _UNREADABLE:
            broken.append(number)
            continue
        first = bisect.bisect_left(rows, row["step"], key=lambda known: known["step"])
        void = rows[first:]
        same = kind_of(row) is not None and any(kind_of(known) == kind_of(row) for known in void)
        if void and (same or void[-1]["step"] > row["step"]):
            repeated += len({known["step"] for known in void})
            del rows[first:]
        rows.append(row)
    if broken and broken[-1] == len(lines):
        notes.append(f"The last line of {path.name} is incomplete; the rows before it are used.")
        broken.pop()
    if broken:
        shown = ", ".join(map(str, broken[:10])) + (" and more" if len(broken) > 10 else "")
        notes.append(f"{path.name}: {len(broken)} unreadable lines are not used (line {shown}).")
    return rows, repeated


def _is_finite(value: Any) -> bool:
    # Squares must be finite too, and an integer beyond the range of floats cannot be converted.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def _is_row(row: dict[str, Any]) -> bool:
    return type(row.get("step")) is int and 0 <= row["step"] < 2**53


def _is_distribution(row: dict[str, Any]) -> bool:
    return (
        row["name"] in ("ratio", "mismatch_weight", "token_ratio", "token_mismatch_weight")
        and row["sign"] in ("positive", "negative")
        and len(row["edges"]) == len(row["counts"]) + 1 == len(HISTOGRAM_EDGES)
        and all(map(math.isclose, row["edges"], HISTOGRAM_EDGES))
        and all(_is_finite(count) and count >= 0 for count in row["counts"])
        and len(row["bounds"]) == 2
        and all(bound is None or _is_finite(bound) for bound in row["bounds"])
    )


def _is_worst(row: dict[str, Any]) -> bool:
    return _is_finite(row["nats"]) and all(isinstance(row[name], str) for name in ("kind", "prompt", "completion"))


def _metrics(row: dict[str, Any]) -> dict[str, float | None]:
    """Return the numbers of a row; `null`, and the `NaN` that JSON does not have but Python writes, become `None`."""
    return {
        name: float(value) if _is_finite(value) else None
        for name, value in row.items()
        if name not in ("step", "time") and (value is None or type(value) in (int, float))
    }
