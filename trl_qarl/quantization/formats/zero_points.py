"""
Zero points, int8 `(N, K / group_size)`: the codes of a group span its weights and zero.

    scale = (max(w, 0) - min(w, 0)) / 15,  zero = round(clamp(-8 - min(w, 0) / scale, -8, 7))
    q = round(clamp(w / scale + zero, -8, 7)),  w' = scale * (q - zero)

for INT4, with 255, -128 and 127 for INT8. This is compressed-tensors' arithmetic bit for bit, in float32 (float64 for
float64 masters; a 16-bit master has the codes of its float32 copy). `zero` is computed from the unrounded scale, codes
from the scale rounded to its dtype. A group of zeros has zero point 0. If the span of a group overflows float32, where
compressed-tensors makes infinities, both ends are divided first.

A checkpoint (`pack-quantized`, `symmetric: false`) packs the zero points of several rows into a word of
`weight_zero_point`, int32 `(ceil(N / 8), K / group_size)` for INT4 and `(ceil(N / 4), ...)` for INT8; the last word is
filled up with 0.
"""

import torch

from .base import Format, KernelChoice, Operand
from .int4_packed import HalfBytes, integer_kernels
from .int8 import Words


class ZeroPoints(Format):
    """Mixin for zero points of as many bits as the codes, to be listed before the class that stores these."""

    operands = (Operand("zero_point", torch.int8, per_group=True),)
    checkpoint_names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    experts_in_transformers = False

    def choose_scales(self, groups, scheme):
        grid = scheme.grid
        lowest, highest = groups.amin(dim=-1).clamp_(max=0), groups.amax(dim=-1).clamp_(min=0)
        step = (highest - lowest) / grid.scale_divisor
        step = torch.where(step.isinf(), highest / grid.scale_divisor - lowest / grid.scale_divisor, step)
        qmin, qmax = grid.quant_range
        # A group of zeros gives 0 / 0.
        return step, (qmin - lowest / step).clamp_(qmin, qmax).round_().nan_to_num_(0.0).to(torch.int8)

    def quotients(self, groups, scale, *operands):
        (zero_point,) = operands
        return super().quotients(groups, scale).add_(zero_point.unsqueeze(-1))

    def multiply_by_scales(self, groups, scale, *operands):
        (zero_point,) = operands
        super().multiply_by_scales(groups.sub_(zero_point.unsqueeze(-1)), scale)

    def to_checkpoint(self, qdata, scale, *operands):
        # Imported here, because it takes seconds.
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        words = pack_to_int32(*operands, self.num_bits, packed_dim=0)
        # `contiguous` would keep odd strides of a single row or column.
        words = words.clone(memory_format=torch.contiguous_format)
        return super().to_checkpoint(qdata, scale) | {"weight_zero_point": words}

    def from_checkpoint(self, tensors):
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        qdata, scale = super().from_checkpoint(tensors)
        return qdata, scale, unpack_from_int32(tensors["weight_zero_point"], self.num_bits, scale.shape, packed_dim=0)


class Int4ZeroPoints(ZeroPoints, HalfBytes):
    """INT4 weights with zero points, from -8 to 7."""

    def kernels(self, scheme, gpu):
        return integer_kernels(gpu)


class Int8ZeroPoints(ZeroPoints, Words):
    """INT8 weights with zero points, from -128 to 127."""

    def kernels(self, scheme, gpu):
        if gpu.capability == (9, 0):
            return KernelChoice(linear=("MacheteLinearKernel",))
        return KernelChoice(
            refusal="vLLM runs it with Humming (HummingLinearKernel) there, whose reload is untested",
            instead="'w4a16-asym' or 'w8a16'",
        )
