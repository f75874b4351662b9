"""
Low-bit matrix products, chosen by device, scheme, dtype and number of rows.

[`low_bit_linear`] runs a product and returns its name; docs/schemes.md has the table of names. Between rollout,
scoring and loss the choice depends only on the number of rows. All kernels of a scheme compute the same sum of
products with float32 accumulation, up to rounding of the weight to 16 bits and the order of summation. Prefill and
decode of an engine must agree, so with `row_invariant=True` a row has the same bits in any batch: ATen's INT4 and INT8
kernels compute each row by itself; if they cannot run, the weight is expanded and multiplied in blocks of 48 rows
and 128 output channels, because BLAS chooses the order of summation by their numbers.

On a CPU the thresholds, here and in `formats/`, are where the measured times cross (benchmarks/learner.md). PyTorch
has no product of FP8, or of INT4 by INT8, for x86 processors: activations are dequantized, rounded to the compute
dtype as for the gradient, and go through a weight-only product. Expanding a weight takes ten times as long as a
product of one row, so a CPU keeps the expanded weight of few rows, as in decoding, until training begins.
"""

from collections.abc import Callable
from functools import lru_cache
from operator import methodcaller
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch.cpu import _is_vnni_supported as _has_vnni

from .formats.registry import format_of
from .quantize import dequantize_activation, quantize_activation
from .schemes import QuantScheme


COPY_MAX_ROWS = 256
# A multiple of BLAS' tiles of 6, 8, 12, 16 and 24 rows, so that no tile is incomplete.
ROW_INVARIANT_BLOCK = 48
# BLAS in float32, and oneDNN with AMX, split a long sum depending on the number of output channels. An engine holds
# several layers of the learner in one matrix, so channels are computed in blocks, too.
ROW_INVARIANT_CHANNELS = 128
EXACT_FLOAT32_FEATURES = 1024  # 128 * 128 * 1024 = 2**24

# Names of products, explained in docs/schemes.md.
EXPANDED = "{weight} expanded to {dtype} + aten::linear"
GROUPED = "{weight} expanded to {dtype} + aten::_grouped_mm"
INT8_KERNEL = "aten::_int_mm"
INT8_IN_FLOAT32 = "float32 product of INT8 codes (exact)"
FP8_KERNEL = "aten::_scaled_mm (row-wise FP8)"
FP8_KERNEL_TO_FLOAT32 = "aten::_scaled_mm (FP8 to float32)"


_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EXPAND = {dtype: methodcaller("dequantize", dtype) for dtype in _DTYPES}
_EXPAND_CODES = methodcaller("codes", torch.float32)


def low_bit_linear(
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None,
    row_invariant: bool = False,
    copy_max_rows: int = COPY_MAX_ROWS,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], str]:
    """
    Multiply activations `(M, K)` in the compute dtype by a `LowBitTensor` `(N, K)`, without recording a gradient.

    Return `x @ w'.T + bias` in the dtype of `x`; the tensors from which backward rebuilds the product's activations,
    codes and scale or only `(M, K)` in high precision; and the kernel's name. A bias `(N,)` of any floating dtype is
    added in the compute dtype. On a CPU, `row_invariant` asks for one kernel for any number of rows, with which no row
    changes another's result, and a weight that is expanded for at most `copy_max_rows` rows is kept in that form while
    memory is free, until [`drop_copies`].
    """
    # Under autocast a product of float32 operands would silently run in bf16.
    with torch.autocast(x.device.type, enabled=False):
        if weight.scheme.activation is None:
            y, kernel = _weight_only_linear(x, weight, bias, row_invariant, copy_max_rows)
            return y, (x,), kernel
        codes, scale = quantize_activation(x, weight.scheme)
        weight = weight.gemm_weight()
        if weight.qdata.dtype is torch.int8 or _has_fp8_kernel(codes, weight.qdata):
            operand = weight.qdata
            if codes.dtype is torch.int8 and not _has_int8_kernel(codes, operand):
                operand = _copy(weight, _EXPAND_CODES, len(codes), copy_max_rows)
            product, kernel = low_bit_matmul(codes, operand, scale, weight.scale, x.dtype)
            return _add_bias(product, bias), (codes, scale), kernel
        rows = dequantize_activation(codes, scale, x.dtype)
        y, kernel = _weight_only_linear(rows, weight, bias, row_invariant, copy_max_rows)
        return y, (rows,), kernel


def _copy(weight: Any, expand: Callable[[Any], torch.Tensor], num_rows: int, max_rows: int) -> torch.Tensor:
    """Return `expand(weight)`, the copy that is kept, if there is one."""
    is_kept = weight.has_cached(expand) or (weight.device.type == "cpu" and num_rows <= max_rows and has_room(weight))
    return weight.cached(expand) if is_kept else expand(weight)


def has_room(weight: Any) -> bool:
    """Return whether a copy of a weight in float32 leaves a tenth of this host's memory free."""
    memory = psutil.virtual_memory()
    return memory.available - 4 * weight.numel() > memory.total // 10


def drop_copies(weight: Any) -> None:
    """Drop the expanded copies of a `LowBitTensor` that [`low_bit_linear`] keeps on a CPU."""
    if weight.device.type == "cpu":
        operand = weight.gemm_weight()
        for expand in (*_EXPAND.values(), _EXPAND_CODES):
            operand.drop(expand)


