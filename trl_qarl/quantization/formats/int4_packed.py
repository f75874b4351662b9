"""
INT4 codes in words: `qdata` is int32 `(N, K / 8)`, eight codes + 8 per word, the first in the lowest bits.

A checkpoint (`pack-quantized`) has the same words as `weight_packed`, and `weight_shape` says `(N, K)`. Codes of fewer bits
are stored as the same numbers, so engines and readers need to know nothing about them.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch


__all__ = [
    "count_flips",
    "from_checkpoint",
    "in_features",
    "look_up",
    "pack",
    "to_checkpoint",
    "unpack",
    "unsigned_codes",
]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Store rounded codes `(N, K)` from -8 to 7."""
    unsigned = (codes.to(torch.int8) + 8).view(torch.uint8).view(codes.shape[0], codes.shape[1] // 2, 2)
    return (unsigned[..., 0] | (unsigned[..., 1] << 4)).view(torch.int32)


def unpack(qdata: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes `(N, K)` in `dtype`, in memory of their own."""
    return look_up(qdata, dtype, tuple(range(-8, 8)))


def look_up(qdata: torch.Tensor, dtype: torch.dtype, values: tuple[float, ...]) -> torch.Tensor:
    """Return what each half byte of `qdata`, `(N, ...)`, stands for, of 16 `values`: `(N, K)` in `dtype`, the lower half first."""
    # One table look-up per 16 bits yields four weights; shifts and masks are four times slower on a CPU.
    table = _table(dtype, qdata.device, values)
    indices = qdata.view(torch.uint16).long()
    values = table.index_select(0, indices.view(-1)) if dtype.itemsize > 2 else table.take(indices)
    return values.view(dtype).view(qdata.shape[0], 2 * qdata.itemsize * qdata.shape[1])


def unsigned_codes(qdata: torch.Tensor) -> torch.Tensor:
    """Return the codes + 8, 0 to 15, `(N, K)` int32."""
    return (unpack(qdata, torch.float32) + 8).int()


def in_features(qdata: torch.Tensor) -> int:
    """Return the number of codes in a row."""
    return 8 * qdata.shape[1]


def count_flips(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Count the codes that differ."""
    changed = (before ^ after).view(torch.uint8)
    return (changed & 0x0F).count_nonzero() + (changed & 0xF0).count_nonzero()


def to_checkpoint(qdata: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name the tensors as a checkpoint does."""
    shape = torch.tensor([qdata.shape[0], in_features(qdata)], device=qdata.device)
    return {"weight_packed": qdata, "weight_scale": scale, "weight_shape": shape}


def from_checkpoint(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `qdata` and `scale` of a layer's tensors."""
    return tensors["weight_packed"], tensors["weight_scale"]


@lru_cache(maxsize=8)
def _table(dtype: torch.dtype, device: torch.device, values: tuple[float, ...]) -> torch.Tensor:
    """Four values for each 16-bit pattern: `(65536,)` int64 for 16-bit dtypes, else `(65536, 4)` in `dtype`."""
    patterns = torch.arange(65536, device=device)
    known = torch.tensor(values, device=device, dtype=dtype)
    table = torch.stack([known[(patterns >> shift) & 15] for shift in (0, 4, 8, 12)], dim=-1)
    return table.view(torch.int64).view(-1) if dtype.itemsize == 2 else table
