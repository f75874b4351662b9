"""
vLLM's platform for NVIDIA GPUs on a machine without one: it reports a compute capability of choice, and tensors stay on the CPU.

vLLM's Python code then chooses kernels and builds layers as it does there. Its CUDA extensions must load, for which `run.sh` puts a
library in the place of `libcuda.so.1`. No kernel can be called.
"""

import contextlib
import os
import tempfile
from types import SimpleNamespace

import torch


__all__ = ["init_groups", "install"]

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
