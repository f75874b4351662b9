"""
INT4 codes in words: `qdata` is int32 `(N, K / 8)`, eight codes + 8 per word, the first in the lowest bits.

A checkpoint (`pack-quantized`) has the same words as `weight_packed`, and `weight_shape` says `(N, K)`. Codes of fewer bits
are stored as the same numbers, so engines and readers need to know nothing about them.

`to_words` packs these without gaps, as `trl-qarl export --compact` writes them: code `i` of `b` bits, plus `2^(b - 1)`, begins at bit `b i` of
the row, as vLLM and compressed-tensors from 0.19 on have it (https://github.com/vllm-project/compressed-tensors/pull/732).
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
    "to_words",
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
    """Return `qdata` and `scale` of a layer's tensors; `weight_shape` tells whether codes have fewer bits."""
    words, scale = tensors["weight_packed"], tensors["weight_scale"]
    if "weight_shape" not in tensors or (num_codes := int(tensors["weight_shape"][1])) == in_features(words):
        return words, scale
    return _from_words(words, 32 * words.shape[1] // num_codes), scale


def to_words(qdata: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Return codes of 2 or 3 bits, `K` of them a multiple of 32, in words without gaps: int32 `(N, num_bits K / 32)`."""
    places = torch.arange(8, device=qdata.device)
    eights = (unsigned_codes(qdata) - 8 + 2 ** (num_bits - 1)).unflatten(1, (-1, 8)) << num_bits * places
    # Eight codes fill as many bytes as each has bits.
    eight_bytes = eights.sum(dim=-1, keepdim=True) >> 8 * places[:num_bits]
    return (eight_bytes & 0xFF).to(torch.uint8).flatten(1).view(torch.int32)


def _from_words(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Return the inverse of [`to_words`]."""
    places = torch.arange(8, device=words.device)
    eight_bytes = words.contiguous().view(torch.uint8).unflatten(1, (-1, num_bits)).long()
    eights = (eight_bytes << 8 * places[:num_bits]).sum(dim=-1, keepdim=True)
    codes = (eights >> num_bits * places) & (2**num_bits - 1)
    return pack(codes.flatten(1) - 2 ** (num_bits - 1))


@lru_cache(maxsize=8)
def _table(dtype: torch.dtype, device: torch.device, values: tuple[float, ...]) -> torch.Tensor:
    """Four values for each 16-bit pattern: `(65536,)` int64 for 16-bit dtypes, else `(65536, 4)` in `dtype`."""
    patterns = torch.arange(65536, device=device)
    known = torch.tensor(values, device=device, dtype=dtype)
    table = torch.stack([known[(patterns >> shift) & 15] for shift in (0, 4, 8, 12)], dim=-1)
    return table.view(torch.int64).view(-1) if dtype.itemsize == 2 else table
