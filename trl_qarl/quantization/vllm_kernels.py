"""
vLLM's own CPU kernel for INT4 weights, as a forward product of the learner (`learner_kernel="vllm"`).

vLLM multiplies INT4 weights and 16-bit activations with AVX512 code that rounds each weight to 16 bits, as the learner's
expansion does, and sums in another order (https://github.com/vllm-project/vllm, `csrc/cpu/cpu_wna16.cpp`). With the engine's
kernel in the learner, that order is the engine's too. What this is worth is measured in docs/alignment.md.
"""

from importlib.util import find_spec

import torch

from .quantize import LowBitWeight, unpack_int4
from .schemes import QuantScheme


__all__ = ["LEARNER_KERNELS", "check_vllm_kernel", "vllm_linear", "vllm_operands"]

LEARNER_KERNELS = ("auto", "torch", "vllm")
"""`"auto"` takes `"torch"` on every platform measured so far."""


def check_vllm_kernel(scheme: QuantScheme, dtype: torch.dtype, device: torch.device, shape: torch.Size) -> None:
    """
    Raise unless vLLM's kernel can run a layer.

    Args:
        scheme ([`QuantScheme`]):
            The layer's scheme.
        dtype (`torch.dtype`):
            Dtype of its activations.
        device (`torch.device`):
            Device of its weight.
        shape (`torch.Size`):
            `(N, K)` of its weight.

    Raises:
        ValueError: naming what is not met.
    """
    for is_met, reason in (
        (find_spec("vllm") is not None, "vLLM is not installed"),
        (scheme.name == "w4a16", f"it is for scheme 'w4a16', not {scheme.name!r}"),
        (device.type == "cpu", f"it has been measured on CPUs only, not on {device.type!r}"),
        (torch.cpu._is_avx512_supported(), "this processor has no AVX512"),
        (dtype in (torch.bfloat16, torch.float16), f"it takes 16-bit activations, not {dtype}; set bf16=True"),
        (shape[0] % 32 == 0 and shape[1] % 32 == 0, f"a weight has shape {tuple(shape)}, not multiples of 32"),
    ):
        if not is_met:
            raise ValueError(f"learner_kernel='vllm' cannot be used: {reason}. Use 'auto' or 'torch'.")


def vllm_operands(low_bit: LowBitWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, blocks of 16 output channels with 8 codes per int32, and `(K / group_size, N)` scales, as the kernel reads them."""
    codes = unpack_int4(low_bit.qdata).t()
    in_features = codes.shape[0]
    shifts = 4 * torch.arange(8, dtype=torch.int32)
    packed = (codes.reshape(in_features, -1, 8) << shifts).sum(-1, dtype=torch.int32)
    packed = packed.view(in_features, -1, 2).permute(1, 0, 2).reshape(-1, in_features * 2).contiguous()
    return packed, low_bit.scale.t().contiguous()


def vllm_linear(
    x: torch.Tensor, bias: torch.Tensor | None, operands: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, str]:
    """`y = x @ w'.T + bias` for activations `(M, K)` with operands of [`vllm_operands`]; `y` and the kernel's name."""
    import vllm._custom_ops as ops

    packed, scale = operands
    isa = "amx" if torch.cpu._is_amx_tile_supported() and x.dtype is torch.bfloat16 else "vec"
    y = ops.cpu_gemm_wna16(
        input=x.contiguous(),
        q_weight=packed,
        scales=scale.to(x.dtype),
        zeros=None,
        bias=None if bias is None else bias.to(x.dtype),
        pack_factor=8,
        isa_hint=isa,
    )
    return y, "vllm::cpu_gemm_wna16"
