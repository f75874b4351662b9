"""
INT8 codes that a checkpoint packs into words (`pack-quantized`).

`qdata` is int8 `(N, K)`; in a checkpoint `weight_packed` is int32 `(N, K / 4)`, four codes + 128 per word, the first in the
lowest bits, and `weight_shape` says `(N, K)`.
"""

from collections.abc import Mapping

import torch

from .int8 import count_flips, in_features, pack, unpack


__all__ = ["count_flips", "from_checkpoint", "in_features", "pack", "to_checkpoint", "unpack"]


def to_checkpoint(qdata: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name and lay out the tensors as a checkpoint does."""
    # Adding 128 to a two's complement byte flips its top bit.
    packed = (qdata.view(torch.uint8) ^ 0x80).view(torch.int32)
    return {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_shape": torch.tensor(list(qdata.shape), device=qdata.device),
    }


def from_checkpoint(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `qdata` and `scale` of a layer's tensors."""
    return (tensors["weight_packed"].view(torch.uint8) ^ 0x80).view(torch.int8), tensors["weight_scale"]
