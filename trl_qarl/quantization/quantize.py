r"""
The one definition of a low-bit weight's numbers, on plain tensors.

[`~trl_qarl.quantization.tensors.LowBitTensor`] is the object that carries them.

Weights, symmetric, with one scale per output channel or per group of input features:

    scale = amax(|w|) / d,  q = round(clamp(w / scale, qmin, qmax)),  w' = scale * q

with `d` half the range of the grid: 1.5 for 2 bits (codes -2..1), 3.5 for 3 (codes -4..3), 7.5 for INT4 (codes -8..7),
127.5 for INT8 (codes -128..127) and 448 for FP8 E4M3. A scale that comes out as
zero (an all-zero group) is replaced by the machine epsilon of its dtype. This is compressed-tensors' arithmetic, bit for
bit (https://github.com/vllm-project/compressed-tensors, `calculate_qparams` and `quantize`), and the forward pass,
publication, checkpoint and export all come to [`quantize_weight`].

The rule above leaves the largest weight half a step from its code. A grid with *signed scales* puts it on the smallest one:

    scale = w_max / qmin,  w_max the element of largest magnitude *with its sign*

with `qmin` -2, -4 or -8, so that `w_max` is exactly this code and the scale has the opposite sign. Of `+a` and `-a` the
negative one counts, wherever it stands, and `+a` becomes the largest code (7 for INT4), a whole step off, as does what lies within
half a step of it. The arithmetic is float32 (float64 for such masters), so a 16-bit master has the codes of its float32
copy. Division by a power of two is exact: of a bf16 master with bf16 scales `w_max` is kept as it is, and the scales of 3 and 2
bits are 2 and 4 times those of 4, down to denormal numbers. Where rounding makes a scale smaller, codes are clamped.
The rule is that of llama.cpp's `Q4_0` (https://github.com/ggml-org/llama.cpp/pull/729), which takes the first of `+a` and `-a`.

`w4a8` differs in its scales, because vLLM turns the bf16 scales `s` of a checkpoint into `s = 8 c g` with `g` in FP8 E4M3 and
one `c = max(amax(s) / 448, 1 / (448 * 512))` per output channel, and multiplies by the weight `8 c round_e4m3(g * q)`
(`convert_bf16_scales_to_fp8` and CUTLASS' table of the products of a scale with each code). So `s` is chosen such that the
conversion returns it: `c` rounded to four significant bits, `g` to E4M3 with the largest at 56. Their product has eight
bits, as bf16 does. [`fp8_gemm_weight`] is what the engine multiplies by.

Activations, dynamic, one scale per token, follow the engine (vLLM) rather than compressed-tensors: `scale = amax / 127` for
INT8 and `max(amax / 448, 1 / (448 * 512))` for FP8. Codes are rounded from

| | CPU | CUDA |
|---|---|---|
| INT8 | `x * (1 / scale)` | `x * (127 / amax)` |
| FP8 | `x * (1 / scale)` | `x / scale` |

in float32, as vLLM's kernels do (`QuantFP8.forward_native`, `csrc/cpu/dnnl_kernels.cpp`, `csrc/quantization/w8a8`). In bf16 the
quotient often lies half way between two codes, and one rounding more or less decides.

Codes are stored as the scheme's container says ([`trl_qarl.quantization.formats`]).
"""

import torch

from .formats import int4_packed
from .formats.registry import format_of
from .schemes import Container, Grid, QuantScheme


__all__ = [
    "count_code_flips",
    "dequantize",
    "fp8_gemm_weight",
    "quantize_activation",
    "quantize_weight",
]


