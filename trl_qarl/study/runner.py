"""
Runs the cells of a grid, each as a process of its own, and continues after an interruption.

A cell's directory says how far it got: `finished` marks one that is done, `trained` one that is still to be evaluated,
and a complete checkpoint one that resumes.
"""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from ..checkpoint.marker import is_complete
from ..processes import end_with_parent
from .grid import build_command, cell_name
from .runs import is_evaluation


__all__ = ["cell_state", "check_evaluation", "check_side_by_side", "lock_directory", "run_cells"]

CELL_FILE = "cell.json"
EVALUATION_FILE = "evaluation.json"
FINISHED_FILE = "finished"
TRAINED_FILE = "trained"
LOG_FILE = "log.txt"


def check_evaluation(text: str) -> dict[str, dict[str, int]]:
    """Read the last line of what an evaluation printed, `{name: {"correct": int, "total": int}}`; anything else raises
    `ValueError`."""
    line = (text.strip().splitlines() or [""])[-1]
    try:
        scores = json.loads(line)
    except ValueError:
        scores = None
    if not is_evaluation(scores):
        raise ValueError(
            f'the last line must be {{"greedy": {{"correct": 1, "total": 2}}}} or alike, not {line[:80]!r}'
        )
    return scores


def run_cells(
    config: dict[str, Any],
    cells: list[dict],
    states: list[str],
    output_dir: Path,
    lock: int,
    devices: list[str | None],
) -> dict[str, str]:
    """Run what is not finished, one cell per device at a time, and return the reasons of the failures by cell."""
    failures: dict[str, str] = {}
    running: list[str] = []
    stop = threading.Event()
    # On a terminal: what runs, for how long, and for how long still, by the mean of the cells that have finished.
    bar = tqdm(total=len(cells), initial=states.count("finished"), unit="cell", smoothing=0, disable=None)
    waiting = deque(enumerate(zip(cells, states, strict=True), 1))

    def work(device: str | None) -> None:
        while not stop.is_set():
            try:
                index, (cell, state) = waiting.popleft()
            except IndexError:
                return
            name = cell_name(cell)
            position = f"[{index}/{len(cells)}] {name}:"
            if state == "finished":
                bar.write(f"{position} finished before, skipped", file=sys.stderr)
                continue
            start = time.monotonic()
            running.append(name)
            try:
                reason = _run_cell(config, cell, output_dir / name, state, lock, device, stop)
            except OSError as error:
                reason = str(error)
            running.remove(name)
            if stop.is_set():
                return
            if reason is not None:
                failures[name] = reason
            took = timedelta(seconds=round(time.monotonic() - start))
            bar.write(f"{position} {'finished in' if reason is None else 'failed after'} {took}", file=sys.stderr)
            bar.update()

    with bar, ThreadPoolExecutor(len(devices)) as pool:
        workers = [pool.submit(work, device) for device in devices]
        try:
            while wait(workers, timeout=1).not_done:
                bar.set_postfix_str(", ".join(running))
        finally:
            stop.set()
    for worker in workers:
        worker.result()
    return failures


def _run_cell(
    config: dict[str, Any],
    cell: dict,
    cell_dir: Path,
    state: str,
    lock: int,
    device: str | None,
    stop: threading.Event,
) -> str | None:
    """Train and evaluate one cell. Return why it failed, `None` if it did not."""
    cell_dir.mkdir(exist_ok=True)
    _write(cell_dir / CELL_FILE, json.dumps(_cell_record(config, cell), indent=2) + "\n")
    with open(cell_dir / LOG_FILE, "a", encoding="utf-8") as log:
        if state != "evaluates":
            command = build_command(config, cell, cell_dir, resume=state == "resumes")
            code = _run(command, log, log, lock, device, stop)
            if code:
                return _describe_exit(code)
            if not stop.is_set():
                _write(cell_dir / TRAINED_FILE, "")
        if "evaluate" in config:
            answer = cell_dir / "evaluation.txt"
            with open(answer, "w", encoding="utf-8") as out:
                code = _run(build_command(config, cell, cell_dir, key="evaluate"), out, log, lock, device, stop)
            if code:
                return f"evaluation: {_describe_exit(code)}"
            try:
                scores = check_evaluation(answer.read_text(encoding="utf-8"))
            except ValueError as error:
                return f"evaluation: {error}"
            _write(cell_dir / EVALUATION_FILE, json.dumps(scores) + "\n")
    if stop.is_set():
        # A program that is asked to end may do so with code 0.
        return "interrupted"
    _write(cell_dir / FINISHED_FILE, json.dumps(config.get("evaluate")) + "\n")
    return None


def _run(command: list[str], out: TextIO, log: TextIO, lock: int, device: str | None, stop: threading.Event) -> int:
    """Return the exit code of `command`, which ends when `stop` is set. It sees the GPUs of `device`, or with `None`
    all."""
    log.write(f"$ {shlex.join(command)}\n")
    log.flush()
    # The process inherits the lock: as long as it runs a second command is refused, even if this one was killed.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=log,
        start_new_session=True,
        pass_fds=[lock],
        preexec_fn=end_with_parent(),
        env=None if device is None else {**os.environ, "CUDA_VISIBLE_DEVICES": device},
    )
    try:
        while process.poll() is None and not stop.is_set():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.2)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
        # Processes that a cell leaves behind, such as a server, would take memory from the next one.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode


def cell_state(config: dict[str, Any], cell: dict, cell_dir: Path) -> str:
    """Return `"finished"`, `"evaluates"` (trained, but not evaluated in the way that the file has now), `"resumes"` or
    `"new"`. A directory with results of other options than the file has now raises `ValueError`."""
    finished = (cell_dir / FINISHED_FILE).is_file()
    trained = finished or (cell_dir / TRAINED_FILE).is_file()
    has_checkpoint = any(map(is_complete, cell_dir.glob("checkpoint-*")))
    if not (trained or has_checkpoint):
        return "new"
    try:
        record = json.loads((cell_dir / CELL_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    if record != json.loads(json.dumps(_cell_record(config, cell))):
        raise ValueError(
            f"{cell_dir} holds results of other options than this file gives; choose another `--output_dir`, or "
            "remove that directory to train the cell again."
        )
    if not trained:
        return "resumes"
    if not finished:
        return "evaluates"
    evaluated = (cell_dir / FINISHED_FILE).read_text(encoding="utf-8").strip()
    return "finished" if evaluated == json.dumps(config.get("evaluate")) else "evaluates"


def _cell_record(config: dict[str, Any], cell: dict) -> dict[str, Any]:
    return {"cell": cell, **{key: config[key] for key in ("train", "command") if key in config}}


def lock_directory(output_dir: Path) -> TextIO:
    lock = open(output_dir / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ValueError(
            f"Another `trl-qarl compare`, or a cell that it started, is running in {output_dir}; wait for it, or "
            "choose another `--output_dir`."
        ) from error
    return lock


def check_side_by_side(train: dict[str, Any]) -> None:
    if train.get("vllm_server_autostart"):
        problem = "`vllm_server_autostart` with several --devices: every cell would start its server on the same port."
    elif train.get("use_vllm") and train.get("vllm_mode") == "server":
        problem = (
            "`vllm_mode: server` with several --devices: the cells would publish their weights to the same server."
        )
    else:
        return
    raise ValueError(f"{problem} Use `vllm_mode: colocate`, or a `command` that chooses a free port.")


def _write(path: Path, text: str) -> None:
    """Write `path` completely or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"killed by signal {-code}"
