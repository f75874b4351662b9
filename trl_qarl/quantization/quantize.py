r"""
Quantization of plain tensors. [`quantize_weight`] is the one definition of a low-bit weight's numbers, for forward
pass, weight sync, checkpoint and export. Its rules are in the files of [`trl_qarl.quantization.formats`].

Activations are quantized dynamically with one scale per token, as in vLLM rather than compressed-tensors:
`scale = amax / 127` for INT8 and `max(amax / 448, 1 / (448 * 512))` for FP8. Codes are rounded from

| | CPU | CUDA |
|---|---|---|
| INT8 | `x * (1 / scale)` | `x * (127 / amax)` |
| FP8 | `x * (1 / scale)` | `x / scale` |

in float32, like vLLM's kernels (`QuantFP8.forward_native`, `csrc/cpu/dnnl_kernels.cpp`, `csrc/quantization/w8a8`).
With bf16 activations the quotient often lies half way between two codes, so an additional rounding changes the code.
"""

import torch

from .formats.e4m3 import as_halves
from .formats.registry import format_of
from .schemes import E4M3_CODES, INT8_CODES, QuantScheme


BLOCK_OF_WEIGHTS = {"cpu": 2**18}
"""Weights per block of quantization by type of device: a CPU's fit its cache. Other devices take 2**24."""

SMALLEST_E4M3_SCALE = 1.0 / (448.0 * 512.0)
"""Smallest scale of E4M3 activations in vLLM."""


@torch.no_grad()
def quantize_weight(
    weight: torch.Tensor,
    scheme: QuantScheme,
    scale_dtype: torch.dtype,
    global_scale: float | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """
    Quantize a master weight `(N, K)` of any floating dtype, without rounding it first. `scale_dtype` is the dtype in
    which the engine runs the model: scales are rounded to it before codes are computed, unless the scheme fixes their
    dtype. `global_scale` divides the scales of a format with global scales; by default it is chosen for `weight`.
    `scale` holds scales to use instead of those that the scheme's rule chooses, of the shape of the result's.

    Return the tensors of the scheme's format, without gradients: `qdata`, `scale`, `(N, K / group_size)` or `(N, 1)`,
    and the format's operands. `ValueError` is raised if no group size divides `K`, if the codes of a row do not fill
    whole words of the checkpoint, or if weights have outgrown `global_scale`.
    """
    form = format_of(scheme.container)
    if global_scale is None:
        global_scale = form.choose_global_scale(weight)
    # In blocks of rows, because intermediate results are several times as large as the weight.
    size = BLOCK_OF_WEIGHTS.get(weight.device.type, 2**24)
    size = max(1, size // max(1, weight.shape[1]))
    blocks = weight.split(size)
    scales = [None] * len(blocks) if scale is None else scale.split(size)
    # Codes are packed along rows, and quotients would inherit the strides of a transposed or sliced master.
    quantized = [
        form.quantize(block.contiguous(), scheme, scale_dtype, global_scale, own)
        for block, own in zip(blocks, scales, strict=True)
    ]
    if len(quantized) == 1:
        return quantized[0]
    # Autocast does not take FP8 codes.
    with torch.autocast(weight.device.type, enabled=False):
        return tuple(torch.cat(parts) for parts in zip(*quantized, strict=True))


def quantize_activation(x: torch.Tensor, scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations `(M, K)` of any floating dtype per token for a scheme with low-bit activations, like vLLM.
    Return contiguous codes `(M, K)` in int8 or float8_e4m3fn, and float32 scales `(M, 1)`. A token of zeros or
    denormal numbers gets zero codes."""
    assert scheme.activation is not None
    if scheme.activation.type == "float":
        scale = (x.abs().amax(dim=-1, keepdim=True).float() / 448.0).clamp_(min=SMALLEST_E4M3_SCALE)
        scaled = x.float() / scale if x.is_cuda else x.float() * scale.reciprocal()
        return scaled.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).contiguous(), scale
    # Below the smallest normal number the reciprocal would overflow.
    amax = x.abs().amax(dim=-1, keepdim=True).float()
    amax = torch.where(amax / 127.0 < torch.finfo(torch.float32).tiny, 127.0, amax)
    scale = amax / 127.0
    codes = (x.float() * (127.0 / amax if x.is_cuda else scale.reciprocal())).round_().to(torch.int8)
    return codes.contiguous(), scale


def dequantize_activation(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return activations `(M, K)` in `dtype`, as [`~trl_qarl.quantization.formats.base.Format.dequantize`] does."""
    if codes.device.type == "cpu" and codes.dtype is torch.float8_e4m3fn and dtype.itemsize <= 4:
        # Faster than a table, which evicts other data from the caches. The scale of a row with NaN is NaN as well.
        return as_halves(codes).float().mul_(scale * 256.0).to(dtype)
    container = INT8_CODES if codes.dtype is torch.int8 else E4M3_CODES
    return format_of(container).dequantize(dtype, codes, scale)
