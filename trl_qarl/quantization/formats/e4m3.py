"""FP8 codes as they are: `qdata` is float8_e4m3fn `(N, K)`, in memory and in a checkpoint (`float-quantized`)."""

import torch

from .int8 import count_flips, from_checkpoint, in_features, to_checkpoint, unpack


__all__ = ["count_flips", "from_checkpoint", "in_features", "pack", "to_checkpoint", "unpack"]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Round quotients `(N, K)` of weight and scale to E4M3."""
    return codes.to(torch.float8_e4m3fn)
