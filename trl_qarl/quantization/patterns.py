"""Which layers a pattern of names stands for. Needs no torch."""

from collections.abc import Callable, Sequence
from typing import Any


__all__ = ["covers"]


def covers(fits: Callable[[str], Any], name: str, parts: Sequence[Sequence[str]], said: str) -> bool:
    """
    Return whether a pattern names a layer: by its name, or by those of all its parts.

    Args:
        fits (`Callable`):
            Whether the pattern fits a name.
        name (`str`):
            Name of the layer.
        parts (`Sequence[Sequence[str]]`):
            Names of its parts, in one or more ways.
        said (`str`):
            The pattern, as an error calls it.

    Raises:
        ValueError: if it fits some of the parts.
    """
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
