"""Names of options: both spellings, and slips."""

from argparse import ArgumentParser
from collections.abc import Iterable
from difflib import get_close_matches


__all__ = ["check_names", "option_names", "spell"]


def option_names(parser: ArgumentParser) -> set[str]:
    """Return the long options of a parser, with their dashes."""
    return {name for name in parser._option_string_actions if name.startswith("--")}


def spell(argv: list[str], known: Iterable[str]) -> list[str]:
    """Return `argv` with dashes in names of options for underscores, or the reverse, where only that is in `known`."""
    spellings = {name.replace("-", "_"): name for name in known}
    spellings |= {name: name for name in known}
    words = [word.partition("=") for word in argv]
    return [
        spellings.get(name, spellings.get(name.replace("-", "_"), name)) + rest + value for name, rest, value in words
    ]


def check_names(argv: list[str], known: Iterable[str]) -> None:
    """Raise `ValueError`, with what was probably meant, for the first option in `argv` that neither is nor begins one
    of `known`. argparse would first complain of what is missing, and knows no "did you mean"."""
    for word in argv:
        name = word.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            matches = get_close_matches(name.replace("-", "_"), [option.replace("-", "_") for option in known], n=1)
            hint = f" Did you mean `--{matches[0][2:]}`?" if matches else ""
            raise ValueError(f"Unknown option `{name}`.{hint}")
