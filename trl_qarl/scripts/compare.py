"""`trl-qarl compare`: one training run per cell of a grid of schemes, objectives and seeds, the learner quantized or
not."""

import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..study.grid import build_command, cell_name, expand_grid, load_grid
from ..study.runner import LOG_FILE, cell_state, check_side_by_side, lock_directory, run_cells
from .command_line import check_names, configuration_errors
from .train import known_options


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
        if len(args.devices or ()) > 1:
            check_side_by_side(config.get("train", {}))
        cells = expand_grid(config)
        output_dir = Path(args.output_dir or Path("outputs") / Path(args.grid).stem)
        states = [cell_state(config, cell, output_dir / cell_name(cell)) for cell in cells]
        if "train" in config:
            check_names([f"--{name}" for name in config["train"]], known_options())
        if args.dry_run:
            for cell, state in zip(cells, states, strict=True):
                command = build_command(config, cell, output_dir / cell_name(cell), resume=state == "resumes")
                print(f"# {cell_name(cell)}: {state}\n{shlex.join(command)}")
            return 0
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = lock_directory(output_dir)
    try:
        with lock:
            failures = run_cells(config, cells, states, output_dir, lock.fileno(), args.devices or [None])
    except (KeyboardInterrupt, SystemExit) as stop:
        print("\nInterrupted. The same command continues.", file=sys.stderr)
        return stop.code if isinstance(stop, SystemExit) else 130
    print(f"{len(cells) - len(failures)} of {len(cells)} cells finished in {output_dir}.")
    if len(failures) < len(cells):
        print(f"`trl-qarl report {output_dir}` compares them.")
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}, log: {output_dir / name / LOG_FILE}", file=sys.stderr)
    return int(bool(failures))
