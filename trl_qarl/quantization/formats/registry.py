"""The format of each container."""

from ..schemes import Container
from .base import Format
from .e4m3 import Fp8
from .fp4 import Mxfp4, Nvfp4
from .int4_packed import Int4Packed
from .int8 import Int8, Int8Packed


FORMATS: dict[str, Format] = {
    "int4-packed": Int4Packed(),
    "int8": Int8(),
    "int8-packed": Int8Packed(),
    "mxfp4": Mxfp4(),
    "nvfp4": Nvfp4(),
    "e4m3": Fp8(),
}
"""Formats by the names of their containers."""

CHECKPOINT_NAMES = tuple(dict.fromkeys(name for form in FORMATS.values() for name in form.checkpoint_names))
"""Names of the tensors of a low-bit weight in a checkpoint, without the layer's prefix."""


def format_of(container: Container) -> Format:
    """Return the format of a container with low-bit codes."""
    return FORMATS[container.name]
