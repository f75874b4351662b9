"""The file of each container."""

from types import ModuleType

from ..schemes import Container
from . import e4m3, int4_packed, int4_zero_points, int8, int8_packed, int8_zero_points, mxfp4, nvfp4


__all__ = ["format_of"]

_FORMATS = {
    "int4-packed": int4_packed,
    "int4-zero-points": int4_zero_points,
    "int8": int8,
    "int8-packed": int8_packed,
    "int8-zero-points": int8_zero_points,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "e4m3": e4m3,
}


def format_of(container: Container) -> ModuleType:
    """Return the functions of a container with low-bit codes."""
    return _FORMATS[container.name]
