"""
Patterns of layer names. Needs no torch.

A pattern is the whole name of a layer, `"re:"` and a regular expression over whole names, or `"_default"` for all
layers that no other pattern fits.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


DEFAULT = "_default"
_EXPRESSION = "re:"


def check_pattern(pattern: Any, option: str) -> None:
    """Raise `ValueError`, naming `option`, unless `pattern` is valid."""
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(
            f"{option}: {pattern!r} is not a pattern. Give names of layers, 're:' and an expression, or '_default'."
        )
    if pattern.startswith(_EXPRESSION):
        try:
            re.compile(pattern[len(_EXPRESSION) :])
        except re.error as error:
            raise ValueError(
                f"{option}: {pattern!r} is not a valid regular expression ({error}). Correct what follows 're:'."
            ) from error


def fits(pattern: str) -> Callable[[str], Any]:
    """Return a function that is true for the names that `pattern` matches."""
    expression = pattern[len(_EXPRESSION) :] if pattern.startswith(_EXPRESSION) else re.escape(pattern)
    return re.compile(expression).fullmatch


def pattern_of(patterns: Iterable[str], name: str, parts: Sequence[Sequence[str]] = ()) -> str | None:
    """Return the pattern that applies to a layer: its name, else the first expression in order, else `"_default"`;
    `None` without any. `parts` are alternative lists of the names of its parts."""
    patterns = list(patterns)
    ordered = sorted(patterns, key=lambda pattern: pattern.startswith(_EXPRESSION))
    matching = (p for p in ordered if p != DEFAULT and covers(fits(p), name, parts, f"scheme: pattern {p!r}"))
    return next(matching, DEFAULT if DEFAULT in patterns else None)


def covered_names(
    pattern: str,
    option: str,
    names: Sequence[str],
    of: str,
    parts: Mapping[str, Sequence[Sequence[str]]] | None = None,
) -> list[str]:
    """Return the `names` that a pattern of `option` covers; all for `"_default"`. `parts` has, for layers with parts,
    alternative lists of the parts' names. `ValueError` is raised if the pattern covers no name, or only some parts of
    a layer; its message calls the names `of`."""
    if pattern == DEFAULT:
        return list(names)
    said = f"{option}: pattern {pattern!r}"
    covered = [name for name in names if covers(fits(pattern), name, (parts or {}).get(name, ()), said)]
    if not covered:
        example = next(iter(names), "")
        raise ValueError(
            f"{said} matches none of the {len(names)} {of}. Give a whole name, such as {example!r}, or an expression over whole names, "
            f"such as 're:.*{example.rpartition('.')[2]}'."
        )
    return covered


def covers(fits: Callable[[str], Any], name: str, parts: Sequence[Sequence[str]], said: str) -> bool:
    """Return whether a pattern matches the name of a layer, or the names of all parts in one of the lists `parts`.
    `ValueError` is raised if it matches only some parts; the message calls the pattern `said`."""
    if fits(name):
        return True
    fitting = [[part for part in way if fits(part)] for way in parts]
    if any(found and len(found) == len(way) for found, way in zip(fitting, parts, strict=True)):
        return True
    some = next((found for found in fitting if found), None)
    if some:
        raise ValueError(
            f"{said} matches {some[0]!r}, but not all parts of {name!r}: all experts of a layer are quantized together, with gate, up "
            f"and down projection. Name them as a whole, such as {name!r}."
        )
    return False
