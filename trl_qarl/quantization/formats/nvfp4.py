"""
FP4 codes with scales in two parts: `qdata` as in `mxfp4`, scales float8_e4m3fn `(N, K / 16)`, all divided by one power
of two `G` for all of a matrix, or of several that the engine holds as one:

    s = round_e4m3(G * amax(|w|) / 6),  q = round(clamp(w / (s / G), -6, 6)),  w' = (s / G) * q

which is compressed-tensors' arithmetic with this `G` for its 2688 / amax of the matrix; a scale that comes out as zero
is 0.125. `G` is chosen once, such that weights can grow to four times the largest; larger ones are refused.

`global_scale` holds `G` for each row, float32 `(N, 1)`. A checkpoint (`nvfp4-pack-quantized`) has it once, as
`weight_global_scale`, float32 `(1,)`, and codes and scales as they are.
"""

import math

import torch

from .base import KernelChoice, Operand
from .mxfp4 import Mxfp4


__all__ = ["Nvfp4"]


class Nvfp4(Mxfp4):
    """FP4 weights in groups of 16 that meet 16-bit activations."""

    operands = (Operand("global_scale", torch.float32, per_group=False),)
    checkpoint_names = ("weight_packed", "weight_scale", "weight_global_scale")
    gguf_type = None

    def choose_global_scale(self, weight):
        amax = weight.abs().amax().float().item()
        exponent = math.floor(math.log2(2688.0 / amax)) - 2 if amax > 0 else 0
        # Scales of 2^-9 to 448 over it are numbers in bf16.
        return 2.0 ** max(-100, min(exponent, 100))

    def choose_scales(self, groups, scheme, global_scale=None):
        scale = global_scale * (groups.abs().amax(dim=-1) / 6.0)
        if scale.numel() and (largest := scale.max().item()) > 448.0:
            raise ValueError(
                f"Weights have grown to {largest / 448.0 * 2688.0 / global_scale:.3g}, and NVFP4's scales over the global scale {global_scale:g} end at "
                f"{2688.0 / global_scale:.3g}: it was chosen for four times the largest weight at the start. Lower `learning_rate`, or start "
                "a new run from a checkpoint's masters, which chooses it anew."
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
        # On Hopper vLLM takes Humming from 0.32 on, on 10.0 a kernel of FlashInfer. Both repack only on a GPU.
        return KernelChoice(linear=("MarlinNvFp4LinearKernel",), backends={"nvfp4_w4a16": "marlin"})
