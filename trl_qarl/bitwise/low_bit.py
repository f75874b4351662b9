"""
Products of low-bit weights shared by learner and engine: the fastest on this processor among those with the same bits
for a row in any batch. A layer's operand is made once for each version of its weight. docs/alignment.md says which
scheme has which product, and where it is [`~trl_qarl.quantization.gemm.low_bit_linear`], as without vLLM. Both sides
have to agree, so an engine reports its products ([`describe_arithmetic`]).
"""

import logging
import os
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn

from ..quantization import gemm
from ..quantization.inventory import Inventory
from ..quantization.quantize import SMALLEST_E4M3_SCALE, dequantize_activation, quantize_activation
from ..quantization.schemes import E4M3, INT8, INT8_CODES, Grid, QuantScheme, get_scheme
from ..quantization.tensors import LowBitTensor
from ..wire.protocol import CPU_WEIGHTS_VARIABLE, NORMS
from . import cuda, ops
from .cpu import IN_ONE_PASS, PackedLinear, has_norms, pad, reason_not_to_call, vllm_version


logger = logging.getLogger(__name__)


def low_bit_linear(
    rows: torch.Tensor, low_bit: LowBitTensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], str]:
    """Return [`~trl_qarl.quantization.gemm.low_bit_linear`] of `rows`, `(M, K)` in the engine's dtype, and a weight
    `(N, K)`, with the same bits for a row in any batch, in learner and engine. A bias `(N,)` is rounded to that dtype.
    `MemoryError` is raised if the operand does not fit into free memory."""
    if ops.is_on_gpu(rows):
        return cuda.low_bit_linear(rows, low_bit, bias)
    product = _product_of(low_bit, rows.dtype)
    if product is None:
        return gemm.low_bit_linear(rows, low_bit, bias, row_invariant=True)
    return *product.multiply(rows, bias), product.name


