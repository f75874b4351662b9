"""INT8 codes as they are: `qdata` is int8 `(N, K)`, in memory and in a checkpoint (`int-quantized`)."""

from ..schemes import INT8
from .base import Format, KernelChoice


__all__ = ["Int8"]


class Int8(Format):
    """INT8 weights that meet INT8 activations."""

    repeated_on_gpus = experts_in_vllm = (INT8,)
    # `update_weight_conversions` of its quantizer for compressed-tensors looks for `weight_packed` wherever codes are
    # integers (5.17).
    experts_in_transformers = False

    def kernels(self, scheme, gpu):
        if gpu.capability >= (10, 0):
            return KernelChoice(
                refusal="the kernel that vLLM takes (CutlassInt8ScaledMMLinearKernel) has no INT8 on Blackwell and throws at the "
                "first forward",
                instead="'fp8', 'w8a16' or 'w4a16'",
            )
        return KernelChoice(("CutlassInt8ScaledMMLinearKernel",), ("TritonExperts",))
