"""Command line options for the scheme of each layer."""

from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

from ..quantization.plan import EDGES, get_plan, parse_scheme
from ..quantization.schemes import SCHEMES


def add_plan_options(parser: ArgumentParser, default: str | None) -> None:
    """Add `--scheme`, with its default, `--group_size`, `--exclude_modules`, `--high_precision_first` and `_last`."""
    parser.add_argument(
        "--scheme",
        type=_scheme,
        default=default,
        metavar="SCHEME",
        help=f"the learner's: one of {', '.join(SCHEMES)}; or JSON from patterns of layers' names to them"
        + (f" (default: {default})" if default else ""),
    )
    parser.add_argument("--group_size", type=int, metavar="N", help="group size of the schemes that have groups")
    parser.add_argument(
        "--exclude_modules",
        nargs="+",
        metavar="NAME",
        help="linear layers to leave in high precision: names, last components, or regular expressions over the whole name",
    )
    for name in EDGES:
        end = name.rpartition("_")[2]
        parser.add_argument(
            f"--{name}", type=int, default=0, metavar="N", help=f"{end} decoder layers that stay in high precision"
        )


def _scheme(text: str) -> Any:
    try:
        scheme = parse_scheme(text)
        get_plan(scheme)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return scheme
