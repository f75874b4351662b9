"""
`trl-qarl report`: an HTML page that compares training runs, with its figures as PNGs beside it.

The page is one file: styles inline, figures as data, no script, nothing loaded. Whatever the runs wrote is escaped.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..study.figures import draw_figures
from ..study.page import count_of, describe_differences, make_page
from ..study.runs import read_runs
from ..study.statistics import make_groups
from .errors import configuration_errors


__all__ = ["main", "make_parser"]


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(prog=prog, description="Write an HTML page that compares training runs, and its figures.")
    parser.add_argument(
        "run_dirs",
        metavar="RUN_DIR",
        nargs="+",
        help="directory that a training run wrote, or one of `trl-qarl compare` with several",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="report.html",
        help="page to write; figures get its name and go beside it; default: %(default)s",
    )
    return parser


def main(args: Namespace) -> None:
    """Read the runs, draw the figures, write the page."""
    from importlib.util import find_spec

    with configuration_errors():
        if find_spec("matplotlib") is None:
            raise ValueError(
                '`trl-qarl report` needs matplotlib, which is not installed. Run `pip install "trl-qarl[report]"`.'
            )
        output = Path(args.output)
        if output.is_dir() or output.suffix != ".html":
            raise ValueError(f"--output={args.output!r} must name a file that ends in .html, such as report.html.")
        runs, notes = read_runs(args.run_dirs)
        output.parent.mkdir(parents=True, exist_ok=True)
        groups = make_groups(runs)
        figures, missing = draw_figures(groups, output)
        page = make_page(groups, figures, notes + missing)
        output.write_text(page, encoding="utf-8")
    found = describe_differences(groups)
    print(
        f"{count_of(len(found['exceeds']), 'difference')} of final reward above the seed noise, "
        f"{len(found['within'])} within it, {len(found['unknown'])} that cannot be judged"
    )
    print(
        f"{output}: {count_of(len(runs), 'run')} in {count_of(len(groups), 'group')}, "
        f"{count_of(len(figures), 'figure')}"
    )
