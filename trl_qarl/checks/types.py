"""Checks the types of a configuration's values, before anything else uses them."""

import math
from collections.abc import Iterator
from inspect import formatannotation
from numbers import Integral, Real
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..options import own_options


def check_types(config: Any, inherited: type) -> Iterator[str]:
    """
    Yield a problem for each value of `config` that its field's annotation does not allow. Fields of `inherited`, a
    base class that checks them itself, are skipped unless the class of `config` redefines their annotation.

    Integers and floats may come from NumPy. NaN is never allowed, and text may stand for a list with one element.
    """
    hints = get_type_hints(type(config))
    for name in own_options(type(config), inherited):
        hint = hints[name]
        allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        value = getattr(config, name)
        if not any(_fits(value, hint) for hint in allowed):
            yield f"{name}={value!r} is of type {type(value).__name__}, and must be {formatannotation(hint)}."


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is list:
        return (isinstance(value, str) and arguments == (str,)) or (
            isinstance(value, list | tuple) and all(_fits(element, arguments[0]) for element in value)
        )
    if origin is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if origin is float:
        return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    return isinstance(value, origin)
