"""INT8 codes as in `int8_packed`, with a zero point for each group: int8 `(N, K / group_size)`, from -128 to 127."""

from .base import KernelChoice
from .int8_packed import Words
from .zero_points import ZeroPoints


__all__ = ["Int8ZeroPoints"]


class Int8ZeroPoints(ZeroPoints, Words):
    """INT8 weights with zero points."""

    codes_per_word = 4

    def kernels(self, scheme, gpu):
        if gpu.capability == (9, 0):
            return KernelChoice(linear=("MacheteLinearKernel",))
        return KernelChoice(
            refusal="vLLM runs it with Humming (HummingLinearKernel) there, whose reload has not been rehearsed",
            instead="'w4a16-asym' or 'w8a16'",
        )
