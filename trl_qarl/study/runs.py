"""
What training runs wrote, read for comparison: metrics, distributions, configuration, evaluation.

A run's directory holds `run.json` (its configuration), `metrics.jsonl` (a row per log event), and perhaps
`distributions.jsonl`, `evaluation.json` and results of `trl-qarl eval`. Runs that were killed leave incomplete lines,
resumed ones log some steps twice: what can be read is used, and everything else becomes a note of the run.
"""

import itertools
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..quantization.plan import todays_names
from ..telemetry.run_files import DISTRIBUTIONS_FILE, METRICS_FILE, RUN_FILE, WORST_FILE
from .evals import read_evals


__all__ = ["EVERY_BATCH", "Run", "find_holes", "is_evaluation", "label_parts", "printable", "read_run", "read_runs"]

# What a run logs at equal distances; other metrics are left out of a row where there is nothing to count.
EVERY_BATCH = ("reward", "entropy", "mismatch/abs_logp_mean")


@dataclass
class Run:
    """
    One training run. `rows` maps each step to its metrics, where `None` stands for a value that is not finite. `times` are those
    of the first and the last row, in seconds since the epoch.
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
        """Whether training has ended in order: transformers logs its duration last."""
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


def label_parts(config: dict[str, Any]) -> list[str]:
    """
    Return what a run is called, from the settings that it has of `quantize_learner`, `objective`, `scheme` and
    `lora_mode`.

    Example:

    ```python
    >>> label_parts({"quantize_learner": False, "objective": "tbpo", "scheme": "w4a16"})
    ['rollout-only', 'tbpo', 'w4a16']
    >>> label_parts({"quantize_learner": True, "objective": "grpo", "scheme": "bf16"})
    ['bf16', 'grpo']
    >>> label_parts({"objective": "tbpo", "scheme": "w4a16", "lora_mode": "merged"})
    ['tbpo', 'w4a16', 'lora_merged']
    ```
    """
    objective = [str(config["objective"])] if "objective" in config else []
    lora = [f"lora_{config['lora_mode']}"] if "lora_mode" in config else []
    if config.get("scheme") == "bf16":
        return ["bf16", *objective, *lora]
    learner = ["QaRL" if config["quantize_learner"] else "rollout-only"] if "quantize_learner" in config else []
    return [*learner, *objective, *([str(config["scheme"])] if "scheme" in config else []), *lora]


def read_runs(paths: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """
    Read the runs of the given directories, or of the directories inside one that is itself no run, as `trl-qarl
    compare` makes.

    Returns:
        The runs, and notes on directories that were left out.

    Raises:
        ValueError: for a path that holds no readable run, or that is given twice.
    """
    found: dict[Path, Run] = {}
    notes = []
    for path in map(Path, paths):
        if not path.is_dir():
            problem = "is not a directory" if path.exists() else "does not exist"
            raise ValueError(f"{path} {problem}; give directories that training runs wrote.")
        if (path / METRICS_FILE).is_file():
            runs = {path.resolve(): read_run(path)}
        else:
            runs = {}
            for child in sorted(path.iterdir()):
                if not any((child / name).is_file() for name in (METRICS_FILE, RUN_FILE, "cell.json")):
                    continue
                try:
                    runs[child.resolve()] = read_run(child)
                except ValueError as error:
                    notes.append(f"Left out: {error}")
            if not runs:
                raise ValueError(
                    notes[-1].removeprefix("Left out: ")
                    if notes
                    else f"{path} has no {METRICS_FILE}, nor has a directory in it; give directories that training "
                    "runs wrote."
                )
        for key in runs.keys() & found.keys():
            raise ValueError(f"{key.name} is given twice; name each run once.")
        found |= runs
    for path, run in found.items():
        parts = next(n for n in itertools.count(1) if sum(p.parts[-n:] == path.parts[-n:] for p in found) == 1)
        run.name = str(Path(*path.parts[-parts:]))
    return list(found.values()), notes


def read_run(path: str | Path) -> Run:
    """
    Read one run.

    Raises:
        ValueError: if its configuration or every row of its metrics is missing or unreadable.
    """
    path = Path(path)
    if not (path / METRICS_FILE).is_file():
        raise ValueError(f"{path} has no {METRICS_FILE}: no step of it was logged.")
    config = _read_config(path / RUN_FILE)
    run = Run(path.resolve().name, config, {}, path=path.resolve())

    rows, broken = _read_jsonl(path / METRICS_FILE, _is_metrics_row)
    run.notes += _describe_broken(METRICS_FILE, broken)
    repeated = 0
    last = -1
    for row in rows:
        step = row["step"]
        # A step that goes back, or is trained twice, is the first one after a resume. What the killed process had
        # logged from there on is void.
        if step < last or (step == last and "loss" in row and "loss" in run.rows[step]):
            void = [known for known in run.rows if known >= step]
            repeated += len(void)
            for known in void:
                del run.rows[known]
        last = step
        run.rows.setdefault(step, {}).update(_metrics(row))
    run.rows = dict(sorted(run.rows.items()))
    times = [row["time"] for row in rows if _is_finite(row.get("time"))]
    run.times = (times[0], times[-1]) if times else None
    if not run.rows:
        raise ValueError(f"{path / METRICS_FILE} has no complete row: no step was logged.")
    if repeated:
        run.notes.append(
            f"The run was resumed: {repeated} logged steps were trained again, the later values are used."
        )
    max_steps = config.get("max_steps")
    if _is_number(max_steps) and 0 < max_steps != run.last_step > 0:
        run.notes.append(f"The run ended at step {run.last_step} of {max_steps}.")

    if (path / DISTRIBUTIONS_FILE).is_file():
        rows, broken = _read_jsonl(path / DISTRIBUTIONS_FILE, _is_distribution)
        run.notes += _describe_broken(DISTRIBUTIONS_FILE, broken)
        kept: dict[tuple[int, str, str], dict[str, Any]] = {}
        last = -1
        for row in rows:
            if row["step"] < last:
                kept = {key: value for key, value in kept.items() if key[0] < row["step"]}
            last = row["step"]
            kept[row["step"], row["name"], row["sign"]] = row
        run.distributions = list(kept.values())
    if (path / WORST_FILE).is_file():
        rows, broken = _read_jsonl(path / WORST_FILE, _is_worst)
        for row in rows:
            if run.worst and row["step"] < run.worst[-1]["step"]:
                run.worst = [known for known in run.worst if known["step"] < row["step"]]
            run.worst.append(row)
        run.notes += _describe_broken(WORST_FILE, broken)
    if (path / "evaluation.json").is_file():
        try:
            run.evaluation = json.loads((path / "evaluation.json").read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            run.evaluation = {}
        if not is_evaluation(run.evaluation):
            run.evaluation = {}
            run.notes.append("evaluation.json has another form than {name: {correct, total}} and is not used.")
    run.evals, notes = read_evals(path)
    run.notes += notes
    return run


def find_holes(steps: Iterable[int]) -> list[tuple[int, int]]:
    """
    Return neighbours among increasing `steps` that lie further apart than most of them do, such as `(9, 31)` among
    1, 3, ..., 9, 31, ... Fewer than three steps have no usual distance.
    """
    pairs = list(itertools.pairwise(steps))
    if len(pairs) < 2:
        return []
    usual = statistics.mode(sorted(b - a for a, b in pairs))
    return [(a, b) for a, b in pairs if b - a > usual]


def is_evaluation(scores: Any) -> bool:
    """Return whether `scores` is `{name: {"correct": int, "total": int}}`, with at least one name."""
    return (
        isinstance(scores, dict)
        and bool(scores)
        and all(
            isinstance(score, dict)
            and all(type(score.get(key)) is int for key in ("correct", "total"))
            and 0 <= score["correct"] <= score["total"] > 0
            for score in scores.values()
        )
    )


def printable(text: str) -> str:
    """Replace control characters, which HTML does not allow, and surrogates, which UTF-8 does not."""
    return "".join(char if char in "\n\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


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
    if type(config.get("group_size", None)) not in (int, type(None)) or config.get("group_size") == 0:
        raise ValueError(f"{path}: `group_size` must be a number or null, not {config['group_size']!r}.")
    return todays_names(config)


def _read_jsonl(path: Path, is_valid) -> tuple[list[dict[str, Any]], list[tuple[int, bool]]]:
    """Return the valid rows, and number and finality of every line that is not one."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    rows, broken = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and is_valid(row):
            rows.append(row)
        else:
            broken.append((number, number == len(lines)))
    return rows, broken


