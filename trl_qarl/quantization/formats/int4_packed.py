"""
INT4 codes in words: `qdata` is int32 `(N, K / 8)`, eight codes + 8 per word, the first in the lowest bits.

A checkpoint (`pack-quantized`) has the same words as `weight_packed`, and `weight_shape` is `(N, K)`. Codes of fewer
bits are stored as the same numbers.

`w4a8` has other scales: vLLM converts the bf16 scales `s` of a checkpoint to `s = 8 c g` with `g` in FP8 E4M3 and one
`c = max(amax(s) / 448, 1 / (448 * 512))` per output channel, and multiplies by the weight `8 c round_e4m3(g * q)`
(`convert_bf16_scales_to_fp8` and CUTLASS' table of the products of a scale and each code). Therefore `s` is chosen so
that the conversion loses nothing: `c` is rounded to four significant bits, `g` to E4M3 with the largest at 56, and
their product has the eight bits of bf16. The engine multiplies by [`fp8_gemm_weight`].
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from ..schemes import INT8
from .base import Format, KernelChoice, fits_cpu_kernels


KERNEL, KERNEL_MAX_ROWS = "aten::_weight_int4pack_mm_for_cpu", 32


class Int4Packed(Format):
    """INT4 weights, also on grids of 3 and 2 bits, with activations of 16 or 8 bits."""

    num_bits = 4
    checkpoint_names = ("weight_packed", "weight_scale", "weight_shape")
    gguf_type = "Q4_0"
    repeated_on_gpus = (None,)
    experts_in_vllm = (None, INT8)

    def pack(self, codes):
        # In words of 16 bits the second code moves next to the first; strides of 2 would be slow.
        pairs = (codes.to(torch.int8) + 8).view(torch.int16)
        return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8).view(torch.int32)

    def unpack(self, qdata, dtype):
        return unpack_int4(qdata, dtype)

    def count_flips(self, before, after):
        changed = (before ^ after).view(torch.uint8)
        return (changed & 0x0F).count_nonzero() + (changed & 0xF0).count_nonzero()

    def choose_scales(self, groups, scheme):
        scale = super().choose_scales(groups, scheme)
        return _fp8_exact_scales(scale) if scheme.has_fp8_scales else scale

    def multiply(self, x, weight, row_invariant):
        if not (fits_cpu_kernels(x, weight) and (row_invariant or len(x) <= KERNEL_MAX_ROWS)):
            return None
        packed, scales_and_zeros = weight.cached(kernel_operands)
        group_size = x.shape[1] // weight.scale.shape[1]
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, group_size, scales_and_zeros)
        return product[:, : len(weight.qdata)], KERNEL

    def release(self, x, weight):
        # The kernel's copy of the weight is kept during a rollout, not during training.
        if len(x) > KERNEL_MAX_ROWS or not fits_cpu_kernels(x, weight):
            weight.drop(kernel_operands)

    def kernels(self, scheme, gpu):
        on_hopper = gpu.capability == (9, 0)
        if scheme.has_fp8_scales:
            if on_hopper:
                return KernelChoice(linear=("CutlassW4A8LinearKernel",))
            return KernelChoice(
                refusal="vLLM's kernel of INT4 weights and FP8 activations needs compute capability 9.0",
                instead="'w4a16', use_vllm=False, or a Hopper GPU",
            )
        if scheme.activation == INT8:
            return KernelChoice(
                refusal="vLLM cannot reload any of its GPU kernels of INT4 weights and INT8 activations",
                instead="'w4a8'" if on_hopper else "'w4a16', or w4a8 on a Hopper GPU",
            )
        # For experts on Hopper vLLM takes Humming from 0.32 on, whose repacking runs only on a GPU, else Marlin.
        needs_marlin = on_hopper and gpu.release != "0.31"
        return integer_kernels(gpu, experts_backend="marlin" if needs_marlin else None)


def kernel_operands(weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and `(K / group_size, N, 2)` scales and zeros in the layout of ATen's INT4 CPU kernel, with `N`
    padded to a multiple of 16: a layer and a part of it must get the same kind of product."""
    pad = (0, 0, 0, -len(weight.qdata) % 16)
    unsigned = (unpack_int4(F.pad(weight.qdata, pad), torch.float32) + 8).int()
    scale = F.pad(weight.scale, pad).t()
    return (
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, 1),
        torch.stack([scale, torch.zeros_like(scale)], dim=-1).contiguous(),
    )


