"""
`trl-qarl report`: an HTML page about training runs.

The page is one file: styles and figures inline, no script, nothing loaded. Whatever the runs wrote is escaped.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path

from ..study.groups import EVERY_BATCH, Group, count_of, describe_differences, make_groups
from ..study.runs import Run, read_runs
from ..telemetry.run_files import METRICS_FILE
from .errors import configuration_errors


__all__ = ["main", "make_parser", "write_page"]

_POLL_SECONDS, _REFRESH_SECONDS = 1.0, 10


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
    """Read the runs, draw the figures, write the page; with `--follow` again and again."""
    from importlib.util import find_spec

    output = Path(args.output)
    with configuration_errors():
        missing = [name for name in ("jinja2", "matplotlib", "pandas", "scipy") if find_spec(name) is None]
        if missing:
            raise ValueError(
                f"`trl-qarl report` needs packages that are not installed: {', '.join(missing)}. Run "
                '`pip install "trl-qarl[report]"`.'
            )
        if output.is_dir() or output.suffix != ".html":
            raise ValueError(f"--output={args.output!r} must name a file that ends in .html, such as report.html.")
        if args.timeout is not None and not (args.follow and args.timeout > 0):
            raise ValueError(f"--timeout={args.timeout:g} must be positive and needs --follow.")
        output.parent.mkdir(parents=True, exist_ok=True)
        if not args.follow:
            groups = write_page(*read_runs(args.run_dirs), output, with_png=args.png)
    if args.follow:
        try:
            _follow(args.run_dirs, output, args.timeout, args.png)
        except KeyboardInterrupt:
            print("Stopped.")
        return
    from ..study.page import assess_group, summarize_findings

    if len(groups) == 1:
        print(summarize_findings(assess_group(groups[0])))
    else:
        found = describe_differences(groups)
        print(
            f"{count_of(len(found['exceeds']), 'difference')} of final reward above the seed noise, "
            f"{len(found['within'])} within it, {len(found['unknown'])} that cannot be judged"
        )
    runs = [run for group in groups for run in group.runs]
    print(f"{count_of(len(runs), 'run')} in {count_of(len(groups), 'group')}: {output.resolve().as_uri()}")


def write_page(
    runs: list[Run], notes: list[str], output: Path, refresh: int | None = None, with_png: bool = False
) -> list[Group]:
    """Write the page about runs and notes of [`read_runs`]; needs matplotlib, jinja2 and pandas."""
    from ..study.page import make_page
    from ..study.plots import draw_figures, save_pngs

    groups = make_groups(runs)
    figures = draw_figures(groups)
    if with_png:
        save_pngs([*figures[0], *figures[1]], groups, output)
    missing = [f"No run has a value of {name}." for name in EVERY_BATCH if not any(run.values(name) for run in runs)]
    page = make_page(groups, figures, notes + missing, refresh)
    # A browser must not read half a page.
    draft = output.with_name(f".{output.name}.part")
    draft.write_text(page, encoding="utf-8")
    draft.replace(output)
    return groups


def _follow(run_dirs: list[str], output: Path, timeout: float | None, with_png: bool) -> None:
    """Write the page whenever metrics have grown. A run that has not logged yet is waited for."""
    from ..study.page import assess_group, summarize_findings

    with configuration_errors():
        for path in map(Path, run_dirs):
            if not path.is_dir():
                raise ValueError(f"{path} is not a directory; give directories that training runs write.")
    print(f"Following: {output.resolve().as_uri()}", flush=True)
    seen, changed = None, time.monotonic()
    while timeout is None or time.monotonic() - changed < timeout:
        state = _sizes(run_dirs)
        if state == seen:
            time.sleep(_POLL_SECONDS)
            continue
        seen, changed = state, time.monotonic()
        try:
            runs, notes = read_runs(run_dirs)
        except ValueError as error:
            print(f"Waiting: {error}", flush=True)
            continue
        is_finished = not notes and all(run.is_finished for run in runs)
        groups = write_page(
            runs, notes, output, None if is_finished else _REFRESH_SECONDS, with_png=with_png and is_finished
        )
        for group in groups:
            steps = ", ".join(f"{run.last_step} of {run.config.get('max_steps', '?')}" for run in group.runs)
            print(f"{group.label}, step {steps}: {summarize_findings(assess_group(group))}", flush=True)
        if is_finished:
            print("All runs are finished.")
            return
        # Training on the same machine keeps four fifths of a core.
        time.sleep(4 * (time.monotonic() - changed))
    print(f"Nothing was logged for {timeout:g} seconds.")


def _sizes(run_dirs: Iterable[str]) -> dict[Path, int]:
    """Return the size of each file of metrics, by which growth is noticed."""
    paths = [
        file
        for folder in map(Path, run_dirs)
        for file in (*folder.glob(METRICS_FILE), *folder.glob(f"*/{METRICS_FILE}"))
    ]
    return {path: path.stat().st_size for path in paths}
