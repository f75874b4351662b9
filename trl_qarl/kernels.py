"""
Low-bit matrix products, chosen by device, scheme, dtype and number of rows.

[`low_bit_linear`] runs one and says its name, so that what ran can be reported rather than assumed. Two properties hold
for every choice: it depends on nothing that differs between rollout, scoring and loss but the number of rows, and every
kernel of a scheme computes the same sum of products with float32 accumulation, up to rounding of the weight to 16 bits
and the order of summation.

On a CPU the thresholds below are where the measured times cross (`trl-qarl bench learner` and `bench decode`, docs/benchmarks.md):

- INT4: ATen's INT4 kernel works row by row and wins up to 32 rows; above, expanding the weight once and multiplying in
  bf16 (or in float32 where the processor has no bf16 instructions) is faster.
- INT8 weights, 16-bit activations: the same with a crossover at 16 rows.
- INT8 x INT8: `torch._int_mm`; without VNNI instructions and above 256 rows, a float32 product of the integers, exact
  within blocks of 1,024 input features.
- INT4 x FP8: the weight is expanded to FP8 as the engine's kernel does it in registers, then as FP8.
- FP8: x86 processors have no FP8 arithmetic. ATen's CPU `_scaled_mm` converts as well and is slower at every size tried,
  so the codes go through a float64 product, which is exact.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F

from .quantize import LowBitWeight, dequantize_weight, product_weight, quantize_activation, unpack_int4
from .schemes import QuantScheme


__all__ = [
    "fp8_product",
    "has_fast_bf16",
    "int4_kernel_operands",
    "low_bit_linear",
    "low_bit_matmul",
    "uses_int4_kernel",
]

INT4_KERNEL_MAX_ROWS = 32
INT8_WEIGHT_KERNEL_MAX_ROWS = 16
INT8_KERNEL_MAX_ROWS_WITHOUT_VNNI = 256
EXACT_FLOAT32_FEATURES = 1024  # 128 * 128 * 1024 = 2**24


def low_bit_linear(
    x: torch.Tensor,
    low_bit: LowBitWeight,
    bias: torch.Tensor | None,
    scheme: QuantScheme,
    int4_operands: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], str]:
    """
    `y = x @ w'.T + bias` on low-bit tensors; no gradient is recorded.

    Args:
        x (`torch.Tensor`):
            Activations `(M, K)` in the compute dtype.
        low_bit ([`LowBitWeight`]):
            Quantized weight of shape `(N, K)`.
        bias (`torch.Tensor` or `None`):
            Bias `(N,)`, any floating dtype; added in the compute dtype.
        scheme ([`QuantScheme`]):
            The scheme of `low_bit`.
        int4_operands (`tuple[torch.Tensor, torch.Tensor]`, *optional*):
            Result of [`int4_kernel_operands`]; needed when [`uses_int4_kernel`] says so.

    Returns:
        The output `(M, N)` in the dtype of `x`; what the backward pass needs to rebuild the activations the product saw
        (`(x,)`, or codes and scale); and the kernel's name.
    """
    # Under autocast a product of float32 operands would silently run in bf16.
    with torch.autocast(x.device.type, enabled=False):
        if scheme.activation_type is not None:
            codes, scale = quantize_activation(x, scheme)
            weight = product_weight(low_bit, scheme)
            product, kernel = low_bit_matmul(codes, weight.qdata, scale, weight.scale, x.dtype)
            return _add_bias(product, bias), (codes, scale), kernel
        y, kernel = _weight_only_linear(x, low_bit, bias, scheme, int4_operands)
        return y, (x,), kernel


def uses_int4_kernel(x: torch.Tensor, low_bit: LowBitWeight, scheme: QuantScheme) -> bool:
    """Whether activations `x`, `(M, K)`, go to ATen's INT4 CPU kernel, which needs operands of its own layout."""
    return (
        scheme.num_bits == 4
        and scheme.activation_type is None
        and x.shape[0] <= INT4_KERNEL_MAX_ROWS
        and _cpu_bf16_kernel_fits(x, low_bit)
        and low_bit.qdata.shape[0] % 16 == 0
    )


def int4_kernel_operands(low_bit: LowBitWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and `(K / group_size, N, 2)` scales and zeros in the layout of ATen's INT4 CPU kernel."""
    scale = low_bit.scale.t()
    return (
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_int4(low_bit.qdata), 1),
        torch.stack([scale, torch.zeros_like(scale)], dim=-1).contiguous(),
    )


