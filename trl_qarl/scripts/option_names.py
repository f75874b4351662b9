"""Names of options on the command line: spelling with dashes or underscores, and typos."""

from argparse import ArgumentParser
from collections.abc import Iterable
from difflib import get_close_matches


def option_names(parser: ArgumentParser) -> set[str]:
    """Return the long options of a parser, with their dashes."""
    return {name for name in parser._option_string_actions if name.startswith("--")}


def spell(argv: list[str], known: Iterable[str]) -> list[str]:
    """Return `argv` with dashes and underscores in names of options exchanged if only that spelling is in `known`."""
    spellings = {name.replace("-", "_"): name for name in known}
    spellings |= {name: name for name in known}
    words = [word.partition("=") for word in argv]
    return [
        spellings.get(name, spellings.get(name.replace("-", "_"), name)) + rest + value for name, rest, value in words
    ]


def check_names(argv: list[str], known: Iterable[str]) -> None:
    """Raise `ValueError`, with the likely intended name, for the first option in `argv` that is neither one of `known`
    nor an abbreviation. argparse would first report missing options, and makes no suggestions."""
    for word in argv:
        name = word.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            matches = get_close_matches(name.replace("-", "_"), [option.replace("-", "_") for option in known], n=1)
            hint = f" Did you mean `--{matches[0][2:]}`?" if matches else ""
            raise ValueError(f"Unknown option `{name}`.{hint}")
