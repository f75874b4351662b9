"""
`trl-qarl compare`: one training run per cell of a grid of alignments, objectives, schemes and seeds.

Cells run one after the other, or one per device at a time, each as a process of its own in a directory named after its
coordinates. The directory says how far its cell got, so the same command continues after an interruption: `finished` marks a cell that is done,
`trained` one that is still to be evaluated, a complete checkpoint one that resumes.
"""

import fcntl
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from ..cli import configuration_errors
from ..schemes import ALIGNMENTS, SCHEMES
from ._runs import is_evaluation


__all__ = [
    "AXES",
    "build_command",
    "cell_name",
    "check_evaluation",
    "expand_grid",
    "load_grid",
    "main",
    "make_parser",
    "progress_line",
]

AXES = ("alignment", "objective", "scheme", "seed")
KEYS = ("command", "train", "grid", "cells", "evaluate")

CELL_FILE = "cell.json"
EVALUATION_FILE = "evaluation.json"
FINISHED_FILE = "finished"
TRAINED_FILE = "trained"
LOG_FILE = "log.txt"


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description="Train every cell of a grid of alignments, objectives, schemes and seeds. The "
        "same command continues after an interruption: finished cells are skipped, killed ones resume from their last "
        "checkpoint.",
    )
    parser.add_argument("grid", metavar="GRID.yaml", help="what to train, and the values of each axis")
    parser.add_argument("--output_dir", metavar="DIR", help="one directory per cell goes here; default: outputs/GRID")
    parser.add_argument(
        "--devices",
        nargs="+",
        metavar="GPUS",
        help="run one cell at a time on each of these, values of CUDA_VISIBLE_DEVICES: `0 1` or `0,1 2,3`; default: one "
        "cell at a time, which sees all GPUs",
    )
    parser.add_argument("--dry_run", action="store_true", help="print the command of every cell and exit")
    return parser


def main(args: Namespace) -> int:
    """Run the grid. Returns 0, 1 if a cell failed, or 130 if interrupted."""
    with configuration_errors():
        for device in args.devices or ():
            if args.devices.count(device) > 1 or not re.fullmatch(r"[\w-]+(,[\w-]+)*", device):
                raise ValueError(
                    f"--devices {' '.join(args.devices)}: {device!r} is given twice or is no list of GPUs; give values of "
                    "CUDA_VISIBLE_DEVICES such as `0 1` or `0,1 2,3`."
                )
        config = load_grid(args.grid)
        if len(args.devices or ()) > 1:
            _check_side_by_side(config.get("train", {}))
        cells = expand_grid(config)
        output_dir = Path(args.output_dir or Path("outputs") / Path(args.grid).stem)
        states = [_cell_state(config, cell, output_dir / cell_name(cell)) for cell in cells]
        if args.dry_run:
            for cell, state in zip(cells, states, strict=True):
                command = build_command(config, cell, output_dir / cell_name(cell), resume=state == "resumes")
                print(f"# {cell_name(cell)}: {state}\n{shlex.join(command)}")
            return 0
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = _lock(output_dir)
    # A terminated command ends its cell too, in the way that Ctrl-C does.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with lock:
            failures = _run_cells(config, cells, states, output_dir, lock.fileno(), args.devices or [None])
    except KeyboardInterrupt:
        print("\nInterrupted. The same command continues.", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(f"{len(cells) - len(failures)} of {len(cells)} cells finished in {output_dir}.")
    if len(failures) < len(cells):
        print(f"`trl-qarl report {output_dir}` compares them.")
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}, log: {output_dir / name / LOG_FILE}", file=sys.stderr)
    return int(bool(failures))


