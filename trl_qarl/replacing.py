"""Replaces attributes of upstream modules and objects that have no other point of injection."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


_MISSING = object()


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """
    While open, give `owner`, a module or an instance, these `attributes`. Afterwards each attribute that was its own
    is back, and one that it had from its class, or not at all, is gone.
    """
    own = {name: vars(owner).get(name, _MISSING) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
