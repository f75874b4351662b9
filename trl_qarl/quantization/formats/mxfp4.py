"""
FP4 codes with powers of two as scales: `qdata` is uint8 `(N, K / 2)`, two E2M1 codes per byte, the first in the lower half.

A code is its sign and the number of its magnitude among 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Scales are uint8 `(N, K / 32)`: the power `e` of
2^(e - 127), E8M0 in other words, for which not all of PyTorch has a dtype. A checkpoint (`mxfp4-pack-quantized`) has the same bytes.
"""

from collections.abc import Mapping

import torch

from .int4_packed import count_flips, look_up


__all__ = ["count_flips", "from_checkpoint", "in_features", "pack", "to_checkpoint", "unpack"]

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Round quotients `(N, K)` of weight and scale, float32, to E2M1: to the nearest code, of two as near to the even one."""
    size = codes.abs()
    bits = size.view(torch.int32)
    # From 1 on, exponent and first bit of the mantissa count magnitudes, of which 1 is the third; below, they are halves.
    rounded = (bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22
    one = 127 << 1
    index = torch.where(rounded < one, size.mul_(2).round_().int(), (rounded - (one - 2)).clamp_(max=7))
    nibbles = (index + 8 * (codes < 0)).to(torch.uint8).view(codes.shape[0], codes.shape[1] // 2, 2)
    return nibbles[..., 0] | (nibbles[..., 1] << 4)


def unpack(qdata: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes `(N, K)` in `dtype`, in memory of their own."""
    return look_up(qdata, dtype, (*MAGNITUDES, *(-size for size in MAGNITUDES)))


def in_features(qdata: torch.Tensor) -> int:
    """Return the number of codes in a row."""
    return 2 * qdata.shape[1]


def to_checkpoint(qdata: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name the tensors as a checkpoint does."""
    return {"weight_packed": qdata, "weight_scale": scale}


def from_checkpoint(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `qdata` and `scale` of a layer's tensors."""
    return tensors["weight_packed"], tensors["weight_scale"]