@torch.no_grad()
def quantize_weight(
    weight: torch.Tensor, scheme: QuantScheme, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Quantize a master weight.

    Args:
        weight (`torch.Tensor`):
            Master weight `(N, K)`, any floating dtype. Codes are computed from it as it is, not from a rounded copy.
        scheme ([`QuantScheme`]):
            Scheme to follow.
        scale_dtype (`torch.dtype`):
            Dtype in which the engine runs the model; scales are rounded to it before codes are computed, unless the
            scheme fixes its own scale dtype.

    Returns:
        `qdata`, the codes as the module docstring lays them out, and `scale`, `(N, K / group_size)` or `(N, 1)`.
        Neither carries a gradient.

    Raises:
        ValueError: if no group size divides `K`, or if the codes of a row do not fill words of the checkpoint.
    """
    grid = scheme.grid
    assert grid is not None
    out_features, in_features = weight.shape
    # Quotients would inherit the strides of a transposed or sliced master, and codes are packed along rows.
    weight = weight.contiguous()
    group_size = scheme.group_size_for(in_features) or in_features
    if scheme.scale_dtype is not None:
        scale_dtype = getattr(torch, scheme.scale_dtype)
        weight = weight.to(torch.promote_types(weight.dtype, scale_dtype))
    if grid.has_signed_scales:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    groups = weight.reshape(out_features, -1, group_size)
    scale = _largest(groups, grid) / grid.scale_divisor
    if scheme.has_fp8_scales:
        scale = _fp8_exact_scales(scale)
    scale = scale.to(scale_dtype)
    scale = torch.where(scale == 0, torch.finfo(scale_dtype).eps, scale)
    codes = (groups / scale.unsqueeze(-1)).clamp_(*grid.quant_range).view(out_features, in_features)
    if grid.type == "int":
        codes = codes.round_()
    return format_of(scheme.container).pack(codes), scale


def fp8_gemm_weight(qdata: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A `w4a8` weight as the engine's matrix product takes it: FP8 codes `(N, K)` and float32 scales `(N, 1)`."""
    channel_scale, group_scale = _fp8_scales(scale)
    codes = int4_packed.unpack(qdata, torch.float32)
    codes.view(*group_scale.shape, codes.shape[1] // group_scale.shape[1]).mul_(group_scale.unsqueeze(-1))
    return codes.to(torch.float8_e4m3fn), channel_scale


def dequantize(
    qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, container: Container | None = None
) -> torch.Tensor:
    """
    Dense weight or activations `(N, K)` in `dtype`: the exact product `scale * code`, rounded once to `dtype`.

    Without a `container`, `qdata` are codes of activations, one each.

    This rounding is what Marlin and Machete apply to INT4 weights before the matrix product.
    """
    # A wider scale must not be rounded before the product.
    product_dtype = scale.dtype if scale.dtype.itemsize > dtype.itemsize else dtype
    dense = qdata.to(product_dtype) if container is None else format_of(container).unpack(qdata, product_dtype)
    # The group size is spelled out: no rows would leave `-1` undetermined.
    dense.view(*scale.shape, dense.shape[1] // scale.shape[1]).mul_(scale.unsqueeze(-1))
    return dense.to(dtype)


def quantize_activation(x: torch.Tensor, scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Quantize activations per token, as vLLM does.

    Args:
        x (`torch.Tensor`):
            Activations `(M, K)`, any floating dtype.
        scheme ([`QuantScheme`]):
            A scheme with low-bit activations.

    Returns:
        Codes `(M, K)` in int8 or float8_e4m3fn and float32 scales `(M, 1)`. A token of zeros or denormal numbers gets zero
        codes.
    """
    assert scheme.activation is not None
    amax = x.abs().amax(dim=-1, keepdim=True).float()
    if scheme.activation.type == "float":
        scale = (amax / 448.0).clamp_(min=1.0 / (448.0 * 512.0))
        scaled = x.float() / scale if x.is_cuda else x.float() * scale.reciprocal()
        return scaled.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn), scale
    # Below the smallest normal number the reciprocal would overflow.
    amax = torch.where(amax / 127.0 < torch.finfo(torch.float32).tiny, 127.0, amax)
    scale = amax / 127.0
    return (x.float() * (127.0 / amax if x.is_cuda else scale.reciprocal())).round_().to(torch.int8), scale


def count_code_flips(before: torch.Tensor, after: torch.Tensor, container: Container) -> torch.Tensor:
    """Number of codes that differ between two `qdata`, as a 0-d int64 tensor on their device."""
    return format_of(container).count_flips(before, after)


def _largest(groups: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Largest magnitude of each group, with the sign of its element where `grid` has signed scales."""
    if not grid.has_signed_scales:
        return groups.abs().amax(dim=-1)
    # Not `argmax`: which of several it finds depends on the order of the weights. `aminmax` is several times slower on a CPU.
    lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
    return torch.where(highest > -lowest, highest, lowest)


def _fp8_scales(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's conversion of scales `(N, groups)`: `(N, 1)` channel scales, and `(N, groups)` E4M3 values; both float32."""
    scale = scale.float()
    channel_scale = (scale.amax(-1, keepdim=True) / 448.0).clamp(min=1.0 / (448.0 * 512.0))
    group_scale = (scale / channel_scale).to(torch.float8_e4m3fn).float() / 8.0
    return 8.0 * channel_scale, group_scale.to(torch.float8_e4m3fn).float()


def _fp8_exact_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales `(N, groups)` near `scale` that [`_fp8_scales`] takes apart without rounding, in channels it does not clamp."""
    scale = scale.float()
    amax = scale.amax(-1, keepdim=True)
    amax = torch.where(amax == 0, 1.0, amax)
    fraction, exponent = torch.frexp(amax / 448.0)
    channel_scale = 8.0 * torch.ldexp((fraction * 16.0).round(), exponent - 4)
    # From the smallest normal number on, E4M3 has four significant bits.
    group_scale = torch.where(scale == amax, 56.0, scale / channel_scale).clamp(2.0**-6, 56.0)
    return group_scale.to(torch.float8_e4m3fn).float() * channel_scale
