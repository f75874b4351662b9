"""[`Problems`]: one error for everything that is wrong, how it is collected, and the form of options in messages."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Problems(ValueError):
    """Everything that is wrong, one text for each problem."""

    def __init__(self, problems: Iterable[str]):
        self.problems = [*problems]
        texts = self.problems
        if len(texts) > 1:
            texts = [f"{len(texts)} problems:", *(f"- {problem}" for problem in texts)]
        super().__init__("\n".join(texts))


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one `ValueError` that lists all `problems`, if there are any."""
    if problems := [*problems]:
        raise Problems(problems)


@contextmanager
def collect(problems: list[str]) -> Iterator[None]:
    """Add what a block raises as a `ValueError` to `problems`, and leave the block."""
    try:
        yield
    except ValueError as error:
        problems += error.problems if isinstance(error, Problems) else [str(error)]


def quote_options(config: Any, *names: str) -> str:
    """Return options in the form of messages: `name=value, ...`."""
    return ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
