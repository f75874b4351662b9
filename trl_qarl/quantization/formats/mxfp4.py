"""
FP4 codes with powers of two as scales: `qdata` is uint8 `(N, K / 2)`, two E2M1 codes per byte, the first in the lower
half.

    scale = 2^(floor(log2(amax(|w|))) - 2), twice as large where amax is 1.75 times a power of two or more
    q = round(clamp(w / scale, -6, 6)) to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code

with one scale for 32 weights, as compressed-tensors and OCP's specification with rounded scales have it, in float32;
division and product are exact. The scale of zeros is 2^-127, the smallest. From 1.75 * 2^127 on, where
compressed-tensors makes infinities, scales are 2^125, the largest.

A code is its sign and the number of its magnitude among these. Scales are uint8 `(N, K / 32)`: the power `e` of
2^(e - 127), E8M0 in other words. A checkpoint (`mxfp4-pack-quantized`) has the same bytes.
"""

import torch

from .base import KernelChoice, in_groups
from .int4_packed import HalfBytes, look_up


__all__ = ["MAGNITUDES", "Mxfp4"]

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4(HalfBytes):
    """FP4 weights in groups of 32 that meet 16-bit activations."""

    checkpoint_names = ("weight_packed", "weight_scale")
    gguf_type = "MXFP4"
    refusal_of_experts = "no reader of such a checkpoint has been tried"

    def quantize(self, weight, scheme, scale_dtype, global_scale):
        groups = in_groups(weight.float(), scheme)
        scale, *operands = self.choose_scales(groups, scheme, global_scale)
        codes = groups / self.scale_values(torch.float32, scale, *operands).unsqueeze(-1)
        return self.pack(codes.view(weight.shape)), scale, *operands

    def choose_scales(self, groups, scheme, global_scale=None):
        # The exponent of `amax`, and one more from 1.75 on: a quarter carries over into it.
        exponent = (groups.abs().amax(dim=-1).view(torch.int32) + (1 << 21)) >> 23
        return ((exponent - 2).clamp_(0, 252).to(torch.uint8),)

    def scale_values(self, dtype, scale, *operands):
        return scale.view(torch.float8_e8m0fnu).to(dtype)

    def pack(self, codes):
        """Round float32 quotients `(N, K)` of weight and scale to the nearest E2M1 code, a tie to the even one."""
        size = codes.abs()
        bits = size.view(torch.int32)
        # From 1 on, exponent and first bit of the mantissa count magnitudes, of which 1 is the third; below, they are
        # halves.
        rounded = (bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22
        one = 127 << 1
        index = torch.where(rounded < one, size.mul_(2).round_().int(), (rounded - (one - 2)).clamp_(max=7))
        nibbles = (index + 8 * (codes < 0)).to(torch.uint8).view(codes.shape[0], codes.shape[1] // 2, 2)
        return nibbles[..., 0] | (nibbles[..., 1] << 4)

    def unpack(self, qdata, dtype):
        return look_up(qdata, dtype, (*MAGNITUDES, *(-size for size in MAGNITUDES)))

    def in_features(self, qdata):
        return 2 * qdata.shape[1]

    def to_checkpoint(self, qdata, scale, *operands):
        return {"weight_packed": qdata, "weight_scale": scale}

    def kernels(self, scheme, gpu):
        # vLLM does not look at what a checkpoint says of activations, and its first choice on Blackwell rounds them to
        # 4 bits. On Hopper it is Humming from 0.32 on.
        return KernelChoice(linear=("MarlinMxFp4LinearKernel",), backends={"mxfp4": "marlin"})
