"""Weights on a grid with signed scales, in numpy. The rule is that of llama.cpp's Q4_0:
https://github.com/ggml-org/llama.cpp/pull/729."""

import numpy as np


def round_to_bfloat16(x):
    """Float32 numbers to the nearest that bfloat16 has, ties to even, as float32."""
    bits = x.astype(np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


ROUND = {
    "float32": lambda x: x,
    "bfloat16": round_to_bfloat16,
    "float16": lambda x: x.astype(np.float16).astype(np.float32),
}
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def naive_signed(weight, group_size, num_bits, scale_dtype):
    """
    Scales `(N, K / group_size)` as float32, codes `(N, K)` as int64, and the quotients that were rounded, as float64.

    The division is float32's, as it is by definition; the quotients show that it is no more than that.
    """
    groups = weight.astype(np.float32).reshape(len(weight), -1, group_size)
    where = np.abs(groups).argmax(-1)
    extreme = np.take_along_axis(groups, where[..., None], -1)[..., 0]
    # Of a number and its negative, the negative.
    has_negative = (groups == -np.abs(extreme)[..., None]).any(-1)
    extreme = np.where(has_negative, -np.abs(extreme), extreme)
    smallest, largest = -(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1
    with np.errstate(over="ignore", invalid="ignore"):
        scale = ROUND[scale_dtype]((extreme.astype(np.float64) / smallest).astype(np.float32))
        scale = np.where(scale == 0, np.float32(EPS[scale_dtype]), scale)
        codes = np.clip(np.rint(groups / scale[..., None]), smallest, largest)
        quotients = groups.astype(np.float64) / scale[..., None].astype(np.float64)
    return scale, codes.reshape(weight.shape).astype(np.int64), quotients.reshape(weight.shape)
