"""
INT8 codes with a zero point for each group: `qdata` as in `int8_packed`, zero points int8 `(N, K / group_size)`, from -128 to 127.

A weight is `scale * (code - zero point)`. A checkpoint (`pack-quantized`, `symmetric: false`) has the zero points of four rows in a word,
plus 128, the first in the lowest bits: `weight_zero_point`, int32 `(ceil(N / 4), K / group_size)`; what fills the last word is 0.
"""

import torch
import torch.nn.functional as F
from typing_extensions import override

from .base import KernelChoice
from .int8_packed import Words
from .zero_points import ZeroPoints, turned


__all__ = ["Int8ZeroPoints"]


class Int8ZeroPoints(ZeroPoints, Words):
    """INT8 weights with zero points."""

    @override
    def pack_zero_points(self, zero_point):
        # Adding 128 to a two's complement byte flips its top bit.
        rows = F.pad(zero_point.view(torch.uint8) ^ 0x80, (0, 0, 0, -len(zero_point) % 4))
        return turned(turned(rows).view(torch.int32))

    @override
    def unpack_zero_points(self, words, num_rows):
        rows = turned(turned(words).view(torch.uint8))[:num_rows]
        return (rows ^ 0x80).view(torch.int8)

    @override
    def kernels(self, scheme, gpu):
        if gpu.capability == (9, 0):
            return KernelChoice(linear=("MacheteLinearKernel",))
        return KernelChoice(
            refusal="vLLM runs it with Humming (HummingLinearKernel) there, whose reload has not been rehearsed",
            instead="'w4a16-asym' or 'w8a16'",
        )
