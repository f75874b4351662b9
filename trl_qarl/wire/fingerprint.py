"""
Fingerprints of published tensors, and their comparison between learner and engine.

A fingerprint reads a tensor's bytes as 64-bit words, mixes each and adds them up with odd factors, modulo 2**64:

    h = word ^ (word >>> 32);  h = h * g;  mix(word) = h ^ (h >>> 29)
    f = sum_c m_c * sum_i a_i * mix(word[c * C + i])        m_c = 2 c + 1, a_i odd and irregular, C words per block

Mixing is a bijection and an odd factor is invertible, so any single changed word changes the sum. Without mixing, the
top bits of a word would reach only the top bits of the sum, where two words cancel; with it, changes of several words
cancel with a probability of about 2**-60. Integer sums do not depend on their order, so CPU and GPU agree. A
fingerprint detects transport and layout errors, not forgery.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from .protocol import EACH


_BLOCK = 1 << 15
# Blocks per step on a GPU, and words per step on a CPU: half a block, 128 KiB, stays in the cache while it is mixed.
_BLOCKS_AT_A_TIME, _IN_CACHE = 256, 1 << 14
# Constants of the splitmix64 generator, as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def fingerprint(tensor: torch.Tensor) -> str:
    """
    Return dtype, shape and 64-bit sum of a tensor's bytes, such as `"bfloat16[64, 128] 03c5f0a9d2e14b77"`, for any
    dtype, shape and device. A tensor of three dimensions, such as the matrices of all experts, has one sum for each
    entry of the first, joined by hyphens, so that differing entries can be named.
    """
    return fingerprints([("", tensor)])[""]


@torch.no_grad()
def fingerprints(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the [`fingerprint`] of each tensor by its name, waiting only once for each device."""
    described, sums = {}, {}
    for name, tensor in tensors:
        described[name] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        sums[name] = _sums(_words(tensor.detach() if tensor.ndim == 3 else tensor.detach()[None]))
    values: dict[str, list[int]] = {}
    for device in {total.device for total in sums.values()}:
        names = [name for name, total in sums.items() if total.device == device]
        rest = torch.cat([sums[name] for name in names]).tolist()
        for name in names:
            values[name], rest = rest[: len(sums[name])], rest[len(sums[name]) :]
    return {
        name: f"{kind} {'-'.join(f'{total % 2**64:016x}' for total in values[name])}"
        for name, kind in described.items()
    }


