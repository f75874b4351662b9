"""
`trl-qarl compare`: one training run per cell of a grid of schemes, objectives and seeds, the learner quantized or not.

Each cell is a process of its own, and its directory says how far it got: `finished` marks one that is done, `trained`
one that is still to be evaluated, and a complete checkpoint one that resumes.
"""

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from ..checkpoint.marker import is_complete
from ..processes import end_with_parent
from ..study.grid import build_command, cell_name, check_evaluation, expand_grid, load_grid
from .command_line import check_names, configuration_errors
from .train import known_options


LOG_FILE = "log.txt"


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description="Train every cell of a grid of schemes, objectives and seeds, with a quantized learner or not. "
        "The same command continues after an interruption: finished cells are skipped, killed ones resume from their "
        "last checkpoint.",
    )
    add = parser.add_argument
    add("grid", metavar="GRID.yaml", help="what to train, and the values of each axis")
    add("--output_dir", metavar="DIR", help="one directory per cell goes here; default: outputs/GRID")
    add(
        "--devices",
        nargs="+",
        metavar="GPUS",
        help="run one cell at a time on each of these, values of CUDA_VISIBLE_DEVICES: `0 1` or `0,1 2,3`; default: "
        "one cell at a time, which sees all GPUs",
    )
    add("--dry_run", action="store_true", help="print the command of every cell and exit")
    return parser


def main(args: Namespace) -> int:
    """Run the grid. Return 0, 1 if a cell failed, or 130 after Ctrl-C."""
    with configuration_errors():
        for device in args.devices or ():
            if args.devices.count(device) > 1 or not re.fullmatch(r"[\w-]+(,[\w-]+)*", device):
                raise ValueError(
                    f"--devices {' '.join(args.devices)}: {device!r} is given twice or is not a list of GPUs; give "
                    "values of CUDA_VISIBLE_DEVICES such as `0 1` or `0,1 2,3`."
                )
        config = load_grid(args.grid)
        train = config.get("train", {})
        has_server = train.get("use_vllm") and train.get("vllm_mode") == "server"
        if len(args.devices or ()) > 1 and (has_server or train.get("vllm_server_autostart")):
            raise ValueError(
                "`vllm_mode: server` with several --devices: the cells would share one server, or its port with "
                "`vllm_server_autostart`. Use `vllm_mode: colocate`, or a `command` that chooses a free port."
            )
        cells = expand_grid(config)
        output_dir = Path(args.output_dir or Path("outputs") / Path(args.grid).stem)
        states = [_cell_state(config, cell, output_dir / cell_name(cell)) for cell in cells]
        if "train" in config:
            check_names([f"--{name}" for name in config["train"]], known_options())
        if args.dry_run:
            for cell, state in zip(cells, states, strict=True):
                command = build_command(config, cell, output_dir / cell_name(cell), resume=state == "resumes")
                print(f"# {cell_name(cell)}: {state}\n{shlex.join(command)}")
            return 0
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = _lock_directory(output_dir)
    try:
        with lock:
            failures = _run_cells(config, cells, states, output_dir, lock.fileno(), args.devices or [None])
    except (KeyboardInterrupt, SystemExit) as stop:
        print("\nInterrupted. The same command continues.", file=sys.stderr)
        return stop.code if isinstance(stop, SystemExit) else 130
    print(f"{len(cells) - len(failures)} of {len(cells)} cells finished in {output_dir}.")
    if len(failures) < len(cells):
        print(f"`trl-qarl report {output_dir}` compares them.")
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}, log: {output_dir / name / LOG_FILE}", file=sys.stderr)
    return int(bool(failures))


