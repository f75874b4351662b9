"""
INT8 codes: `qdata` is int8 `(N, K)`. A checkpoint has the same bytes (`int-quantized`), or words (`pack-quantized`):
`weight_packed` is int32 `(N, K / 4)`, four codes + 128 per word, the first in the lowest bits, and `weight_shape` is
`(N, K)`.
"""

import torch

from ..schemes import INT8
from .base import Format, KernelChoice, fits_cpu_kernels
from .int4_packed import integer_kernels


KERNEL, KERNEL_MAX_ROWS, KERNEL_FEATURES = "aten::_weight_int8pack_mm", 16, 16
KERNEL_ALIGNMENT = 32  # bytes: 16 activations in bf16, one aligned load


class Int8(Format):
    """INT8 weights with INT8 activations."""

    repeated_on_gpus = experts_in_vllm = (INT8,)
    # `update_weight_conversions` of transformers' quantizer for compressed-tensors looks for `weight_packed` wherever
    # codes are integers (5.17).
    experts_in_transformers = False

    def kernels(self, scheme, gpu):
        if gpu.capability >= (10, 0):
            return KernelChoice(
                refusal="vLLM's kernel (CutlassInt8ScaledMMLinearKernel) has no INT8 on Blackwell and throws at the first forward",
                instead="'fp8', 'w8a16' or 'w4a16'",
            )
        return KernelChoice(("CutlassInt8ScaledMMLinearKernel",), ("TritonExperts",))


class Int8Packed(Format):
    """INT8 weights with 16-bit activations."""

    checkpoint_names = ("weight_packed", "weight_scale", "weight_shape")
    gguf_type = "Q8_0"

    def to_checkpoint(self, qdata, scale, *operands):
        # Adding 128 to a two's complement byte flips its top bit.
        packed = (qdata.view(torch.uint8) ^ 0x80).view(torch.int32)
        return super().to_checkpoint(qdata, scale) | {"weight_packed": packed}

    def from_checkpoint(self, tensors):
        return (tensors["weight_packed"].view(torch.uint8) ^ 0x80).view(torch.int8), tensors["weight_scale"]

    def multiply(self, x, weight, row_invariant):
        codes = weight.qdata
        fits = (
            fits_cpu_kernels(x, weight)
            and (row_invariant or len(x) <= KERNEL_MAX_ROWS)
            # Otherwise the kernel reads beyond each row: wrong numbers on some processors, a crash on others.
            and x.shape[1] % KERNEL_FEATURES == 0
            and codes.is_contiguous()
            and codes.data_ptr() % KERNEL_ALIGNMENT == 0
        )
        if not fits:
            return None
        x = x.contiguous()
        if x.data_ptr() % KERNEL_ALIGNMENT:
            x = x.clone()
        return torch._weight_int8pack_mm(x, codes, weight.scale.view(-1)), KERNEL

    def kernels(self, scheme, gpu):
        return integer_kernels(gpu)
