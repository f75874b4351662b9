"""Ends a command on a wrong configuration with one line instead of a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


__all__ = ["EXIT_PUSH_FAILED", "check_folder", "configuration_errors"]

# Everything is done and saved but for the upload to the Hub.
EXIT_PUSH_FAILED = 3


@contextmanager
def configuration_errors() -> Iterator[None]:
    """Turn a `ValueError`, `OSError` or `NotImplementedError` into its message on stderr and exit code 2. Wrap only
    what reads a configuration: an unexpected error elsewhere keeps its traceback."""
    try:
        yield
    except BrokenPipeError:
        # The reader of the output has gone; `trl_qarl.cli` ends the command.
        raise
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"trl-qarl: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def check_folder(model: str) -> None:
    """Raise `ValueError` for a path that leads to no folder: the Hub's client would call it a malformed name."""
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise ValueError(f"{model} is not a folder.")