def load_grid(path: str | Path) -> dict[str, Any]:
    """
    Read and check a grid, without its cells.

    Raises:
        ValueError: if the file is not YAML, has unknown or missing keys, or names a program that is not installed.
    """
    import yaml

    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must be a mapping with `train` or `command` and `grid` or `cells`, not {config!r}.")
    _check_names("key", config, KEYS)
    for pair in (("train", "command"), ("grid", "cells")):
        if sum(key in config for key in pair) != 1:
            raise ValueError(f"{path} has {_either(pair, config)}; give exactly one of them.")
    if "train" in config:
        train = config["train"]
        if not isinstance(train, dict):
            raise ValueError(f"`train` must map options of `trl-qarl train` to values, not {train!r}.")
        for name in ("output_dir", "resume_from_checkpoint"):
            if name in train:
                raise ValueError(f"`train` sets `{name}`, which compare sets for every cell; remove it from the file.")
        for name, value in train.items():
            values = value if isinstance(value, list) else [value]
            is_mapping = isinstance(value, dict) and all(map(_is_plain, value.values()))
            if not (is_mapping or all(map(_is_plain, values))):
                raise ValueError(
                    f"`train` sets `{name}` to {value!r}, which no option of a command line can hold: give text, numbers, true, "
                    f"false, a list or a mapping of them (a date in quotes), or write it to a file for `trl-qarl train --config`."
                )
    for key in ("command", "evaluate"):
        command = config.get(key)
        if key in config and not (
            isinstance(command, list) and command and all(isinstance(word, str | int | float) for word in command)
        ):
            raise ValueError(f"`{key}` must be a list of words such as ['{{python}}', 'train.py'], not {command!r}.")
        # A placeholder names nothing that can be looked up.
        if command and "{" not in str(command[0]) and shutil.which(str(command[0])) is None:
            raise ValueError(
                f"`{key}` starts with {command[0]!r}, which is not an executable; install it or fix the path."
            )
    return config


def expand_grid(config: dict[str, Any]) -> list[dict[str, str | int]]:
    """
    Cells of a grid: the product of the axes under `grid`, the last of which varies fastest, or the list under `cells`.

    Example:

    ```python
    >>> expand_grid({"train": {}, "grid": {"scheme": ["w4a16"], "seed": [0, 1]}})
    [{'scheme': 'w4a16', 'seed': 0}, {'scheme': 'w4a16', 'seed': 1}]
    ```

    Raises:
        ValueError: for an unknown axis, an axis without values, a value that cannot name a directory, two equal cells, or
            a cell that the command cannot be built for.
    """
    if "cells" in config:
        cells = config["cells"]
        if not (isinstance(cells, list) and cells and all(isinstance(cell, dict) and cell for cell in cells)):
            raise ValueError(f"`cells` must be a list of mappings such as {{scheme: w4a16, seed: 0}}, not {cells!r}.")
        for cell in cells:
            _check_names("axis", cell, AXES)
    else:
        grid = config["grid"]
        if not (isinstance(grid, dict) and grid):
            raise ValueError(f"`grid` must map {', '.join(AXES)} to lists of values, not {grid!r}.")
        _check_names("axis", grid, AXES)
        for axis, values in grid.items():
            if not (isinstance(values, list) and values):
                raise ValueError(f"`{axis}` must be a list with at least one value, not {values!r}.")
        axes = [axis for axis in AXES if axis in grid]
        cells = [dict(zip(axes, values, strict=True)) for values in itertools.product(*(grid[axis] for axis in axes))]
    cells = [{axis: cell[axis] for axis in AXES if axis in cell} for cell in cells]
    names: set[str] = set()
    for cell in cells:
        for axis, value in cell.items():
            _check_value(axis, value)
            if "train" in config and axis != "seed":
                _check_choice(axis, value)
            if axis in config.get("train", ()):
                raise ValueError(f"`{axis}` is both an axis and an option under `train`; remove it from `train`.")
        if cell_name(cell) in names:
            raise ValueError(f"The cell {cell_name(cell)} occurs twice; remove one of them.")
        names.add(cell_name(cell))
        build_command(config, cell, Path("DIR"))
    _check_placeholders(config, cells)
    return cells


def cell_name(cell: dict[str, str | int]) -> str:
    """Name of a cell's directory: its coordinates, such as `aligned-tbpo-w4a16-seed0`."""
    return "-".join(f"seed{cell[axis]}" if axis == "seed" else str(cell[axis]) for axis in AXES if axis in cell)