def low_bit_matmul(
    x_codes: torch.Tensor,
    w_codes: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, str]:
    """Return `dtype((x_codes @ w_codes.T) * x_scale * w_scale)`, `(M, N)`, and the kernel's name, for codes `(M, K)`
    and `(N, K)` of int8 or, on GPUs that multiply them, float8_e4m3fn, and float32 scales `(M, 1)` and `(N, 1)`.
    Codes of a weight by INT8 activations may be float32."""
    if x_codes.dtype is torch.int8:
        accumulated, kernel = _int8_matmul(x_codes, w_codes)
    elif dtype is torch.bfloat16:
        # 16-bit output needs the row-wise scales inside the kernel, like CUTLASS in vLLM.
        product = torch._scaled_mm(x_codes, w_codes.t(), x_scale, w_scale.t().contiguous(), out_dtype=dtype)
        return product, FP8_KERNEL
    else:
        # With row-wise scales, only compute capability 9.0 writes float32.
        unit = x_scale.new_ones(())
        accumulated = torch._scaled_mm(x_codes, w_codes.t(), unit, unit, out_dtype=torch.float32)
        kernel = FP8_KERNEL_TO_FLOAT32
    return accumulated.float().mul_(x_scale).mul_(w_scale.t()).to(dtype), kernel


def _weight_only_linear(x, weight, bias, row_invariant, copy_max_rows):
    if found := format_of(weight.scheme.container).multiply(x, weight, row_invariant):
        product, name = found
        return _add_bias(product, bias), name
    dtype = x.dtype
    if x.device.type == "cpu" and dtype is not torch.float32 and not has_fast_bf16():
        dtype = torch.float32
    dense = _copy(weight, _EXPAND[dtype], len(x), copy_max_rows)
    name = expanded_name(EXPANDED, weight.scheme, dtype)
    if row_invariant:
        return _add_bias(linear_in_blocks(x.to(dtype), dense).to(x.dtype), bias), f"{name} in blocks of rows"
    y = F.linear(x.to(dtype), dense, None if bias is None else bias.to(dtype)).to(x.dtype)
    return y, name


def expanded_name(product: str, scheme: QuantScheme, dtype: torch.dtype) -> str:
    """Return `EXPANDED` or `GROUPED` filled in for a weight of `scheme` that is expanded to `dtype`."""
    container = scheme.container
    codes = f"INT{container.num_bits}" if container.type == "int" else container.name.upper()
    return product.format(weight=codes, dtype=str(dtype).removeprefix("torch."))


def linear_in_blocks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x @ weight.T`, `(M, K)` by `(N, K)` in their dtype; bits do not depend on other rows or channels."""
    *whole, last = weight.split(ROW_INVARIANT_CHANNELS)
    channels = last.shape[0]
    # Only the last block is copied, and only if channels are missing.
    if channels < ROW_INVARIANT_CHANNELS:
        last = F.pad(last, (0, 0, 0, ROW_INVARIANT_CHANNELS - channels))
    products = [_in_blocks_of_rows(x, block) for block in whole]
    return torch.cat([*products, _in_blocks_of_rows(x, last)[:, :channels]], 1)


def _in_blocks_of_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    filled = F.pad(x, (0, 0, 0, -rows % ROW_INVARIANT_BLOCK))
    product = x.new_empty(filled.shape[0], weight.shape[0])
    for block, out in zip(filled.split(ROW_INVARIANT_BLOCK), product.split(ROW_INVARIANT_BLOCK), strict=True):
        torch.mm(block, weight.t(), out=out)
    return product[:rows]


def _add_bias(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product.add_(bias.to(product.dtype))


def _has_int8_kernel(x_codes: torch.Tensor, w_codes: torch.Tensor) -> bool:
    if w_codes.dtype is not torch.int8:
        return False
    if x_codes.is_cuda:
        return w_codes.shape[0] % 8 == 0 and w_codes.shape[1] % 8 == 0
    # A weight `(N, 1)` has the strides of a transposed one, for which `_int_mm` leaves its output uninitialized, and
    # without VNNI the kernel is a scalar loop.
    return w_codes.shape[1] > 1 and _has_vnni()


def _int8_matmul(x_codes: torch.Tensor, w_codes: torch.Tensor) -> tuple[torch.Tensor, str]:
    if _has_int8_kernel(x_codes, w_codes):
        rows = len(x_codes)
        # cuBLAS needs more than 16 rows.
        padded = F.pad(x_codes, (0, 0, 0, 32 - rows)) if x_codes.is_cuda and rows <= 16 else x_codes
        return torch._int_mm(padded, w_codes.t())[:rows], INT8_KERNEL
    blocks = zip(x_codes.split(EXACT_FLOAT32_FEATURES, 1), w_codes.split(EXACT_FLOAT32_FEATURES, 1), strict=True)
    product = sum(F.linear(x.float(), w.float()).to(torch.int32) for x, w in blocks)
    return product, INT8_IN_FLOAT32


def _has_fp8_kernel(x_codes: torch.Tensor, w_codes: torch.Tensor) -> bool:
    return (
        x_codes.is_cuda
        and torch.cuda.get_device_capability(x_codes.device) >= (8, 9)
        and w_codes.shape[0] % 16 == 0
        and w_codes.shape[1] % 16 == 0
    )


@lru_cache(maxsize=1)
def has_fast_bf16() -> bool:
    """Return whether this CPU multiplies bf16 natively (AVX512-BF16, AMX); else float32 is several times faster."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
