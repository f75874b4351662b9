"""
FP4 codes: `qdata` is uint8 `(N, K / 2)`, two E2M1 codes per byte, the first in the lower half. A code is a sign and
the index of a magnitude among 0, 0.5, 1, 1.5, 2, 3, 4, 6.

*MXFP4* has powers of two as scales, one for 32 weights:

    scale = 2^(floor(log2(amax(|w|))) - 2), twice as large where amax is 1.75 times a power of two or more
    q = round(clamp(w / scale, -6, 6)) to the nearest magnitude, ties to the even code

in float32, as in compressed-tensors and in OCP's specification with rounded scales; division and product are exact.
The scale of zeros is 2^-127, the smallest. From 1.75 * 2^127 on, where compressed-tensors makes infinities, scales are
2^125, the largest. They are stored as E8M0, uint8 `(N, K / 32)`: the power `e` of 2^(e - 127). A checkpoint
(`mxfp4-pack-quantized`) has the same bytes.

*NVFP4* has scales in two parts: float8_e4m3fn `(N, K / 16)`, divided by one power of two `G` for each matrix of the
engine, which may hold several layers:

    s = round_e4m3(G * amax(|w|) / 6),  q = round(clamp(w / (s / G), -6, 6)),  w' = (s / G) * q

This is compressed-tensors' arithmetic with `G` in place of 2688 / amax of the matrix; a scale that comes out as zero
is 0.125. `G` is chosen once, so that weights can grow to four times the largest; larger weights are refused.
`global_scale` holds `G` for each row, float32 `(N, 1)`. A checkpoint (`nvfp4-pack-quantized`) has it once, as
`weight_global_scale`, float32 `(1,)`, and the same codes and scales.
"""

import math

import torch

from .base import Format, KernelChoice, Tensors, in_groups
from .int4_packed import look_up


MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4(Format):
    """FP4 weights in groups of 32 with 16-bit activations."""

    num_bits = 4
    checkpoint_names = ("weight_packed", "weight_scale")
    gguf_type = "MXFP4"
    refusal_of_experts = "reading such a checkpoint is untested, except in the form in which gpt-oss is released"

    def quantize(self, weight, scheme, scale_dtype, global_scale, scale):
        groups = in_groups(weight.float(), scheme)
        is_chosen = scale is None
        scale, *operands = self.choose_parts(groups, global_scale) if is_chosen else (scale,)
        codes = groups / self.scale_values(torch.float32, scale, *operands).unsqueeze(-1)
        if is_chosen:
            # Like compressed-tensors, which multiplies by the sign. With scales of a checkpoint, -0 is its own code.
            codes.masked_fill_(codes == 0, 0.0)
        return self.pack(codes.view(weight.shape)), scale, *operands

    def choose_parts(self, groups: torch.Tensor, global_scale: float | None) -> Tensors:
        """Return the scales of float32 `groups`, `(N, groups, group_size)`, and the operands."""
        # The exponent of `amax`, and one more from 1.75 on: a quarter carries over into it.
        amax = groups.abs().amax(dim=-1)
        exponent = (amax.view(torch.int32) + (1 << 21)) >> 23
        # 255 is NaN.
        return ((exponent - 2).clamp_(0, 252).to(torch.uint8).masked_fill_(~amax.isfinite(), 255),)

    def scale_values(self, dtype, scale, *operands):
        return scale.view(torch.float8_e8m0fnu).to(dtype)

    def pack(self, codes):
        """Round float32 quotients `(N, K)` of weight and scale to the nearest E2M1 code, a tie to the even one."""
        size = codes.abs()
        bits = size.view(torch.int32)
        # From 1 on, the third magnitude, exponent and first bit of the mantissa count magnitudes; below, magnitudes
        # are halves.
        rounded = (bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22
        one = 127 << 1
        index = torch.where(rounded < one, size.mul_(2).round_().int(), (rounded - (one - 2)).clamp_(max=7))
        nibbles = (index + 8 * codes.signbit()).to(torch.uint8).view(codes.shape[0], codes.shape[1] // 2, 2)
        return nibbles[..., 0] | (nibbles[..., 1] << 4)

    def unpack(self, qdata, dtype):
        return look_up(qdata, dtype, (*MAGNITUDES, *(-size for size in MAGNITUDES)))

    def count_flips(self, before, after):
        changed, either = ((before ^ after), (before | after))
        # 0 and -0 are one number, and a master may cross it.
        halves = ((changed & (15 << shift) != 0) & (either & (7 << shift) != 0) for shift in (0, 4))
        return sum(half.count_nonzero() for half in halves)

    def kernels(self, scheme, gpu):
        # vLLM ignores the checkpoint's entry for activations, and its first choice on Blackwell rounds them to 4 bits.
        # On Hopper its first choice is Humming from 0.32 on.
        linear, experts = ("MarlinMxFp4LinearKernel",), ("MarlinExperts",)
        return KernelChoice(linear, experts, backends={"mxfp4": "marlin"}, experts_backend="marlin")


class Nvfp4(Mxfp4):
    """FP4 weights in groups of 16 with 16-bit activations."""

    checkpoint_names = ("weight_packed", "weight_scale", "weight_global_scale")
    gguf_type = None

    def choose_global_scale(self, weight):
        amax = weight.abs().amax().float().item()
        exponent = math.floor(math.log2(2688.0 / amax)) - 2 if 0 < amax < math.inf else 0
        # Scales of 2^-9 to 448 divided by it are numbers in bf16.
        return 2.0 ** max(-100, min(exponent, 100))

    def choose_parts(self, groups, global_scale):
        scale = global_scale * (groups.abs().amax(dim=-1) / 6.0)
        if scale.numel() and (largest := scale.max().item()) > 448.0:
            raise ValueError(
                f"Weights have grown to {largest / 448.0 * 2688.0 / global_scale:.3g}, and NVFP4 with the global scale {global_scale:g} represents at "
                f"most {2688.0 / global_scale:.3g}: the scale was chosen for four times the largest weight at the start. Lower "
                "`learning_rate`, or start a new run from a checkpoint's masters, which chooses a new scale."
            )
        scale = scale.to(torch.float8_e4m3fn)
        scale = torch.where(scale.view(torch.uint8) == 0, torch.full_like(scale, 0.125), scale)
        return scale, groups.new_full((len(groups), 1), global_scale)

    def scale_values(self, dtype, scale, *operands):
        (global_scale,) = operands
        return (scale.to(dtype) / global_scale).to(dtype)

    def to_checkpoint(self, qdata, scale, *operands):
        (global_scale,) = operands
        return super().to_checkpoint(qdata, scale) | {"weight_global_scale": global_scale[0].clone()}

    def from_checkpoint(self, tensors):
        qdata, scale = super().from_checkpoint(tensors)
        return qdata, scale, tensors["weight_global_scale"].expand(len(qdata)).unsqueeze(1).contiguous()

    def kernels(self, scheme, gpu):
        # vLLM would take Humming on Hopper (from 0.32 on) and FlashInfer on 10.0, which repack only on a GPU.
        return KernelChoice(linear=("MarlinNvFp4LinearKernel",), backends={"nvfp4_w4a16": "marlin"})
