"""
INT4 codes with a zero point for each group: `qdata` as in `int4_packed`, zero points int8 `(N, K / group_size)`, from -8 to 7.

A weight is `scale * (code - zero point)`. A checkpoint (`pack-quantized`, `symmetric: false`) has the zero points of eight rows in a word,
plus 8, the first in the lowest bits: `weight_zero_point`, int32 `(ceil(N / 8), K / group_size)`; what fills the last word is 0.
"""

import torch
import torch.nn.functional as F
from typing_extensions import override

from .int4_packed import HalfBytes, integer_kernels
from .zero_points import ZeroPoints, turned


__all__ = ["Int4ZeroPoints"]


class Int4ZeroPoints(ZeroPoints, HalfBytes):
    """INT4 weights with zero points."""

    @override
    def pack_zero_points(self, zero_point):
        columns = F.pad(zero_point, (0, 0, 0, -len(zero_point) % 8), value=-8).t().contiguous()
        return turned(self.pack(columns))

    @override
    def unpack_zero_points(self, words, num_rows):
        zero_point = self.unpack(turned(words), torch.float32).t()[:num_rows].to(torch.int8)
        return zero_point.clone(memory_format=torch.contiguous_format)

    @override
    def kernels(self, scheme, gpu):
        return integer_kernels(gpu)
