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

A grid with *zero points* (`w4a16-asym`) has its codes where the weights of a group are, which always holds zero:

    scale = (max(w, 0) - min(w, 0)) / 15,  zero = round(clamp(-8 - min(w, 0) / scale, -8, 7))
    q = round(clamp(w / scale + zero, -8, 7)),  w' = scale * (q - zero)

which is compressed-tensors' arithmetic bit for bit, in float32 (float64 for such masters; a 16-bit master has the codes of its float32
copy). `zero` follows from the scale before it is rounded to its dtype, codes from the rounded one. A group of zeros has zero point 0. Where
compressed-tensors makes infinities, of groups that span more than float32 holds, both ends are divided first.

`w4a8` differs in its scales, because vLLM turns the bf16 scales `s` of a checkpoint into `s = 8 c g` with `g` in FP8 E4M3 and
one `c = max(amax(s) / 448, 1 / (448 * 512))` per output channel, and multiplies by the weight `8 c round_e4m3(g * q)`
(`convert_bf16_scales_to_fp8` and CUTLASS' table of the products of a scale with each code). So `s` is chosen such that the
conversion returns it: `c` rounded to four significant bits, `g` to E4M3 with the largest at 56. Their product has eight
bits, as bf16 does. [`fp8_gemm_weight`] is what the engine multiplies by.

MXFP4 (`mxfp4a16`), FP4 E2M1 codes with one power of two for 32 weights:

    scale = 2^(floor(log2(amax(|w|))) - 2), twice as large where amax is 1.75 times a power of two or more
    q = round(clamp(w / scale, -6, 6)) to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code

as compressed-tensors and OCP's specification with rounded scales have it, in float32; division and product are exact. The scale of zeros is
2^-127, the smallest. From 1.75 * 2^127 on, where compressed-tensors makes infinities, scales are 2^125, the largest.

NVFP4 (`nvfp4a16`), the same codes with a scale for 16 weights in E4M3 over `G`, one power of two for all of a matrix, or of several that
the engine holds as one:

    s = round_e4m3(G * amax(|w|) / 6),  q = round(clamp(w / (s / G), -6, 6)),  w' = (s / G) * q

which is compressed-tensors' arithmetic with this `G` for its 2688 / amax of the matrix; a scale that comes out as zero is 0.125. `G` is
chosen once, such that weights can grow to four times the largest ([`choose_global_scale`]); larger ones are refused. As it is a power of two
code times scale over `G` is exact in bf16, and the squared error is that of 2688 / amax.

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

import math
from types import ModuleType

import torch

from .formats import e4m3, int4_packed, int8
from .formats.registry import format_of
from .schemes import E2M1, NVFP4, Container, Grid, QuantScheme


__all__ = [
    "activation_form",
    "choose_global_scale",
    "coarser",
    "count_code_flips",
    "dequantize",
    "e4m3_scale",
    "fp8_gemm_weight",
    "quantize_activation",
    "quantize_weight",
    "scale_values",
]


BLOCK_OF_WEIGHTS = 2**24
"""Weights that are quantized at once."""


@torch.no_grad()
def quantize_weight(
    weight: torch.Tensor, scheme: QuantScheme, scale_dtype: torch.dtype, global_scale: float | None = None
) -> tuple[torch.Tensor, ...]:
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
        global_scale (`float`, *optional*):
            What NVFP4's scales are divided by, which no other scheme has.

    Returns:
        `qdata`, the codes as the module docstring lays them out, and `scale`, `(N, K / group_size)` or `(N, 1)`; of grids with zero
        points these too, int8 of the shape of `scale`. None carries a gradient.

    Raises:
        ValueError: if no group size divides `K`, if the codes of a row do not fill words of the checkpoint, or if weights have
            outgrown `global_scale`.
    """
    # Every row is quantized by itself. What is computed on the way is several times as large as the weight, such as that of all experts.
    blocks = weight.split(max(1, BLOCK_OF_WEIGHTS // max(1, weight.shape[1])))
    quantized = [_quantize_rows(block, scheme, scale_dtype, global_scale) for block in blocks]
    if len(quantized) == 1:
        return quantized[0]
    # Autocast does not take FP8 codes.
    with torch.autocast(weight.device.type, enabled=False):
        return tuple(torch.cat(parts) for parts in zip(*quantized, strict=True))


def _quantize_rows(
    weight: torch.Tensor, scheme: QuantScheme, scale_dtype: torch.dtype, global_scale: float | None
) -> tuple[torch.Tensor, ...]:
    grid = scheme.grid
    assert grid is not None
    assert (global_scale is not None) == (scheme.container == NVFP4), (scheme.name, global_scale)
    out_features, in_features = weight.shape
    # Quotients would inherit the strides of a transposed or sliced master, and codes are packed along rows.
    weight = weight.contiguous()
    group_size = scheme.group_size_for(in_features) or in_features
    if grid == E2M1:
        groups = weight.float().view(out_features, in_features // group_size, group_size)
        amax = groups.abs().amax(dim=-1)
        scale = _powers_of_two(amax) if global_scale is None else _e4m3_scales(amax, global_scale)
        codes = groups / scale_values(scale, torch.float32, global_scale).unsqueeze(-1)
        return format_of(scheme.container).pack(codes.view(out_features, in_features)), scale
    if scheme.scale_dtype is not None:
        scale_dtype = getattr(torch, scheme.scale_dtype)
        weight = weight.to(torch.promote_types(weight.dtype, scale_dtype))
    if grid.has_signed_scales or grid.has_zero_points:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    # Written out, as of no rows, such as a process' part of a small matrix, `-1` would be undetermined.
    groups = weight.reshape(out_features, in_features // group_size, group_size)
    if grid.has_zero_points:
        scale, zero_point = _spans_and_zero_points(groups, grid)
    else:
        scale, zero_point = _largest(groups, grid) / grid.scale_divisor, None
    if scheme.has_fp8_scales:
        scale = _fp8_exact_scales(scale)
    scale = scale.to(scale_dtype)
    scale = torch.where(scale == 0, torch.finfo(scale_dtype).eps, scale)
    codes = groups / scale.unsqueeze(-1)
    if zero_point is not None:
        codes += zero_point.unsqueeze(-1)
    codes = codes.clamp_(*grid.quant_range).view(out_features, in_features)
    if grid.type == "int":
        codes = codes.round_()
    qdata = format_of(scheme.container).pack(codes)
    return (qdata, scale) if zero_point is None else (qdata, scale, zero_point.to(torch.int8))


def coarser(
    qdata: torch.Tensor, scale: torch.Tensor, scheme: QuantScheme, to: QuantScheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return codes and scales of the weight in fewer bits, made of its codes `(N, K)` alone: half a code for each bit less, rounded (a tie
    to the even code) and clamped, at twice the scale.

    Where [`quantize_weight`] rounds the master once, this rounds it twice, so the same weight is a step off where the first rounding
    has made a tie.

    Raises:
        ValueError: if the grid of `to` does not nest in that of `scheme`, or if `scale` cannot hold the larger scale.
    """
    ours, theirs = scheme.grid, to.grid
    if (
        not (ours and theirs and ours.has_signed_scales and theirs.has_signed_scales)
        or scheme.container != to.container
        or theirs.num_bits > ours.num_bits
    ):
        raise ValueError(f"The codes of {scheme.name!r} hold none of {to.name!r}, whose grid does not nest in theirs.")
    step = 2 ** (ours.num_bits - theirs.num_bits)
    larger = scale * step
    if not larger.isfinite().all():
        raise ValueError(
            f"{step} times the largest scale, {scale.abs().max().item():g}, is more than {scale.dtype} holds. Export the masters with "
            "scales in bfloat16."
        )
    form = format_of(scheme.container)
    codes = (form.unpack(qdata, torch.float32) / step).round_().clamp_(*theirs.quant_range)
    return form.pack(codes), larger


def fp8_gemm_weight(qdata: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A `w4a8` weight as the engine's matrix product takes it: FP8 codes `(N, K)` and float32 scales `(N, 1)`."""
    channel_scale, group_scale = _fp8_scales(scale)
    codes = int4_packed.unpack(qdata, torch.float32)
    codes.view(*group_scale.shape, codes.shape[1] // group_scale.shape[1]).mul_(group_scale.unsqueeze(-1))
    return codes.to(torch.float8_e4m3fn), channel_scale


def dequantize(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    container: Container | None = None,
    global_scale: float | None = None,
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Dense weight or activations `(N, K)` in `dtype`: the exact product `scale * (code - zero_point)`, rounded once to `dtype`.

    Without a `container`, `qdata` are codes of activations, one each.

    This rounding is what Marlin and Machete apply to INT4 weights before the matrix product.
    """
    # A wider scale must not be rounded before the product.
    product_dtype = scale.dtype if scale.dtype.itemsize > dtype.itemsize else dtype
    form = activation_form(qdata) if container is None else format_of(container)
    dense = form.unpack(qdata, product_dtype)
    if scale.dtype.itemsize == 1:
        scale = scale_values(scale, product_dtype, global_scale)
    # The group size is spelled out: no rows would leave `-1` undetermined.
    groups = dense.view(*scale.shape, dense.shape[1] // scale.shape[1])
    if zero_point is not None:
        groups.sub_(zero_point.unsqueeze(-1))
    groups.mul_(scale.unsqueeze(-1))
    return dense.to(dtype)


def scale_values(
    scale: torch.Tensor, dtype: torch.dtype = torch.float32, global_scale: float | None = None
) -> torch.Tensor:
    """Scales of a low-bit weight as numbers in `dtype`, over `global_scale`; those that are stored as bytes are powers of two."""
    values = (scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale).to(dtype)
    return values if global_scale is None else values / global_scale


def choose_global_scale(weight: torch.Tensor) -> float:
    """Return the power of two under NVFP4's scales for a matrix: with it, weights of four times its largest magnitude have scales."""
    amax = weight.abs().amax().float().item()
    exponent = math.floor(math.log2(2688.0 / amax)) - 2 if amax > 0 else 0
    # Scales of 2^-9 to 448 over it are numbers in bf16.
    return 2.0 ** max(-100, min(exponent, 100))


def quantize_activation(x: torch.Tensor, scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Quantize activations per token, as vLLM does.

    Args:
        x (`torch.Tensor`):
            Activations `(M, K)`, any floating dtype.
        scheme ([`QuantScheme`]):
            A scheme with low-bit activations.

    Returns:
        Codes `(M, K)` in int8 or float8_e4m3fn, contiguous also where `x` is a transposed view, and float32 scales
        `(M, 1)`. A token of zeros or denormal numbers gets zero codes.
    """
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


def activation_form(codes: torch.Tensor) -> ModuleType:
    """Return the module of [`trl_qarl.quantization.formats`] that unpacks codes of activations."""
    return int8 if codes.dtype is torch.int8 else e4m3


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


def _spans_and_zero_points(groups: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps between the codes of each group, before they are rounded, and the codes of zero, in the dtype of `groups`."""
    lowest, highest = groups.amin(dim=-1).clamp_(max=0), groups.amax(dim=-1).clamp_(min=0)
    step = (highest - lowest) / grid.scale_divisor
    step = torch.where(step.isinf(), highest / grid.scale_divisor - lowest / grid.scale_divisor, step)
    qmin, qmax = grid.quant_range
    # Of a group of zeros 0 / 0.
    return step, (qmin - lowest / step).clamp_(qmin, qmax).round_().nan_to_num_(0.0)


def _powers_of_two(amax: torch.Tensor) -> torch.Tensor:
    """Scales of MXFP4 for groups with the largest magnitudes `amax`, float32: uint8 of their shape."""
    # The exponent of `amax`, and one more from 1.75 on: a quarter carries over into it.
    exponent = (amax.view(torch.int32) + (1 << 21)) >> 23
    return (exponent - 2).clamp_(0, 252).to(torch.uint8)


def _e4m3_scales(amax: torch.Tensor, global_scale: float) -> torch.Tensor:
    """Scales of NVFP4, times `global_scale`, for groups with the largest magnitudes `amax`, float32: float8_e4m3fn of their shape."""
    scale = global_scale * (amax / 6.0)
    if scale.numel() and (largest := scale.max().item()) > 448.0:
        raise ValueError(
            f"Weights have grown to {largest / 448.0 * 2688.0 / global_scale:.3g}, and NVFP4's scales over the global scale {global_scale:g} end at "
            f"{2688.0 / global_scale:.3g}: it was chosen for four times the largest weight at the start. Lower `learning_rate`, or start "
            "a new run from a checkpoint's masters, which chooses it anew."
        )
    scale = scale.to(torch.float8_e4m3fn)
    return torch.where(scale.view(torch.uint8) == 0, torch.full_like(scale, 0.125), scale)


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
