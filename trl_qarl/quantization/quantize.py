r"""
The one definition of a low-bit weight's numbers, on plain tensors: the forward pass, publication, checkpoint and
export all come to [`quantize_weight`]. The rules are in the files of [`trl_qarl.quantization.formats`].

Activations, dynamic, one scale per token, follow the engine (vLLM) rather than compressed-tensors:
`scale = amax / 127` for INT8 and `max(amax / 448, 1 / (448 * 512))` for FP8. Codes are rounded from

| | CPU | CUDA |
|---|---|---|
| INT8 | `x * (1 / scale)` | `x * (127 / amax)` |
| FP8 | `x * (1 / scale)` | `x / scale` |

in float32, as vLLM's kernels do (`QuantFP8.forward_native`, `csrc/cpu/dnnl_kernels.cpp`, `csrc/quantization/w8a8`). In
bf16 the quotient often lies half way between two codes, and one rounding more or less decides.
"""

import torch

from .formats.base import Format
from .formats.registry import format_of
from .schemes import E4M3_CODES, INT8_CODES, QuantScheme


__all__ = ["activation_form", "dequantize_activation", "e4m3_scale", "quantize_activation", "quantize_weight"]


BLOCK_OF_WEIGHTS = {"cpu": 2**18}
"""Weights that are quantized at once, by type of device: on a CPU as many as stay in its cache, elsewhere 2**24."""


@torch.no_grad()
def quantize_weight(
    weight: torch.Tensor, scheme: QuantScheme, scale_dtype: torch.dtype, global_scale: float | None = None
) -> tuple[torch.Tensor, ...]:
    """
    Quantize a master weight `(N, K)` of any floating dtype, from which codes are computed as it is, not from a rounded
    copy. `scale_dtype` is the dtype in which the engine runs the model: scales are rounded to it before codes are
    computed, unless the scheme has its own. `global_scale` is what the scales of a format with global scales are
    divided by, by default the one that fits `weight`.

    Return the tensors of the scheme's format, without gradients: `qdata`, `scale`, `(N, K / group_size)` or `(N, 1)`,
    and the format's operands. `ValueError` is raised if no group size divides `K`, if the codes of a row do not fill
    words of the checkpoint, or if weights have outgrown `global_scale`.
    """
    form = format_of(scheme.container)
    if global_scale is None:
        global_scale = form.choose_global_scale(weight)
    # Every row is quantized by itself. What is computed on the way is several times as large as the weight, such as
    # that of all experts.
    size = BLOCK_OF_WEIGHTS.get(weight.device.type, 2**24)
    blocks = weight.split(max(1, size // max(1, weight.shape[1])))
    # Quotients would inherit the strides of a transposed or sliced master, and codes are packed along rows.
    quantized = [form.quantize(block.contiguous(), scheme, scale_dtype, global_scale) for block in blocks]
    if len(quantized) == 1:
        return quantized[0]
    # Autocast does not take FP8 codes.
    with torch.autocast(weight.device.type, enabled=False):
        return tuple(torch.cat(parts) for parts in zip(*quantized, strict=True))


def quantize_activation(x: torch.Tensor, scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations `(M, K)` of any floating dtype per token, as vLLM does, by a scheme with low-bit
    activations: return contiguous codes `(M, K)` in int8 or float8_e4m3fn, and float32 scales `(M, 1)`. A token of
    zeros or denormal numbers gets zero codes."""
    assert scheme.activation is not None
    if scheme.activation.type == "float":
        scale = e4m3_scale(x)
        scaled = x.float() / scale if x.is_cuda else x.float() * scale.reciprocal()
        return scaled.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).contiguous(), scale
    # Below the smallest normal number the reciprocal would overflow.
    amax = x.abs().amax(dim=-1, keepdim=True).float()
    amax = torch.where(amax / 127.0 < torch.finfo(torch.float32).tiny, 127.0, amax)
    scale = amax / 127.0
    codes = (x.float() * (127.0 / amax if x.is_cuda else scale.reciprocal())).round_().to(torch.int8)
    return codes.contiguous(), scale


def e4m3_scale(x: torch.Tensor) -> torch.Tensor:
    """Return the float32 scales `(M, 1)` of E4M3 activations `(M, K)`, one for each token, as vLLM chooses them."""
    return (x.abs().amax(dim=-1, keepdim=True).float() / 448.0).clamp_(min=1.0 / (448.0 * 512.0))


def dequantize_activation(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return activations `(M, K)` in `dtype`: the exact product of scale and code, rounded once."""
    return activation_form(codes).dequantize(dtype, codes, scale)


def activation_form(codes: torch.Tensor) -> Format:
    """Return the format of codes of activations."""
    return format_of(INT8_CODES if codes.dtype is torch.int8 else E4M3_CODES)
