"""One line about the machine a benchmark ran on."""

import platform
import re
from pathlib import Path

from trl_qarl._version import __version__
from trl_qarl.packages import installed


def synchronize() -> None:
    """Wait for what the accelerator was told to do, if there is one."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def forget_peak() -> None:
    """Begin a measurement of [`peak_bytes`]."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int | None:
    """Most bytes of the GPU's memory that PyTorch held in this process since [`forget_peak`]; `None` without a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def describe_machine() -> str:
    import torch

    if torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
    else:
        cpuinfo = Path("/proc/cpuinfo")
        match = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
        name = match[1] if match else platform.processor() or platform.machine()
        hardware = f"{name}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    versions = installed("torch", "transformers", "compressed-tensors") | {"trl-qarl": __version__}
    return f"{hardware}; {', '.join(map(' '.join, versions.items()))}"
