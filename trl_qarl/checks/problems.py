"""[`Problems`]: one error for everything that is wrong, and the form of options in messages."""

from collections.abc import Iterable
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


def quote_options(config: Any, *names: str) -> str:
    """Return options in the form of messages: `name=value, ...`."""
    return ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
