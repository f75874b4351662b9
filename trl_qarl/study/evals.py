"""What `trl-qarl eval` found about the policy of a run: `eval.json`, or `eval-NAME.json`, in its folder or in one inside it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


__all__ = ["HEADER", "eval_rows", "read_evals"]

HEADER = ["model", "task", "pass@1", "difference", "problems", "samples of each", "sampling"]


def read_evals(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """
    Read the results of `trl-qarl eval` in a run's folder and in those inside it, where exports lie, and notes on files
    that are not used.
    """
    found, notes = [], []
    for file in _files(path):
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            # Made here, so that a file of another form is known before the page is written.
            eval_rows(result)
            found.append(result)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            notes.append(f"{file.relative_to(path)} has another form than `trl-qarl eval` writes and is not used.")
    return found, notes


def _files(path: Path) -> Iterator[Path]:
    for folder in (path, *sorted(child for child in path.iterdir() if child.is_dir())):
        yield from sorted(file for name in ("eval.json", "eval-*.json") for file in folder.glob(name))


def eval_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return cells under [`HEADER`], a row for each model and task; raises what a file of another form raises."""
    options, rows, first = result["options"], [], result["results"][0]["model"]
    sampling = f"{'vLLM' if options['vllm'] else 'transformers'}, " + (
        f"temperature {options['temperature']:g}, top_p {options['top_p']:g}" if options["temperature"] else "greedy"
    )
    for row in result["results"]:
        difference = result.get("differences", {}).get(row["task"]) if row["model"] == first else None
        rows.append(
            [
                _short(row["model"]),
                Path(row["task"]).name,
                _percent(row["pass@1"], row["standard_error"]),
                _percent(difference["mean"], difference["standard_error"], "+") if difference else "-",
                str(len(row["scores"])),
                f"{options['samples']:d}",
                sampling,
            ]
        )
    return rows


def _short(model: str) -> str:
    """Return the last two names of a folder on this machine, anything else as it is."""
    return "/".join(model.rstrip("/").split("/")[-2:]) if model.startswith(("/", ".")) else model


def _percent(mean: float, error: float | None, sign: str = "") -> str:
    return f"{mean:{sign}.1%}" + ("" if error is None else f" ±{error:.1%}")
