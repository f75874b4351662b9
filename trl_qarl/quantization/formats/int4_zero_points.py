"""
INT4 codes with a zero point for each group: `qdata` as in `int4_packed`, zero points int8 `(N, K / group_size)`, from -8 to 7.

A weight is `scale * (code - zero point)`. A checkpoint (`pack-quantized`, `symmetric: false`) has the zero points of eight rows in a word,
plus 8, the first in the lowest bits: `weight_zero_point`, int32 `(ceil(N / 8), K / group_size)`; what fills the last word is 0.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from . import int4_packed
from .int4_packed import count_flips, in_features, pack, unpack


__all__ = ["count_flips", "from_checkpoint", "in_features", "pack", "packed_zero_points", "to_checkpoint", "unpack"]


def packed_zero_points(zero_point: torch.Tensor) -> torch.Tensor:
    """Words of zero points `(N, groups)`: int32 `(groups, ceil(N / 8))`, as vLLM's kernel for CPUs reads them."""
    return pack(F.pad(zero_point, (0, 0, 0, -len(zero_point) % 8), value=-8).t().contiguous())


def to_checkpoint(qdata: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name the tensors as a checkpoint does."""
    # Of a single group `contiguous` would keep odd strides.
    words = packed_zero_points(zero_point).t().clone(memory_format=torch.contiguous_format)
    return int4_packed.to_checkpoint(qdata, scale) | {"weight_zero_point": words}


def from_checkpoint(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `qdata`, `scale` and zero points of a layer's tensors."""
    words = tensors["weight_zero_point"].t().clone(memory_format=torch.contiguous_format)
    qdata, scale = int4_packed.from_checkpoint(tensors)
    zero_point = unpack(words, torch.float32).t()[: len(qdata)].to(torch.int8)
    return qdata, scale, zero_point.clone(memory_format=torch.contiguous_format)