def build_command(
    config: dict[str, Any],
    cell: dict[str, str | int],
    output_dir: Path,
    *,
    resume: bool = False,
    key: str | None = None,
) -> list[str]:
    """
    Arguments that train, or with `key="evaluate"` evaluate, one cell.

    Args:
        config (`dict`):
            Grid of [`load_grid`].
        cell (`dict`):
            One of [`expand_grid`].
        output_dir (`Path`):
            The cell's own directory.
        resume (`bool`, *optional*, defaults to `False`):
            Continue from the last checkpoint in `output_dir`.
        key (`str`, *optional*):
            `"command"` or `"evaluate"`; by default what trains.
    """
    if key is None and "train" in config:
        options = {**config["train"], **cell, "output_dir": str(output_dir)}
        if resume:
            options["resume_from_checkpoint"] = True
        words = [word for name, value in options.items() for word in _option(name, value)]
        return [sys.executable, "-m", "trl_qarl.cli", "train", *words]
    key = key or "command"
    values = {
        **cell,
        "output_dir": str(output_dir),
        "resume_from_checkpoint": str(resume).lower(),
        "python": sys.executable,
    }

    def fill(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ValueError(
                f"`{key}` has the placeholder {match[0]}, which cell {cell_name(cell)} does not set; "
                f"it can be {', '.join(f'{{{name}}}' for name in values)}."
            )
        return str(values[match[1]])

    return [re.sub(r"\{(\w+)\}", fill, str(word)) for word in config[key]]


def progress_line(
    done: int, total: int, running: dict[str, float], elapsed: float, durations: list[float], num_devices: int = 1
) -> str:
    """
    State of a grid in one line.

    Args:
        done (`int`):
            Cells that are finished, skipped or failed.
        total (`int`):
            All cells.
        running (`dict[str, float]`):
            Cells that are running, and for how many seconds.
        elapsed (`float`):
            Seconds since the command started.
        durations (`list[float]`):
            Seconds of the cells that this command has finished; their mean makes the estimate.
        num_devices (`int`, *optional*, defaults to `1`):
            Cells that run at the same time.
    """
    left = "unknown until a cell has finished"
    if durations:
        mean = sum(durations) / len(durations)
        remaining = mean * (total - done) - sum(min(seconds, mean) for seconds in running.values())
        left = f"about {_clock(remaining / num_devices)}"
    return f"[{done}/{total} done] {', '.join(running)} | elapsed {_clock(elapsed)} | left: {left}"


def check_evaluation(text: str) -> dict[str, dict[str, int]]:
    """
    The last line of what an evaluation printed, `{name: {"correct": int, "total": int}}`.

    Raises:
        ValueError: if the line is anything else.
    """
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


def _run_cells(
    config: dict[str, Any],
    cells: list[dict],
    states: list[str],
    output_dir: Path,
    lock: int,
    devices: list[str | None],
) -> dict[str, str]:
    """Run what is not finished, one cell per device at a time, and return the reasons of the failures by cell."""
    start = time.monotonic()
    failures: dict[str, str] = {}
    durations: list[float] = []
    running: dict[str, float] = {}
    stop = threading.Event()
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
                _show(f"{position} finished before, skipped", end="\n")
                continue
            running[name] = time.monotonic()
            try:
                reason = _run_cell(config, cell, output_dir / name, state, lock, device, stop)
            except OSError as error:
                reason = str(error)
            seconds = time.monotonic() - running.pop(name)
            if stop.is_set():
                return
            if reason is None:
                durations.append(seconds)
                _show(f"{position} finished in {_clock(seconds)}", end="\n")
            else:
                failures[name] = reason
                _show(f"{position} failed after {_clock(seconds)}", end="\n")

    with ThreadPoolExecutor(len(devices)) as pool:
        workers = [pool.submit(work, device) for device in devices]
        try:
            while wait(workers, timeout=1).not_done:
                if sys.stderr.isatty():
                    now = time.monotonic()
                    seconds = {name: now - since for name, since in list(running.items())}
                    done = len(cells) - len(waiting) - len(seconds)
                    _show(progress_line(done, len(cells), seconds, now - start, list(durations), len(devices)))
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
    """Train and evaluate one cell. Returns why it failed, `None` if it did not."""
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
    """Exit code of `command`, which ends when `stop` is set. It sees the GPUs of `device`, or with `None` all."""
    log.write(f"$ {shlex.join(command)}\n")
    log.flush()
    # The lock lives as long as the process does, even when this one is killed: a second command then waits its turn.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=log,
        start_new_session=True,
        pass_fds=[lock],
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
        # What a cell leaves behind, such as a server, would take memory from the next one.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode


def _cell_state(config: dict[str, Any], cell: dict, cell_dir: Path) -> str:
    """
    `"finished"`, `"evaluates"` (trained, but not evaluated in the way that the file has now), `"resumes"` or `"new"`.

    Raises:
        ValueError: if the directory holds results of other options than the file has now.
    """
    finished = (cell_dir / FINISHED_FILE).is_file()
    trained = finished or (cell_dir / TRAINED_FILE).is_file()
    # Without its trainer state a checkpoint is incomplete.
    has_checkpoint = any(cell_dir.glob("checkpoint-*/trainer_state.json"))
    if not (trained or has_checkpoint):
        return "new"
    try:
        record = json.loads((cell_dir / CELL_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    if record != json.loads(json.dumps(_cell_record(config, cell))):
        raise ValueError(
            f"{cell_dir} holds results of other options than this file gives; choose another `--output_dir`, or remove "
            "that directory to train the cell again."
        )
    if not trained:
        return "resumes"
    if not finished:
        return "evaluates"
    evaluated = (cell_dir / FINISHED_FILE).read_text(encoding="utf-8").strip()
    return "finished" if evaluated == json.dumps(config.get("evaluate")) else "evaluates"


def _cell_record(config: dict[str, Any], cell: dict) -> dict[str, Any]:
    return {"cell": cell, **{key: config[key] for key in ("train", "command") if key in config}}


def _lock(output_dir: Path) -> TextIO:
    lock = open(output_dir / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ValueError(
            f"Another `trl-qarl compare`, or a cell that it started, is running in {output_dir}; wait for it, or choose "
            "another `--output_dir`."
        ) from error
    return lock


def _check_names(kind: str, names: dict[str, Any], allowed: tuple[str, ...]) -> None:
    for name in names:
        if name not in allowed:
            raise ValueError(f"Unknown {kind} {name!r}; it can be {', '.join(allowed)}.")


def _check_value(axis: str, value: Any) -> None:
    if axis == "seed" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"`seed` must be integers from 0, not {value!r}.")
    # The value becomes part of a directory's name.
    if axis != "seed" and not (isinstance(value, str) and re.fullmatch(r"\w[\w.-]*", value)):
        raise ValueError(
            f"`{axis}` must be names of letters, digits, '_', '-' and '.', not {value!r}; quote it in YAML."
        )


def _check_choice(axis: str, value: str) -> None:
    # Imports torch, which a grid with a `command` of its own does without.
    from ..objectives import OBJECTIVES

    choices = {"alignment": ALIGNMENTS, "objective": OBJECTIVES, "scheme": tuple(SCHEMES)}[axis]
    if value not in choices:
        raise ValueError(f"`{axis}` has the value {value!r}; it can be {', '.join(choices)}.")


def _check_side_by_side(train: dict[str, Any]) -> None:
    if train.get("vllm_server_autostart"):
        problem = "`vllm_server_autostart` with several --devices: every cell would start its server on the same port."
    elif train.get("use_vllm") and train.get("vllm_mode") == "server":
        problem = (
            "`vllm_mode: server` with several --devices: the cells would publish their weights to the same server."
        )
    else:
        return
    raise ValueError(f"{problem} Use `vllm_mode: colocate`, or a `command` that chooses a free port.")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _check_placeholders(config: dict[str, Any], cells: list[dict]) -> None:
    """Without a placeholder for it, cells that differ along an axis would all be the same run."""
    if "command" not in config:
        return
    words = " ".join(map(str, config["command"]))
    varying = [axis for axis in AXES if len({cell.get(axis) for cell in cells}) > 1]
    for name in ("output_dir", *varying):
        if f"{{{name}}}" not in words:
            raise ValueError(f"`command` has no {{{name}}}, so its cells would not differ in it; add the placeholder.")


def _either(pair: tuple[str, ...], config: dict[str, Any]) -> str:
    return " and ".join(f"`{key}`" for key in pair) if pair[0] in config else f"neither `{pair[0]}` nor `{pair[1]}`"


def _option(name: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    yield f"--{name}"
    if isinstance(value, list):
        yield from map(str, value)
    else:
        yield json.dumps(value) if isinstance(value, dict) else str(value)


def _write(path: Path, text: str) -> None:
    """Write `path` completely or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"killed by signal {-code}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _show(line: str, end: str = "") -> None:
    """Write over the last progress line of a terminal; elsewhere, write a line."""
    if sys.stderr.isatty():
        # A line that wraps could not be written over.
        line = f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}"
    print(line, end=end, file=sys.stderr, flush=True)
