"""
Fingerprints of published tensors, and the comparison of what a learner sent with what an engine holds.

A fingerprint reads a tensor's bytes as 64-bit words, mixes each and adds them up with odd factors, modulo 2**64:

    h = word ^ (word >>> 32);  h = h * g;  mix(word) = h ^ (h >>> 29)
    f = sum_c m_c * sum_i a_i * mix(word[c * C + i])        m_c = 2 c + 1, a_i odd and irregular, C words per block

Mixing is a bijection and an odd factor is invertible, so any single changed word changes the sum. Without mixing the top bits of
a word would reach only the top bits of the sum, where those of two words cancel; with it, changes of several words cancel with
a chance of about 2**-60. The order of summation does not matter and everything is integer, so CPU and GPU agree. It finds
transport and layout errors; it is no defence against a forger.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F


__all__ = ["fingerprint", "fingerprint_differences"]

# 256 KiB, which stays in a core's cache while it is mixed.
_BLOCK = 1 << 15
# Numbers of the splitmix64 generator, as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> str:
    """
    Dtype, shape and 64-bit sum of a tensor's bytes, such as `"bfloat16[64, 128] 03c5f0a9d2e14b77"`.

    Args:
        tensor (`torch.Tensor`):
            Any dtype, shape and device.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    data = F.pad(data, (0, -data.numel() % 8)) if data.numel() % 8 else data
    # A view into another tensor may start at any byte; 64-bit words must not.
    words = (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)
    weights = _odd_numbers(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    size = _blocks_at_a_time(words.device) * _BLOCK
    for start in range(0, len(words), size):
        mixed = _mix(words[start : start + size])
        first, whole = start // _BLOCK, len(mixed) // _BLOCK
        if whole > 1:
            sums = (mixed[: whole * _BLOCK].view(whole, _BLOCK) * weights).sum(1)
            total += (sums * (2 * torch.arange(first, first + whole, device=words.device) + 1)).sum()
            first, mixed = first + whole, mixed[whole * _BLOCK :]
        total += mixed.mul_(weights[: len(mixed)]).sum() * (2 * first + 1)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} {int(total) % 2**64:016x}"


def _blocks_at_a_time(device: torch.device) -> int:
    # A CPU wants what its cache holds, a GPU few steps; the sum is the same.
    return 1 if device.type == "cpu" else 256


def _mix(words: torch.Tensor) -> torch.Tensor:
    # torch shifts signed numbers arithmetically; the masks make that `>>>`.
    high = (words >> 32).bitwise_and_((1 << 32) - 1)
    mixed = high.bitwise_xor_(words).mul_(_FACTORS[0])
    return (mixed >> 29).bitwise_and_((1 << 35) - 1).bitwise_xor_(mixed)


@lru_cache(maxsize=8)
def _odd_numbers(device: torch.device) -> torch.Tensor:
    """Odd numbers from splitmix64: those of an arithmetic progression have sums with many trailing zeros."""
    numbers = torch.arange(1, _BLOCK + 1, device=device) * _GOLDEN
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        numbers = (numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (numbers ^ ((numbers >> 31) & ((1 << 33) - 1))) | 1


def fingerprint_differences(expected: Mapping[str, str], received: Mapping[str, str], limit: int = 5) -> list[str]:
    """
    Return what differs between the fingerprints a learner announced and those an engine computed, one line per tensor.

    Args:
        expected (`Mapping[str, str]`):
            The learner's, by checkpoint name.
        received (`Mapping[str, str]`):
            The engine's, by checkpoint name.
        limit (`int`, *optional*, defaults to `5`):
            Longest number of lines of each kind.
    """
    missing = [f"{name}: the engine received nothing" for name in expected.keys() - received.keys()]
    unknown = [f"{name}: the learner did not announce it" for name in received.keys() - expected.keys()]
    changed = [
        f"{name}: learner {expected[name]}, engine {received[name]}"
        for name in expected.keys() & received.keys()
        if expected[name] != received[name]
    ]
    lines = []
    for kind in (missing, unknown, changed):
        lines += sorted(kind)[:limit]
        if len(kind) > limit:
            lines.append(f"... and {len(kind) - limit} more")
    return lines
