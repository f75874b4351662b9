"""
Patterns of layer names. Needs no torch.

A pattern is the whole name of a layer, `"re:"` and an expression over whole names, or `"_default"` for all that no
other fits.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


__all__ = ["DEFAULT", "check_pattern", "covered_names", "covers", "fits", "pattern_of"]

DEFAULT = "_default"
_EXPRESSION = "re:"


def check_pattern(pattern: Any, option: str) -> None:
    """Raise `ValueError`, naming the option that has it, unless `pattern` is one."""
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(
            f"{option}: {pattern!r} is not a pattern. Give names of layers, 're:' and an expression, or '_default'."
        )
    if pattern.startswith(_EXPRESSION):
        try:
            re.compile(pattern[len(_EXPRESSION) :])
        except re.error as error:
            raise ValueError(f"{option}: {pattern!r} holds no regular expression ({error}).") from error


def fits(pattern: str) -> Callable[[str], Any]:
    """Return what says of a name whether `pattern` stands for it."""
    expression = pattern[len(_EXPRESSION) :] if pattern.startswith(_EXPRESSION) else re.escape(pattern)
    return re.compile(expression).fullmatch


def pattern_of(patterns: Iterable[str], name: str, parts: Sequence[Sequence[str]] = ()) -> str | None:
    """Return which of `patterns`, in their order, counts for a layer: its name, then the first expression, then
    `"_default"`; `None` if none does. `parts` are names of its parts, in one or more ways."""
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
    """Return which of `names`, which an error calls `of`, a pattern of `option` covers; all for `"_default"`. `parts`
    has the names of the parts of layers, where they have any, in one or more ways. `ValueError` is raised if it covers
    none of them, or some of the parts of one."""
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
    """Return whether a pattern, which an error calls `said`, names a layer: by its name, or by those of all its parts,
    in one or more ways. `ValueError` is raised if it fits some of the parts."""
    if fits(name):
        return True
    fitting = [[part for part in way if fits(part)] for way in parts]
    if any(found and len(found) == len(way) for found, way in zip(fitting, parts, strict=True)):
        return True
    some = next((found for found in fitting if found), None)
    if some:
        raise ValueError(
            f"{said} fits {some[0]!r}, a part of {name!r}, and not all of it: the experts of a layer are quantized as one, gate, up and "
            f"down projection alike. Name them as a whole, such as {name!r}."
        )
    return False
