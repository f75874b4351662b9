"""
vLLM's platform for NVIDIA GPUs on a machine without one: it reports a compute capability of choice, and tensors stay
on the CPU.

vLLM's Python code then chooses kernels and builds layers as it does there. No kernel can be called. The CUDA
extensions of a wheel for GPUs must load, for which `run.sh` puts a library in the place of `libcuda.so.1`. A wheel for
CPUs has none: [`install_in_cpu_wheel`] replaces repacking functions by permutations of the same shape, dtype and
strides, so that a test sees what was repacked.
"""

import contextlib
import os
import sys
import tempfile
import types
from types import SimpleNamespace

import torch


NAMES = {(8, 0): "NVIDIA A100", (8, 9): "NVIDIA L40S", (9, 0): "NVIDIA H100", (10, 0): "NVIDIA B200", (12, 0): "NVIDIA RTX PRO 6000"}  # fmt: skip

capability = (8, 0)
"""The compute capability that vLLM sees; layers that exist keep what they have chosen."""

_MEMORY, _PROCESSORS = 80 * 2**30, 132


def install(of: tuple[int, int]) -> None:
    """Make vLLM's platform one with capability `of`. To be called before anything else of vLLM is imported."""
    global capability
    capability = of
    # A worker in another process would have the real platform.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    answers = {
        "get_device_capability": lambda: DeviceCapability(*capability),
        "get_device_name": _name,
        "get_device_total_memory": lambda: _MEMORY,
        "get_current_memory_usage": lambda: 0.0,
        "is_integrated_gpu": lambda: False,
        "num_compute_units": lambda: _PROCESSORS,
        "device_count": lambda: 1,
        "set_device": lambda: None,
        "manual_seed_all": lambda: None,
    }
    methods = {key: classmethod(lambda *_, _answer=answer, **__: _answer()) for key, answer in answers.items()}
    # vLLM looks at the name of the class, too.
    platforms._current_platform = type("CudaPlatform", (NonNvmlCudaPlatform,), methods)()
    answers = {
        "get_device_capability": lambda: capability,
        "get_device_name": _name,
        "get_device_properties": _properties,
        "current_device": lambda: 0,
        "current_device_index": lambda: 0,
        "device_count": lambda: 1,
        "mem_get_info": lambda: (_MEMORY, _MEMORY),
        "current_stream": contextlib.nullcontext,
        "memory_allocated": lambda: 0,
        "memory_reserved": lambda: 0,
        "max_memory_allocated": lambda: 0,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
    }
    for module in (torch.cuda, torch.accelerator):
        for key, answer in answers.items():
            if hasattr(module, key):
                setattr(module, key, lambda *_, _answer=answer, **__: _answer())


def _name() -> str:
    return NAMES.get(capability, "NVIDIA GPU")


def _properties() -> SimpleNamespace:
    return SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        name=_name(),
        total_memory=_MEMORY,
        multi_processor_count=_PROCESSORS,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=232448,
    )


def init_groups(config) -> None:
    """Make vLLM's process groups, of this process alone."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            file = f"file://{tempfile.mkdtemp()}/groups"
            parallel_state.init_distributed_environment(1, 0, file, 0, backend="gloo")
        # The group of experts is made for a mixture alone.
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 1)


def install_in_cpu_wheel() -> None:
    """[`install`] with the wheel for CPUs. To be called before anything of vLLM but `vllm` itself is imported."""
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
    install(capability)
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
