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


def install(capability: tuple[int, int]) -> None:
    """Make vLLM's platform one with `capability`. To be called before anything else of vLLM is imported."""
    # A worker in another process would have the real platform.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    name, memory = NAMES.get(capability, "NVIDIA GPU"), 80 * 2**30
    answers = {
        "get_device_capability": DeviceCapability(*capability),
        "get_device_name": name,
        "get_device_total_memory": memory,
        "get_current_memory_usage": 0.0,
        "is_integrated_gpu": False,
        "num_compute_units": 132,
        "device_count": 1,
        "set_device": None,
    }
    methods = {key: classmethod(lambda cls, *_, _value=value, **__: _value) for key, value in answers.items()}
    # vLLM looks at the name of the class, too.
    platforms._current_platform = type("CudaPlatform", (NonNvmlCudaPlatform,), methods)()
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        name=name,
        total_memory=memory,
        multi_processor_count=132,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=232448,
    )
    answers = {
        "get_device_capability": capability,
        "get_device_name": name,
        "get_device_properties": properties,
        "current_device": 0,
        "device_count": 1,
        "mem_get_info": (memory, memory),
        "current_stream": contextlib.nullcontext(),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
    }
    for module in (torch.cuda, torch.accelerator):
        for key, value in answers.items():
            if hasattr(module, key):
                setattr(module, key, lambda *_, _value=value, **__: _value)


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
