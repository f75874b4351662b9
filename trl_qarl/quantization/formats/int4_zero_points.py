"""INT4 codes as in `int4_packed`, with a zero point for each group: int8 `(N, K / group_size)`, from -8 to 7."""

from .int4_packed import HalfBytes, integer_kernels
from .zero_points import ZeroPoints


__all__ = ["Int4ZeroPoints"]


class Int4ZeroPoints(ZeroPoints, HalfBytes):
    """INT4 weights with zero points."""

    codes_per_word = 8

    def kernels(self, scheme, gpu):
        return integer_kernels(gpu)