def _run_cells(
    config: dict[str, Any],
    cells: list[dict],
    states: list[str],
    output_dir: Path,
    lock: int,
    devices: list[str | None],
) -> dict[str, str]:
    """Run what is not finished, one cell per device at a time, and return the reasons of the failures by cell."""
    failures: dict[str, str] = {}
    stop, free = threading.Event(), SimpleQueue[str | None]()
    for device in devices:
        free.put(device)

    def work(index: int, cell: dict, state: str) -> None:
        name = cell_name(cell)
        tell = partial(print, f"[{index}/{len(cells)}] {name}:", file=sys.stderr)
        if state == "finished":
            tell("finished before, skipped")
            return
        tell("started")
        device, start = free.get(), time.monotonic()
        run = partial(_run, lock=lock, device=device, stop=stop)
        try:
            _run_cell(config, cell, output_dir / name, state, run)
        except (OSError, ValueError) as error:
            failures[name] = str(error)
        free.put(device)
        if not stop.is_set():
            took = timedelta(seconds=round(time.monotonic() - start))
            tell(f"{'failed after' if name in failures else 'finished in'} {took}")

    with ThreadPoolExecutor(len(devices)) as pool:
        try:
            list(pool.map(work, range(1, len(cells) + 1), cells, states))
        finally:
            stop.set()
    return failures


def _run_cell(config: dict[str, Any], cell: dict, cell_dir: Path, state: str, run: Callable[..., None]) -> None:
    """Train and evaluate one cell. `OSError` or `ValueError` say why it failed."""
    cell_dir.mkdir(exist_ok=True)
    if state == "new":
        (cell_dir / "cell.json").write_text(_cell_record(config, cell))
    with open(cell_dir / LOG_FILE, "a", encoding="utf-8") as log:
        if state != "evaluates":
            run(build_command(config, cell, cell_dir, resume=state == "resumes"), log, log)
            (cell_dir / "trained").touch()
        if "evaluate" in config:
            with open(cell_dir / "evaluation.txt", "w+", encoding="utf-8") as out:
                try:
                    run(build_command(config, cell, cell_dir, key="evaluate"), out, log)
                    out.seek(0)
                    scores = check_evaluation(out.read().strip().split("\n")[-1])
                except (OSError, ValueError) as error:
                    raise ValueError(f"evaluation: {error}") from error
            (cell_dir / "evaluation.json").write_text(json.dumps(scores) + "\n")
    (cell_dir / "finished").write_text(json.dumps(config.get("evaluate")))


def _run(command: list[str], out: TextIO, log: TextIO, lock: int, device: str | None, stop: threading.Event) -> None:
    """Run `command`, which ends when `stop` is set, on the GPUs of `device`, or with `None` on all. `OSError` is
    raised if it fails."""
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
        while process.poll() is None and not stop.wait(0.2):
            pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
        # Processes that a cell leaves behind, such as a server, would take memory from the next one.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    # A program that is asked to end may do so with code 0.
    if code or stop.is_set():
        raise OSError(f"exit code {code}" if code >= 0 else f"killed by signal {-code}")


def _cell_state(config: dict[str, Any], cell: dict, cell_dir: Path) -> str:
    """Return `"finished"`, `"evaluates"` (trained, but not evaluated in the way that the file has now), `"resumes"` or
    `"new"`. A directory with results of other options than the file has now raises `ValueError`."""
    finished = cell_dir / "finished"
    trained = finished.is_file() or (cell_dir / "trained").is_file()
    if not trained and not any(map(is_complete, cell_dir.glob("checkpoint-*"))):
        return "new"
    try:
        record = json.loads((cell_dir / "cell.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    if record != json.loads(_cell_record(config, cell)):
        raise ValueError(
            f"{cell_dir} holds results of other options than this file gives; choose another `--output_dir`, or "
            "remove that directory to train the cell again."
        )
    if not trained:
        return "resumes"
    is_same = finished.is_file() and finished.read_text().strip() == json.dumps(config.get("evaluate"))
    return "finished" if is_same else "evaluates"


def _cell_record(config: dict[str, Any], cell: dict) -> str:
    record = {"cell": cell, **{key: config[key] for key in ("train", "command") if key in config}}
    # YAML knows dates.
    return json.dumps(record, indent=2, default=str) + "\n"


def _lock_directory(output_dir: Path) -> TextIO:
    lock = open(output_dir / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        other = f"Another `trl-qarl compare`, or a cell that it started, is running in {output_dir}"
        raise ValueError(f"{other}; wait for it, or choose another `--output_dir`.") from error
    return lock
