"""
vLLM's code for CUDA in the wheel for CPUs: [`fake_gpu`]'s platform, and what that wheel lacks.

The extensions' repacking functions are replaced by permutations of the same shape, dtype and strides, so that what was
repacked can be told from what was not. Nothing is multiplied. For a process of its own: [`install`] changes torch and
vLLM for good.
"""

import contextlib
import sys
import types

import torch
from rehearsal import fake_gpu


def install() -> None:
    """Have vLLM take this machine for one with a GPU; before anything of vLLM but `vllm` itself is imported."""
    # Extensions that the wheel for CPUs lacks, whose import registers operations.
    for name in (
        "_C_stable_libtorch",
        "_moe_C_stable_libtorch",
        "vllm_flash_attn._vllm_fa2_C",
        "vllm_flash_attn._vllm_fa3_C",
    ):
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(f"vllm.{name}"))
    from vllm.platforms.cpu import CpuPlatform

    # Layers look up what they would compute with. It is not called.
    CpuPlatform.import_kernels()
    fake_gpu.install(fake_gpu.capability)
    torch.cuda.Stream = torch.cuda.Event = contextlib.nullcontext
    _replace_operations()


def _permuted(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor in another order, which its size alone determines."""
    order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(tensor.numel()), device="cpu")
    return tensor.reshape(-1)[order]


def _replace_operations() -> None:
    import vllm._custom_ops as ops

    def gptq_marlin_repack(b_q_weight, size_k, size_n, num_bits, is_a_8bit=False):
        per_word = 32 // num_bits
        assert b_q_weight.is_contiguous() and b_q_weight.shape == (size_k // per_word, size_n)
        assert size_k % 16 == 0 and size_n % 64 == 0, "Marlin's tiles"
        return _permuted(b_q_weight).view(size_k // 16, size_n * 16 // per_word)

    def gptq_marlin_moe_repack(b_q_weight, size_k, size_n, num_bits, is_a_8bit=False):
        repack = [gptq_marlin_repack(matrix.contiguous(), size_k, size_n, num_bits) for matrix in b_q_weight]
        return torch.stack(repack)

    def column_major(matrix):
        assert matrix.t().is_contiguous(), "column-major"
        return _permuted(matrix.t()).view(matrix.t().shape).t()

    replaced = {
        "gptq_marlin_repack": gptq_marlin_repack,
        "gptq_marlin_moe_repack": gptq_marlin_moe_repack,
        "machete_prepack_B": lambda b_q_weight, **types: column_major(b_q_weight),
        "cutlass_encode_and_reorder_int4b": column_major,
        "cutlass_pack_scale_fp8": lambda scales: scales.unsqueeze(-1).expand(*scales.shape, 8).contiguous(),
        "cutlass_scaled_mm_supports_fp8": lambda number: number >= 89,
        "cutlass_scaled_mm_supports_block_fp8": lambda number: number >= 90,
        "cutlass_group_gemm_supported": lambda number: 90 <= number < 110,
        "cutlass_scaled_mm_supports_fp4": lambda number: number >= 100,
    }
    for name, function in replaced.items():
        assert hasattr(ops, name), f"vLLM's operation {name} has gone or has another name"
        setattr(ops, name, function)
    # Scales of CUTLASS' INT4 weights: rounded to FP8 by an operation, of which vLLM has the same in torch.
    from vllm.model_executor.kernels.linear.mixed_precision import cutlass
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    QuantFP8.forward_cuda = QuantFP8.forward_native
    for name in ("convert_bf16_scales_to_fp8", "convert_packed_uint4b8_to_signed_int4_inplace"):
        setattr(cutlass, name, _as_on_a_gpu(getattr(cutlass, name)))


def _as_on_a_gpu(function):
    """`function`, to which all tensors say that they are on a GPU."""

    def call(*args):
        torch.Tensor.is_cuda = property(lambda tensor: True)
        try:
            return function(*args)
        finally:
            del torch.Tensor.is_cuda

    return call
