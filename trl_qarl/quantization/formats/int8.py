"""INT8 codes as they are: `qdata` is int8 `(N, K)`, in memory and in a checkpoint (`int-quantized`)."""

from collections.abc import Mapping

import torch


__all__ = ["count_flips", "from_checkpoint", "in_features", "pack", "to_checkpoint", "unpack"]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Store rounded codes `(N, K)`."""
    return codes.to(torch.int8)


def unpack(qdata: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes `(N, K)` in `dtype`, in memory of their own."""
    return qdata.to(dtype)


def in_features(qdata: torch.Tensor) -> int:
    """Return the number of codes in a row."""
    return qdata.shape[1]


def count_flips(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Count the codes that differ."""
    return (before.view(torch.uint8) != after.view(torch.uint8)).count_nonzero()


def to_checkpoint(qdata: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name the tensors as a checkpoint does."""
    return {"weight": qdata, "weight_scale": scale}


def from_checkpoint(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `qdata` and `scale` of a layer's tensors."""
    return tensors["weight"], tensors["weight_scale"]