def low_bit_matmul(
    x_codes: torch.Tensor,
    w_codes: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, str]:
    """
    `dtype((x_codes @ w_codes.T) * x_scale * w_scale)` for 8-bit codes of both operands.

    Args:
        x_codes (`torch.Tensor`): `(M, K)`, int8 or float8_e4m3fn.
        w_codes (`torch.Tensor`): `(N, K)`, same dtype.
        x_scale (`torch.Tensor`): `(M, 1)` float32.
        w_scale (`torch.Tensor`): `(N, 1)` float32.
        dtype (`torch.dtype`): dtype of the result.

    Returns:
        The `(M, N)` product and the kernel's name.
    """
    if x_codes.dtype is torch.int8:
        accumulated, kernel = _int8_matmul(x_codes, w_codes)
    elif _has_fp8_kernel(x_codes, w_codes):
        if dtype is torch.bfloat16:
            # 16-bit output needs the row-wise scales inside the kernel, which is also what CUTLASS does in vLLM.
            product = torch._scaled_mm(x_codes, w_codes.t(), x_scale, w_scale.t().contiguous(), out_dtype=dtype)
            return product, "aten::_scaled_mm (row-wise FP8)"
        # With row-wise scales, only compute capability 9.0 writes float32.
        unit = x_scale.new_ones(())
        accumulated = torch._scaled_mm(x_codes, w_codes.t(), unit, unit, out_dtype=torch.float32)
        kernel = "aten::_scaled_mm (FP8 to float32)"
    else:
        accumulated, kernel = fp8_product(x_codes, w_codes), "emulated FP8: exact product of E4M3 codes"
    return accumulated.float().mul_(x_scale).mul_(w_scale.t()).to(dtype), kernel


def fp8_product(x_codes: torch.Tensor, w_codes: torch.Tensor) -> torch.Tensor:
    """
    `x_codes @ w_codes.T` of E4M3 codes `(M, K)` and `(N, K)`, rounded once, to float32.

    Products are multiples of 2**-18 below 2**18, so float64 holds every sum of up to 2**17 of them exactly: the result
    depends neither on the order of summation nor on how many rows there are. A float32 product would.
    """
    return F.linear(x_codes.double(), w_codes.double()).float()


def _weight_only_linear(x, low_bit, bias, scheme, int4_operands):
    if uses_int4_kernel(x, low_bit, scheme):
        weight, scales_and_zeros = int4_operands
        group_size = x.shape[1] // low_bit.scale.shape[1]
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), weight, group_size, scales_and_zeros)
        return _add_bias(product, bias), "aten::_weight_int4pack_mm_for_cpu"
    if scheme.num_bits == 8 and x.shape[0] <= INT8_WEIGHT_KERNEL_MAX_ROWS and _cpu_bf16_kernel_fits(x, low_bit):
        product = torch._weight_int8pack_mm(x.contiguous(), low_bit.qdata, low_bit.scale.view(-1))
        return _add_bias(product, bias), "aten::_weight_int8pack_mm"
    dtype = x.dtype
    if x.device.type == "cpu" and dtype is not torch.float32 and not has_fast_bf16():
        dtype = torch.float32
    weight = dequantize_weight(low_bit, dtype)
    y = F.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype)).to(x.dtype)
    return y, f"INT{scheme.num_bits} expanded to {str(dtype).removeprefix('torch.')} + aten::linear"


def _add_bias(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product.add_(bias.to(product.dtype))


def _int8_matmul(x_codes: torch.Tensor, w_codes: torch.Tensor) -> tuple[torch.Tensor, str]:
    rows = x_codes.shape[0]
    if x_codes.is_cuda:
        if w_codes.shape[0] % 8 == 0 and w_codes.shape[1] % 8 == 0:
            # cuBLAS wants more than 16 rows.
            padded = F.pad(x_codes, (0, 0, 0, 32 - rows)) if rows <= 16 else x_codes
            return torch._int_mm(padded, w_codes.t())[:rows], "aten::_int_mm"
    elif _has_vnni() or rows <= INT8_KERNEL_MAX_ROWS_WITHOUT_VNNI:
        return torch._int_mm(x_codes, w_codes.t()), "aten::_int_mm"
    blocks = zip(x_codes.split(EXACT_FLOAT32_FEATURES, 1), w_codes.split(EXACT_FLOAT32_FEATURES, 1), strict=True)
    product = sum(F.linear(x.float(), w.float()).to(torch.int32) for x, w in blocks)
    return product, "float32 product of INT8 codes (exact)"


def _cpu_bf16_kernel_fits(x: torch.Tensor, low_bit: LowBitWeight) -> bool:
    # ATen's float32 variants of these kernels are scalar code, and a float32 scale must not be rounded to bf16.
    return x.device.type == "cpu" and x.dtype is torch.bfloat16 and low_bit.scale.dtype is torch.bfloat16


def _has_fp8_kernel(x_codes: torch.Tensor, w_codes: torch.Tensor) -> bool:
    return (
        x_codes.is_cuda
        and torch.cuda.get_device_capability(x_codes.device) >= (8, 9)
        and w_codes.shape[0] % 16 == 0
        and w_codes.shape[1] % 16 == 0
    )


@lru_cache(maxsize=1)
def _has_vnni() -> bool:
    return torch.cpu._is_vnni_supported()


@lru_cache(maxsize=1)
def has_fast_bf16() -> bool:
    """Whether this processor multiplies bf16 matrices natively (AVX512-BF16 or AMX); else float32 is several times faster."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
