"""Ends a command on an invalid configuration with one line instead of a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


# Exit code if everything is done and saved except for the upload to the Hub.
EXIT_PUSH_FAILED = 3


@contextmanager
def configuration_errors() -> Iterator[None]:
    """Turn a `ValueError`, `OSError` or `NotImplementedError` into its message on stderr and exit code 2. Use it only
    around code that reads a configuration, so that unexpected errors elsewhere keep their traceback."""
    try:
        yield
    except BrokenPipeError:
        # The reader of the output has gone; `trl_qarl.cli` handles this.
        raise
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"trl-qarl: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def check_folder(model: str) -> None:
    """Raise `ValueError` for a path without a folder, which the Hub's client would call a malformed name."""
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise ValueError(f"{model} is not a folder.")