def integer_kernels(gpu, experts_backend: str | None = None) -> KernelChoice:
    """Return vLLM's kernels for integer weights with 16-bit activations."""
    # Machete takes multiples of 64 input and 128 output features, Marlin the rest.
    on_hopper = gpu.capability == (9, 0)
    linear = ("MacheteLinearKernel", "MarlinLinearKernel") if on_hopper else ("MarlinLinearKernel",)
    return KernelChoice(linear, ("MarlinExperts",), experts_backend=experts_backend)


def look_up(qdata: torch.Tensor, dtype: torch.dtype, values: tuple[float, ...]) -> torch.Tensor:
    """Replace each half byte of `qdata`, `(N, ...)`, the lower first, by one of 16 `values`: `(N, K)` in `dtype`."""
    # One table look-up per 16 bits yields four weights; shifts and masks are four times slower on a CPU.
    table = _table(dtype, qdata.device, values)
    indices = qdata.view(torch.uint16).long()
    values = table.index_select(0, indices.view(-1)) if dtype.itemsize > 2 else table.take(indices)
    return values.view(dtype).view(qdata.shape[0], 2 * qdata.itemsize * qdata.shape[1])


def unpack_int4(qdata: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes, -8 to 7, `(N, K)` in `dtype`."""
    return look_up(qdata, dtype, tuple(range(-8, 8)))


@lru_cache(maxsize=8)
def _table(dtype: torch.dtype, device: torch.device, values: tuple[float, ...]) -> torch.Tensor:
    """Four values for each 16-bit pattern: `(65536,)` int64 for 16-bit dtypes, else `(65536, 4)` in `dtype`."""
    patterns = torch.arange(65536, device=device)
    known = torch.tensor(values, device=device, dtype=dtype)
    table = torch.stack([known[(patterns >> shift) & 15] for shift in (0, 4, 8, 12)], dim=-1)
    return table.view(torch.int64).view(-1) if dtype.itemsize == 2 else table


def fp8_gemm_weight(qdata: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operands by which the engine multiplies for `w4a8`: FP8 codes `(N, K)`, float32 scales `(N, 1)`."""
    # vLLM's conversion of the scales.
    scale = scale.float()
    channel_scale = (scale.amax(-1, keepdim=True) / 448.0).clamp(min=1.0 / (448.0 * 512.0))
    group_scale = (scale / channel_scale).to(torch.float8_e4m3fn).float() / 8.0
    group_scale = group_scale.to(torch.float8_e4m3fn).float()
    codes = unpack_int4(qdata, torch.float32)
    codes.view(*group_scale.shape, codes.shape[1] // group_scale.shape[1]).mul_(group_scale.unsqueeze(-1))
    return codes.to(torch.float8_e4m3fn), 8.0 * channel_scale


def _fp8_exact_scales(scale: torch.Tensor) -> torch.Tensor:
    """Return scales `(N, groups)` near `scale` that [`fp8_gemm_weight`] splits without rounding unless it clamps."""
    scale = scale.float()
    amax = scale.amax(-1, keepdim=True)
    amax = torch.where(amax == 0, 1.0, amax)
    fraction, exponent = torch.frexp(amax / 448.0)
    channel_scale = 8.0 * torch.ldexp((fraction * 16.0).round(), exponent - 4)
    # From the smallest normal number on, E4M3 has four significant bits.
    group_scale = torch.where(scale == amax, 56.0, scale / channel_scale).clamp(2.0**-6, 56.0)
    return group_scale.to(torch.float8_e4m3fn).float() * channel_scale
