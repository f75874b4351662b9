"""FP8 codes: `qdata` is float8_e4m3fn `(N, K)`, in memory and in a checkpoint (`float-quantized`)."""

from functools import lru_cache

import torch

from ..schemes import E4M3
from .base import Format, KernelChoice


class Fp8(Format):
    """FP8 weights with FP8 activations."""

    repeated_on_gpus = experts_in_vllm = (E4M3,)
    # On older GPUs vLLM leaves activations in 16 bits.
    min_capability = (8, 9)

    def pack(self, codes):
        """Round quotients `(N, K)` of weight and scale to E4M3."""
        return codes.to(torch.float8_e4m3fn)

    def unpack(self, qdata, dtype):
        if qdata.is_cuda or dtype.itemsize > 4 or qdata.shape[1] % 2 or not qdata.is_contiguous():
            return qdata.to(dtype)
        # On a CPU one table look-up for two codes is several times faster than PyTorch's conversion.
        patterns = qdata.view(torch.uint16)
        return _pairs(dtype).index_select(0, patterns.flatten().int()).view(patterns.shape).view(dtype)

    def kernels(self, scheme, gpu):
        if gpu.capability < self.min_capability:
            return KernelChoice(
                refusal="vLLM leaves activations in 16 bits below compute capability 8.9 (CompressedTensorsW8A16Fp8), but the learner "
                "quantizes them",
                instead="'w8a8' or 'w4a16'",
            )
        return KernelChoice(("CutlassFP8ScaledMMLinearKernel",), ("TritonOrCutlassExperts", "TritonExperts"))


@lru_cache(maxsize=4)
def _pairs(dtype: torch.dtype) -> torch.Tensor:
    """Two numbers in `dtype` as one integer, for each 16-bit pattern of two codes."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    pairs = patterns.view(torch.float8_e4m3fn).to(dtype)
    return pairs.view(torch.int32 if dtype.itemsize == 2 else torch.int64)


def as_halves(codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers of codes, divided by 256, as float16: sign, exponent and mantissa are in the same places. NaN
    becomes 480 / 256."""
    return codes.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(~0x4000).view(torch.float16)
