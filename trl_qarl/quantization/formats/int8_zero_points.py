"""
INT8 codes with a zero point for each group: `qdata` as in `int8_packed`, zero points int8 `(N, K / group_size)`, from -128 to 127.

A weight is `scale * (code - zero point)`. A checkpoint (`pack-quantized`, `symmetric: false`) has the zero points of four rows in a word,
plus 128, the first in the lowest bits: `weight_zero_point`, int32 `(ceil(N / 4), K / group_size)`; what fills the last word is 0.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from . import int8_packed
from .int8_packed import count_flips, in_features, pack, unpack


__all__ = ["count_flips", "from_checkpoint", "in_features", "pack", "to_checkpoint", "unpack"]


def to_checkpoint(qdata: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name and lay out the tensors as a checkpoint does."""
    # Adding 128 to a two's complement byte flips its top bit.
    rows = F.pad(zero_point.view(torch.uint8) ^ 0x80, (0, 0, 0, -len(zero_point) % 4))
    words = _turned(_turned(rows).view(torch.int32))
    return int8_packed.to_checkpoint(qdata, scale) | {"weight_zero_point": words}


def from_checkpoint(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `qdata`, `scale` and zero points of a layer's tensors."""
    qdata, scale = int8_packed.from_checkpoint(tensors)
    rows = _turned(_turned(tensors["weight_zero_point"]).view(torch.uint8))[: len(qdata)]
    return qdata, scale, (rows ^ 0x80).view(torch.int8)


def _turned(matrix: torch.Tensor) -> torch.Tensor:
    # Of a single row or column `contiguous` would keep odd strides.
    return matrix.t().clone(memory_format=torch.contiguous_format)
