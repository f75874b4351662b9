"""
FP4 codes with scales in two parts: `qdata` as in `mxfp4`, scales float8_e4m3fn `(N, K / 16)`, all divided by one power of two.

A checkpoint (`nvfp4-pack-quantized`) has codes and scales as they are, and the divisor as `weight_global_scale`, float32 `(1,)`.
"""

from collections.abc import Mapping

import torch

from .mxfp4 import count_flips, in_features, pack, unpack


__all__ = ["count_flips", "from_checkpoint", "in_features", "pack", "to_checkpoint", "unpack"]


def to_checkpoint(qdata: torch.Tensor, scale: torch.Tensor, global_scale: float) -> dict[str, torch.Tensor]:
    """Name the tensors as a checkpoint does."""
    divisor = torch.tensor([global_scale], dtype=torch.float32, device=qdata.device)
    return {"weight_packed": qdata, "weight_scale": scale, "weight_global_scale": divisor}


def from_checkpoint(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return `qdata`, `scale` and the divisor of a layer's tensors."""
    return tensors["weight_packed"], tensors["weight_scale"], tensors["weight_global_scale"].item()
