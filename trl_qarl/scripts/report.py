"""`trl-qarl report`: an HTML page about training runs."""

import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path

from ..telemetry.run_files import METRICS_FILE
from .command_line import configuration_errors


_POLL_SECONDS = 1.0


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(
        prog=prog, description="Write an HTML page about training runs, their health and their differences."
    )
    add = parser.add_argument
    add(
        "run_dirs",
        metavar="RUN_DIR",
        nargs="+",
        help="directory of a training run, or of `trl-qarl compare` with several runs",
    )
    add("--output", metavar="FILE", default="report.html", help="page to write; default: %(default)s")
    add("--png", action="store_true", help="write each figure as a PNG too, next to the page and under its name")
    add("--follow", action="store_true", help="rewrite the page whenever a run logs, until all are finished or Ctrl-C")
    add(
        "--timeout",
        metavar="SECONDS",
        type=float,
        help="with --follow: end when no run has logged for so long; default: never",
    )
    return parser


def main(args: Namespace) -> None:
    """Read the runs, draw the figures, write the page; with `--follow` again and again, whenever metrics have grown. A
    run that has not logged yet is waited for."""
    from importlib.util import find_spec

    output = Path(args.output)
    with configuration_errors():
        missing = [name for name in ("jinja2", "matplotlib", "pandas", "scipy") if find_spec(name) is None]
        if missing:
            raise ValueError(
                f"`trl-qarl report` needs packages that are not installed: {', '.join(missing)}. Run "
                '`pip install "trl-qarl[report]"`.'
            )
        if output.suffix != ".html":
            raise ValueError(f"--output={args.output!r} must name a file that ends in .html, such as report.html.")
        if args.timeout is not None and not (args.follow and args.timeout > 0):
            raise ValueError(f"--timeout={args.timeout:g} must be positive and needs --follow.")
        for path in map(Path, args.run_dirs):
            if not path.is_dir():
                raise ValueError(f"{path} is not a directory; give directories that training runs write.")
        output.parent.mkdir(parents=True, exist_ok=True)
        from ..study.page import write_page

        if not args.follow:
            _, lines = write_page(args.run_dirs, output, args.png)
            print(*lines, output.resolve().as_uri(), sep="\n")
            return
    print(f"Following: {output.resolve().as_uri()}", flush=True)
    seen, changed, patterns = None, time.monotonic(), (METRICS_FILE, f"*/{METRICS_FILE}")
    try:
        while args.timeout is None or time.monotonic() - changed < args.timeout:
            sizes = {}
            for file in (
                file for folder in args.run_dirs for pattern in patterns for file in Path(folder).glob(pattern)
            ):
                # A run that is moved away meanwhile has no size.
                with suppress(FileNotFoundError):
                    sizes[file] = file.stat().st_size
            if sizes == seen:
                time.sleep(_POLL_SECONDS)
                continue
            seen, changed = sizes, time.monotonic()
            try:
                is_finished, lines = write_page(args.run_dirs, output, args.png, is_followed=True)
            except (FileNotFoundError, ValueError) as error:
                print(f"Waiting: {error}", flush=True)
                continue
            print("\n".join(lines), flush=True)
            if is_finished:
                print("All runs are finished.")
                return
            # Training on the same machine keeps four fifths of a core.
            time.sleep(4 * (time.monotonic() - changed))
        print(f"Nothing was logged for {args.timeout:g} seconds.")
    except KeyboardInterrupt:
        print("Stopped.")
