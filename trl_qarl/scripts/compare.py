"""
`trl-qarl compare`: one training run per cell of a grid of schemes, objectives and seeds, the learner quantized or not.

Each cell is a process of its own, and its directory says how far it got: `finished` marks one that is done, `trained`
one that is still to be evaluated, and a complete checkpoint one that resumes.
"""

import asyncio
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ..checkpoint.marker import is_complete
from ..processes import as_child
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
        output_dir = Path(args.output_dir or Path("outputs") / Path(args.grid).stem)
        cells = {output_dir / cell_name(cell): cell for cell in expand_grid(config)}
        states = {folder: _cell_state(config, cell, folder) for folder, cell in cells.items()}
        if "train" in config:
            check_names([f"--{name}" for name in train], known_options())
        if args.dry_run:
            for folder, cell in cells.items():
                command = build_command(config, cell, folder, resume=states[folder] == "resumes")
                print(f"# {folder.name}: {states[folder]}\n{shlex.join(command)}")
            return 0
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = _lock_directory(output_dir)
        for folder, cell in cells.items():
            # A report that is followed waits for the cells that have not begun.
            if states[folder] == "new":
                folder.mkdir(exist_ok=True)
                (folder / "cell.json").write_text(_cell_record(config, cell))
    failures: dict[str, str] = {}
    queue = enumerate(cells.items(), 1)

    async def work(device: str | None) -> None:
        for index, (folder, cell) in queue:
            tell = partial(print, f"[{index}/{len(cells)}] {folder.name}:", file=sys.stderr)
            if states[folder] == "finished":
                tell("finished before, skipped")
                continue
            tell("started")
            start = time.monotonic()
            try:
                await _run_cell(config, cell, folder, states[folder], partial(_run, lock=lock, device=device))
            except (OSError, ValueError) as error:
                failures[folder.name] = str(error)
            took = timedelta(seconds=round(time.monotonic() - start))
            tell(f"{'failed after' if folder.name in failures else 'finished in'} {took}")

    async def work_on_all() -> None:
        await asyncio.gather(*map(work, args.devices or [None]))

    try:
        with lock:
            asyncio.run(work_on_all())
    except (KeyboardInterrupt, SystemExit) as stop:
        print("\nInterrupted. The same command continues.", file=sys.stderr)
        return stop.code if isinstance(stop, SystemExit) else 130
    print(f"{len(cells) - len(failures)} of {len(cells)} cells finished in {output_dir}.")
    if len(failures) < len(cells):
        print(f"`trl-qarl report {output_dir}` compares them.")
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}, log: {output_dir / name / LOG_FILE}", file=sys.stderr)
    return int(bool(failures))


async def _run_cell(config: dict[str, Any], cell: dict, folder: Path, state: str, run: partial) -> None:
    """Train and evaluate one cell. `OSError` or `ValueError` say why it failed."""
    with open(folder / LOG_FILE, "a", encoding="utf-8") as log:
        if state != "evaluates":
            await run(build_command(config, cell, folder, resume=state == "resumes"), log, log)
            (folder / "trained").touch()
        if "evaluate" in config:
            with open(folder / "evaluation.txt", "w+", encoding="utf-8") as out:
                try:
                    await run(build_command(config, cell, folder, key="evaluate"), out, log)
                    out.seek(0)
                    scores = check_evaluation(out.read().strip().split("\n")[-1])
                except (OSError, ValueError) as error:
                    raise ValueError(f"evaluation: {error}") from error
            (folder / "evaluation.json").write_text(json.dumps(scores) + "\n")
    (folder / "finished").write_text(json.dumps(config.get("evaluate")))


async def _run(command: list[str], out: TextIO, log: TextIO, lock: TextIO, device: str | None) -> None:
    """Run `command`, which ends when this is cancelled, on the GPUs of `device`, or with `None` on all. `OSError` is
    raised if it fails."""
    log.write(f"$ {shlex.join(command)}\n")
    log.flush()
    # The process inherits the lock: as long as it runs a second command is refused, even if this one was killed.
    process = await asyncio.create_subprocess_exec(
        *as_child(command),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=log,
        start_new_session=True,
        pass_fds=[lock.fileno()],
        env=None if device is None else {**os.environ, "CUDA_VISIBLE_DEVICES": device},
    )
    try:
        await process.wait()
    finally:
        try:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGTERM)
                await asyncio.wait_for(process.wait(), 30)
        except (ProcessLookupError, TimeoutError):
            pass
        finally:
            # Processes that a cell leaves behind, such as a server, would take memory from the next one.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = await process.wait()
    if code:
        raise OSError(f"exit code {code}" if code > 0 else f"killed by signal {-code}")


def _cell_state(config: dict[str, Any], cell: dict, folder: Path) -> str:
    """Return `"finished"`, `"evaluates"` (trained, but not evaluated in the way that the file has now), `"resumes"` or
    `"new"`. A directory with results of other options than the file has now raises `ValueError`."""
    finished = folder / "finished"
    trained = finished.is_file() or (folder / "trained").is_file()
    if not trained and not any(map(is_complete, folder.glob("checkpoint-*"))):
        return "new"
    record = None
    with suppress(OSError, ValueError):
        record = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
    if record != json.loads(_cell_record(config, cell)):
        raise ValueError(
            f"{folder} holds results of other options than this file gives; choose another `--output_dir`, or remove "
            "that directory to train the cell again."
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
    """Lock a directory until the returned file is closed. A file system without locks only gets a warning."""
    lock = open(output_dir / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        other = f"Another `trl-qarl compare`, or a cell that it started, is running in {output_dir}"
        raise ValueError(f"{other}; wait for it, or choose another `--output_dir`.") from error
    except OSError as error:
        unsafe = f"{output_dir}: {error.strerror}: a second `trl-qarl compare` in this directory is not refused."
        print(f"trl-qarl: warning: {unsafe}", file=sys.stderr)
    return lock