def _words(entries: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each entry of the first dimension, padded with zeros to 64-bit words: `(entries, words)`."""
    if not entries.numel():
        return torch.zeros(len(entries), 0, dtype=torch.int64, device=entries.device)
    data = entries.contiguous().view(len(entries), -1).view(torch.uint8)
    data = F.pad(data, (0, -data.shape[1] % 8)) if data.shape[1] % 8 else data
    # A view into another tensor may start at any byte; 64-bit words must not.
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


def _sums(words: torch.Tensor) -> torch.Tensor:
    if words.device.type != "cpu":
        return _sums_in_steps(words)
    totals = np.array([_sum_in_cache(entry) for entry in words.numpy().view(np.uint64)], dtype=np.uint64)
    return torch.from_numpy(totals.view(np.int64))


def _sum_in_cache(words: np.ndarray) -> int:
    """Return the sum of one entry on a CPU, in half of torch's steps: NumPy has unsigned shifts and needs no memory
    for products. Threads do not help with steps this short."""
    weights = _odd_numbers(torch.device("cpu")).numpy().view(np.uint64)
    total, (high, mixed) = 0, np.empty((2, min(_IN_CACHE, len(words))), dtype=np.uint64)
    for start in range(0, len(words), _IN_CACHE):
        part = words[start : start + _IN_CACHE]
        h, m = high[: len(part)], mixed[: len(part)]
        np.bitwise_xor(np.right_shift(part, np.uint64(32), out=h), part, out=m)
        np.multiply(m, np.uint64(_FACTORS[0] % 2**64), out=m)
        np.bitwise_xor(np.right_shift(m, np.uint64(29), out=h), m, out=m)
        place = start % _BLOCK
        np.multiply(m, weights[place : place + len(part)], out=m)
        total += int(np.add.reduce(m)) * (2 * (start // _BLOCK) + 1)
    return total % 2**64


def _sums_in_steps(words: torch.Tensor) -> torch.Tensor:
    """Return the sums of all entries on a GPU, in few steps."""
    weights = _odd_numbers(words.device)
    totals = torch.zeros(len(words), dtype=torch.int64, device=words.device)
    size = _BLOCKS_AT_A_TIME * _BLOCK
    num_words = words.shape[1]
    # Short entries are mixed together.
    at_a_time = max(size // max(num_words, 1), 1)
    for rows, total in zip(words.split(at_a_time), totals.split(at_a_time), strict=True):
        for start in range(0, num_words, size):
            mixed = _mix(rows[:, start : start + size])
            first, whole = start // _BLOCK, mixed.shape[1] // _BLOCK
            if whole:
                sums = (mixed[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)) * weights).sum(2)
                total += (sums * (2 * torch.arange(first, first + whole, device=words.device) + 1)).sum(1)
                first, mixed = first + whole, mixed[:, whole * _BLOCK :]
            total += mixed.mul_(weights[: mixed.shape[1]]).sum(1) * (2 * first + 1)
    return totals


def _mix(words: torch.Tensor) -> torch.Tensor:
    # torch shifts signed numbers arithmetically; the masks turn that into `>>>`.
    high = (words >> 32).bitwise_and_((1 << 32) - 1)
    mixed = high.bitwise_xor_(words).mul_(_FACTORS[0])
    return (mixed >> 29).bitwise_and_((1 << 35) - 1).bitwise_xor_(mixed)


@lru_cache(maxsize=8)
def _odd_numbers(device: torch.device) -> torch.Tensor:
    """Return odd numbers from splitmix64; sums of an arithmetic progression would have many trailing zeros."""
    numbers = torch.arange(1, _BLOCK + 1, device=device) * _GOLDEN
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        numbers = (numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (numbers ^ ((numbers >> 31) & ((1 << 33) - 1))) | 1


def differing_entries(name: str, value: str, other: str) -> Iterator[tuple[str, str, str]]:
    """Yield `name` and two fingerprints if they differ; for tensors of three dimensions each differing entry, such as
    `name[3]`, or the name of the matrices of expert 3."""
    if value == other:
        return
    (kind, _, sums), (other_kind, _, other_sums) = value.rpartition(" "), other.rpartition(" ")
    if kind != other_kind or "-" not in sums:
        yield name, value, other
        return
    for index, (ours, theirs) in enumerate(zip(sums.split("-"), other_sums.split("-"), strict=True)):
        if ours != theirs:
            entry = name.replace(EACH, f".{index}.") if EACH in name else f"{name}[{index}]"
            yield entry, f"{kind} {ours}", f"{kind} {theirs}"


def fingerprint_differences(expected: Mapping[str, str], received: Mapping[str, str], limit: int = 5) -> list[str]:
    """Return the differences between the fingerprints that a learner announced and those that an engine computed, one
    line per tensor, at most `limit` lines of each kind."""
    missing = [f"{name}: the engine received nothing" for name in expected.keys() - received.keys()]
    unknown = [f"{name}: the learner did not announce it" for name in received.keys() - expected.keys()]
    changed = [
        f"{entry}: learner {ours}, engine {theirs}"
        for name in expected.keys() & received.keys()
        for entry, ours, theirs in differing_entries(name, expected[name], received[name])
    ]
    lines = []
    for kind in (missing, unknown, changed):
        lines += sorted(kind)[:limit]
        if len(kind) > limit:
            lines.append(f"... and {len(kind) - limit} more")
    return lines