def multiply(rows: torch.Tensor, low_bit: LowBitTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return only the output of [`low_bit_linear`] on a CPU, for an engine."""
    return multiplication(low_bit, rows.dtype)(rows, bias)


def multiplication(low_bit: LowBitTensor, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return [`multiply`] of rows in `dtype` and a bias with `low_bit`, for an engine that calls it many times."""
    if product := _product_of(low_bit, dtype):
        return product
    is_repeated, is_expanded = dtype is torch.bfloat16 and reason_not_to_call() is None, cpu_weights() == "expanded"
    if is_expanded and not is_repeated and (product := _product_in_float32(low_bit)):
        return product
    options = {"row_invariant": is_repeated, "copy_max_rows": sys.maxsize if is_expanded else 0}
    learners_own = partial(gemm.low_bit_linear, weight=low_bit, **options)
    return lambda rows, bias: learners_own(rows, bias=bias)[0]


def _product_in_float32(low_bit: LowBitTensor) -> "_Expanded | None":
    """Return vLLM's product of the weight in float32, or `None` for sums of integers, and without it or memory."""
    is_of_integers = (low_bit.scheme.container, low_bit.scheme.activation) == (INT8_CODES, INT8)
    if is_of_integers or not hasattr(torch.ops._C, "create_onednn_mm_handler"):
        return None
    is_possible = low_bit.has_cached(_expanded_to_float32) or gemm.has_room(low_bit)
    return low_bit.cached(_expanded_to_float32) if is_possible else None


def _product_of(low_bit: LowBitTensor, dtype: torch.dtype) -> Any:
    make = _fastest(low_bit.scheme) if dtype is torch.bfloat16 else None
    return None if make is None else low_bit.cached(make)


def quantize_rows(rows: torch.Tensor, activation: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [`~trl_qarl.quantization.quantize.quantize_activation`] of bfloat16 `rows`, `(M, K)`, through vLLM's
    kernel if it returns the same, which takes a quarter of the time or less."""
    if _quantizes(activation):
        return _KERNELS[activation](rows.contiguous())
    return quantize_activation(rows, get_scheme(_SCHEMES[activation]))


_chosen = "expanded"


def cpu_weights() -> str:
    """
    Return the form of weights in this process' products of 16-bit or E4M3 activations: `"expanded"` to bf16 once for
    each version, or `"packed"` codes, which save 2 bytes per weight, take up to three times as long and give other
    bits. The environment, such as that of a server's processes, overrides [`use_cpu_weights`].
    """
    return os.environ.get(CPU_WEIGHTS_VARIABLE) or _chosen


def use_cpu_weights(form: str) -> None:
    """Choose the form of weights in this process, for learner and engine."""
    global _chosen
    _chosen = form


def choose_cpu_weights(model: nn.Module, dtype: torch.dtype, num_copies: int = 1, is_trained: bool = False) -> str:
    """Return `"expanded"` if `num_copies` expanded copies of the quantized layers of `model`, which may be on the meta
    device, for activations in `dtype`, fit into the free memory of this host next to everything else, else `"packed"`;
    log the choice. Everything else are gradients and two moments if the model `is_trained` here, or the rest of an
    engine. Processes that a launcher started on this host share the memory. The environment overrides the choice."""
    if form := os.environ.get(CPU_WEIGHTS_VARIABLE):
        return form
    inventory = Inventory.of(model)
    # Layers of a base that is quantized already are known once it is loaded.
    sizes = [
        0 if _reads_codes(layer.scheme, dtype) else weight.shape.numel()
        for layer in inventory.layers.values()
        for weight in layer.quantized_weights.values()
    ] or [module.weight.numel() for module in inventory.quantizable.values() if isinstance(module, nn.Linear)]
    size = dtype.itemsize if gemm.has_fast_bf16() else torch.float32.itemsize
    needed = size * sum(sizes) * num_copies
    layers = (inventory.layers or inventory.quantizable).values()
    in_low_bits = {id(p) for module in layers for p in module.parameters()}

    def bytes_of(p: nn.Parameter) -> int:
        # Products of an engine's other layers have copies of the size of expanded weights.
        return 12 * p.requires_grad if is_trained else 2 if id(p) in in_low_bits else size

    reserved = sum(bytes_of(p) * p.numel() for p in model.parameters())
    free = psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    form = "expanded" if needed + reserved <= free else "packed"
    logger.info(
        "Weights of products on this CPU are %s: expanded they take %d MiB, with %d MiB for everything else; %d MiB are free.",
        *(form, needed >> 20, reserved >> 20, free >> 20),
    )
    return form


def _reads_codes(scheme: QuantScheme, dtype: torch.dtype) -> bool:
    """Return whether a product by INT8 activations on this CPU needs no expanded weight."""
    has_kernel = scheme.container == INT8_CODES or dtype is torch.bfloat16
    return scheme.activation == INT8 and has_kernel and torch.cpu._is_vnni_supported()


def describe_arithmetic() -> dict[str, Any]:
    """Return the settings that determine the bits of a process on a CPU in bfloat16."""
    from vllm import envs

    products = ((name, _fastest(get_scheme(name))) for name in ("w4a16", "fp8", "w8a8", "w4a8-int8"))
    return {
        "vllm": vllm_version(),
        "avx512": torch.cpu._is_avx512_supported(),
        "amx": torch.cpu._is_amx_tile_supported(),
        "l2_cache_size": torch.cpu.get_capabilities()["l2_cache_size"],
        "VLLM_CPU_ATTN_SPLIT_KV": int(envs.VLLM_CPU_ATTN_SPLIT_KV),
        "attention": IN_ONE_PASS,
        "norms": NORMS,
        "norm kernel": has_norms(),
        "cpu_weights": cpu_weights(),
        **{f"product of {name}": getattr(product, "name", "the learner's own") for name, product in products},
    }


class _Expanded:
    """The dequantized weight in the product of unquantized layers. Low-bit activations are dequantized as well, to the
    dtype of the rows, as for the gradient."""

    name = "expanded once + vLLM's product of unquantized layers"

    def __init__(self, low_bit: LowBitTensor, dtype: torch.dtype | None = None):
        self.scheme = low_bit.scheme
        self.dtype = dtype or (torch.bfloat16 if gemm.has_fast_bf16() else torch.float32)
        needed, free = 2 * low_bit.numel() * self.dtype.itemsize, psutil.virtual_memory().available
        if needed > free:
            raise MemoryError(
                f"A weight of shape {tuple(low_bit.shape)} takes {needed >> 20} MiB to be expanded to {self.dtype} and packed, and "
                f"{free >> 20} MiB are free. Free memory, or set {CPU_WEIGHTS_VARIABLE}=packed in the environment of trainer and server: "
                "weights then stay in low bits, and products take longer."
            )
        self._product = PackedLinear(low_bit.gemm_weight().dequantize(self.dtype))

    def __call__(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.multiply(rows, bias)[0]

    def multiply(self, rows: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the product and the tensors from which backward rebuilds its activations."""
        dtype, activation = rows.dtype, self.scheme.activation
        if activation is not None:
            rows = dequantize_activation(*quantize_rows(rows, activation), dtype)
        bias = None if bias is None else bias.to(dtype)
        return self._product(rows.to(self.dtype), bias).to(dtype), (rows,)


def _expanded_to_float32(low_bit: LowBitTensor) -> _Expanded:
    return _Expanded(low_bit, torch.float32)


class _Int8:
    """INT8 by INT8; the kernel quantizes rows itself."""

    name = "vllm::int8_scaled_mm_with_quant"
    scheme = "w8a8"

    def __init__(self, low_bit: LowBitTensor):
        self.num_outputs, num_inputs = low_bit.shape
        # Output channels and input features come in blocks of 32; zeros change neither sums nor scales of rows.
        self._padding = -num_inputs % 32, -self.num_outputs % 32
        self._pack(low_bit, *self._padding)

    def _pack(self, low_bit: LowBitTensor, pad_inputs: int, pad_outputs: int) -> None:
        codes = pad(low_bit.qdata, (0, pad_inputs, 0, pad_outputs))
        self._weight = torch.ops._C.convert_weight_packed(codes.contiguous())
        self._scale = F.pad(low_bit.scale.view(-1).float(), (0, pad_outputs), value=1.0)

    def _multiply(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops._C.int8_scaled_mm_with_quant(rows, self._weight, self._scale, bias, rows.dtype, True)

    def __call__(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        pad_inputs, pad_outputs = self._padding
        bias = None if bias is None else pad(bias.to(rows.dtype).float(), (0, pad_outputs))
        return self._multiply(pad(rows, (0, pad_inputs)).contiguous(), bias)[:, : self.num_outputs]

    def multiply(self, rows: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        # The kernel keeps its codes to itself.
        return self(rows, bias), quantize_rows(rows, INT8)


class _Int4(_Int8):
    """INT4 by INT8, with exact sums within a group and sums over groups in order."""

    name = "vllm::int4_scaled_mm_cpu"
    scheme = "w4a8-int8"

    def _pack(self, low_bit: LowBitTensor, pad_inputs: int, pad_outputs: int) -> None:
        # vLLM's `convert_weight_packed_scale_zp` returns the same, five times as slowly. A block has the codes + 8 of
        # 32 outputs in a group of inputs, the four of an output side by side, output n + 8 in the upper half of the
        # bytes of output n, and then the sum of each output's codes (vLLM's csrc/cpu/sgl-kernels/gemm_int4.cpp).
        scale = F.pad(low_bit.scale, (0, 0, 0, pad_outputs), value=1.0).float()
        (num_outputs, num_groups), num_blocks = scale.shape, len(scale) // 32
        # A code per byte, four per word. Adding a multiple of the upper bits moves them up in one pass.
        words = pad(low_bit.qdata, (0, 0, 0, pad_outputs)).view(torch.uint16).int()
        words.add_(words & 0xFF00, alpha=0xFF)
        words.add_(words & 0x00F000F0, alpha=0xF)
        lower, upper = words.view(num_outputs // 16, 2, 8, -1).unbind(1)
        halves = lower.add(upper, alpha=16).view(num_blocks, 2, 8, num_groups, -1).permute(0, 3, 4, 1, 2)
        # The sums of eight codes fit into their bytes.
        eights = words.view(num_blocks, 32, num_groups, -1, 8).sum(-1, dtype=torch.int32).view(torch.uint8)
        sums = (eights.sum(-1, dtype=torch.int32) - 32 * words.shape[1] // num_groups).transpose(1, 2)
        weight = torch.cat([halves.flatten(2), sums], dim=2).view(torch.uint8)
        scale = scale.view(num_blocks, 32, num_groups).transpose(1, 2).contiguous()
        self._operands = weight, torch.full_like(scale, 8, dtype=torch.int8), scale

    def _multiply(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight, zeros, scale = self._operands
        return torch.ops._C.int4_scaled_mm_cpu(rows, weight, zeros, scale, bias)


def _fastest(scheme: QuantScheme) -> type | None:
    """Return the class that makes the operand of a layer of `scheme`, or `None` for the learner's own product."""
    if reason_not_to_call() is not None:
        return None
    if scheme.activation == INT8:
        make = _Int8 if scheme.container == INT8_CODES else _Int4
        return make if _computes(make) else None
    return None if cpu_weights() == "packed" else _Expanded


def _int8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = torch.empty(rows.shape, dtype=torch.int8), torch.empty(len(rows), 1)
    torch.ops._C.dynamic_scaled_int8_quant(codes, rows, scale, None)
    # Rows of zeros or denormal numbers.
    if bool((too_small := scale < torch.finfo(torch.float32).tiny).any()):
        codes.masked_fill_(too_small, 0)
        scale.masked_fill_(too_small, 1.0)
    return codes, scale


def _e4m3_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The kernel has another smallest scale, and ignores what does not fill a block of 32 inputs.
    if rows.numel() and rows.shape[1] % 32 == 0:
        codes, scale = torch.ops._C.quantize_fp8e4m3_vec(rows, True, None)
        if scale.min() >= SMALLEST_E4M3_SCALE:
            return codes, scale[:, None]
    return quantize_activation(rows, get_scheme(_SCHEMES[E4M3]))


_KERNELS = {INT8: _int8_rows, E4M3: _e4m3_rows}
_SCHEMES = {INT8: "w8a8", E4M3: "fp8"}


@lru_cache(maxsize=2)
def _quantizes(activation: Grid) -> bool:
    """Return whether vLLM's kernel for activations exists and returns what the learner's own quantization does."""
    if reason_not_to_call() is not None:
        return False
    rows = torch.randn(40, 320, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 36, 40)[:, None]
    rows = torch.cat([rows, torch.arange(-160.0, 160.0)[None]]).bfloat16()
    try:
        ours, kernels = quantize_activation(rows, get_scheme(_SCHEMES[activation])), _KERNELS[activation](rows)
    # A release may have moved, renamed or removed the kernel.
    except Exception:
        return False
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, kernels, strict=True))


@lru_cache(maxsize=2)
@torch.no_grad()
def _computes(make: type) -> bool:
    """Return whether a product of vLLM is correct on this processor, with the same bits for a row in any batch."""
    if not torch.cpu._is_vnni_supported():
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((70, 256), (64, 256)))
    low_bit = LowBitTensor.from_hp(weight, get_scheme(make.scheme), torch.bfloat16)
    expected = gemm.low_bit_linear(x, low_bit, None)[0].float()
    try:
        product = make(low_bit)
        y = product(x, None)
        is_invariant = all(torch.equal(product(x[-rows:], None), y[-rows:]) for rows in (1, 2, 5, 33))
    # A release may have moved, renamed or removed the product.
    except Exception:
        return False
    return is_invariant and bool((y.float() - expected).norm() < 2**-6 * expected.norm())