def _describe_broken(name: str, broken: list[tuple[int, bool]]) -> list[str]:
    notes = [f"The last line of {name} is incomplete; the rows before it are used." for _, last in broken if last]
    numbers = [str(number) for number, last in broken if not last]
    if numbers:
        shown = ", ".join(numbers[:10]) + (" and more" if len(numbers) > 10 else "")
        notes.append(f"{name}: {len(numbers)} unreadable lines are not used (line {shown}).")
    return notes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    # Squares must be finite too, and an integer beyond the range of floats cannot be converted.
    return _is_number(value) and abs(value) < 1e100


def _is_metrics_row(row: dict[str, Any]) -> bool:
    return type(row.get("step")) is int and 0 <= row["step"] < 2**53


def _is_distribution(row: dict[str, Any]) -> bool:
    edges, counts, bounds = row.get("edges"), row.get("counts"), row.get("bounds")
    return (
        _is_metrics_row(row)
        and row.get("name") in ("ratio", "mismatch_weight", "token_ratio", "token_mismatch_weight")
        and row.get("sign") in ("positive", "negative")
        and isinstance(edges, list)
        and isinstance(counts, list)
        and len(edges) == len(counts) + 1 >= 2
        and all(map(_is_finite, edges + counts))
        and all(a < b for a, b in zip(edges, edges[1:], strict=False))
        and all(count >= 0 for count in counts)
        and isinstance(bounds, list)
        and len(bounds) == 2
        and all(bound is None or _is_finite(bound) for bound in bounds)
    )


def _is_worst(row: dict[str, Any]) -> bool:
    texts = (row.get(name) for name in ("kind", "prompt", "completion"))
    return _is_metrics_row(row) and _is_finite(row.get("nats")) and all(isinstance(text, str) for text in texts)


def _metrics(row: dict[str, Any]) -> dict[str, float | None]:
    """Return the numbers of a row; `null`, and the `NaN` that JSON does not have but Python writes, become `None`."""
    return {
        name: float(value) if _is_finite(value) else None
        for name, value in row.items()
        if name not in ("step", "time") and (value is None or _is_number(value))
    }
