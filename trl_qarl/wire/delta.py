"""
Changes of a layer's tensors since the engine confirmed them last: positions and values, losslessly, in one compressed
block.

A tensor's bytes are read as elements of one byte, or of two where the dtype has two. What is sent of it are the
elements that changed: how far each is from the one before, and `new - old` modulo 256 or 65536. Elements of two bytes
are taken in the order of their old exponents, which both sides know: an update moves small numbers by more units in
the last place than large ones, so that changed elements are dense among the former, and the distances of each exponent
have a narrow distribution. Distances and values go through deflate with only Huffman codes and runs of one byte: no
strings repeat in them, but the high bytes of small values are all zero, and so are the distances where everything
changed.

Only the tensor that was confirmed turns into the new one. A block therefore names the fingerprint of each tensor that
it changes, and whoever applies it compares that with what was confirmed, before anything is written; and the
fingerprint of the whole result with the learner's. Needs numpy, and torch only for [`elements`].
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np


__all__ = ["DELTA_PREFIX", "apply_delta", "base_digest", "elements", "is_delta", "pack_delta"]

DELTA_PREFIX = "qarl.delta."
"""A tensor whose name begins so is a block for the layer named after it."""

# Elements at a time: their order takes 16 MiB.
_BLOCK = 1 << 21
# Changes at a time.
_CHUNK = 1 << 18
# A distance of this much or more is written in four bytes of its own.
_FAR = 255
_STREAMS = ("distances", "far", "bytes", "low", "high")
_MAGIC = b"QDL1"


def is_delta(name: str) -> bool:
    """Return whether a published tensor is a block of changes."""
    return name.startswith(DELTA_PREFIX)


def base_digest(fingerprints: Mapping[str, str]) -> str:
    """Return one number for a complete set of fingerprints by name, in hexadecimal digits, or the empty string."""
    listed = json.dumps(sorted(fingerprints.items())).encode()
    return hashlib.sha256(listed).hexdigest() if fingerprints else ""


def elements(tensor) -> np.ndarray:
    """Return the memory of a contiguous `torch.Tensor` on the CPU as a 1-D array: `uint16` for a dtype of two bytes,
    else `uint8`."""
    import torch

    return tensor.view(-1).view(torch.uint16 if tensor.dtype.itemsize == 2 else torch.uint8).numpy()


def pack_delta(tensors: Sequence[tuple[str, str, np.ndarray, np.ndarray]]) -> tuple[bytes, list[str]]:
    """
    Return the block that turns old tensors into new ones, and the names of those that are left out of it: where most
    elements changed by much, the new tensor is smaller.

    Args:
        tensors (`Sequence[tuple[str, str, np.ndarray, np.ndarray]]`):
            Name, fingerprint of the old tensor, and the bytes of old and new as 1-D arrays of the same length, `uint8`
            or `uint16`.
    """
    parts: dict[str, list[bytes]] = {name: [] for name in _STREAMS}
    entries, left_out = [], []
    for name, base, old, new in tensors:
        split = {stream: np.concatenate(pieces) for stream, pieces in _changes(old, new).items()}
        # Zeros come in runs, which cost next to nothing. Less than an eighth is not worth the work.
        num_bytes = sum(np.count_nonzero(numbers) for stream, numbers in split.items() if stream != "far")
        if 8 * num_bytes >= 7 * old.nbytes or len(old) >= 2**32:
            left_out.append(name)
            continue
        for stream, numbers in split.items():
            parts[stream].append(numbers.tobytes())
        entries.append([name, base, len(old), old.itemsize, len(split["distances"])])
    if not entries:
        return b"", left_out
    streams = [b"".join(parts[name]) for name in _STREAMS]
    packed = [_deflate(stream) for stream in streams]
    sizes = [[len(stream), len(data)] for stream, data in zip(streams, packed, strict=True)]
    header = zlib.compress(json.dumps({"tensors": entries, "streams": sizes}).encode())
    return b"".join([_MAGIC, len(header).to_bytes(4, "little"), header, *packed]), left_out


def apply_delta(block: bytes, held: Mapping[str, np.ndarray], confirmed: Mapping[str, str]) -> list[str]:
    """
    Turn old tensors into new ones, in place, and return their names.

    Args:
        block (`bytes`):
            From [`pack_delta`]; it may have been changed on its way.
        held (`Mapping[str, np.ndarray]`):
            The bytes of the old tensors, as 1-D arrays of `uint8` or `uint16` by name.
        confirmed (`Mapping[str, str]`):
            Fingerprints of what is in `held`, by name.

    Raises:
        ValueError: if the block is damaged, or made for other tensors than those. Nothing is written then.
    """
    entries, packed = _read(block, held, confirmed)
    if 4 * packed["distances"].count(_FAR) != len(packed["far"]):
        raise ValueError("The block of changes is damaged: its distances do not fit together.")
    streams = {name: np.frombuffer(data, "<u4" if name == "far" else np.uint8) for name, data in packed.items()}
    split = []
    for name, _, length, itemsize, changed in entries:
        distances = _take(streams, "distances", changed)
        far = _take(streams, "far", np.count_nonzero(distances == _FAR))
        if changed + distances.sum(dtype=np.int64) + far.sum(dtype=np.int64) - _FAR * len(far) > length:
            raise ValueError(f"The block of changes is damaged: it changes more of {name} than there is.")
        values = [_take(streams, stream, changed) for stream in (("bytes",) if itemsize == 1 else ("low", "high"))]
        split.append((name, distances, far, values))
    for name, distances, far, values in split:
        _write(held[name], _positions(distances, far), values)
    return [name for name, *_ in split]


def _read(block: bytes, held, confirmed) -> tuple[list[list[Any]], dict[str, bytes]]:
    """Header and streams of a block, checked as far as possible before unpacking."""
    damaged = "The block of changes is damaged"
    if block[:4] != _MAGIC:
        raise ValueError(f"{damaged}: it does not begin as one.")
    size = int.from_bytes(block[4:8], "little")
    try:
        header = json.loads(_inflate(zlib.decompressobj(), block[8 : 8 + size], 2**26))
        entries = [
            [str(name), str(base), int(length), int(itemsize), int(changed)]
            for name, base, length, itemsize, changed in header["tensors"]
        ]
        sizes = [(int(length), int(packed)) for length, packed in header["streams"]]
        if len(sizes) != len(_STREAMS):
            raise ValueError(f"it has {len(sizes)} streams.")
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise ValueError(f"{damaged}: {error}") from error
    for name, base, length, itemsize, changed in entries:
        if name not in held or confirmed.get(name) != base:
            raise ValueError(
                f"{name}: the changes are for {base}, but {confirmed.get(name, 'nothing')} was confirmed last."
            )
        if (length, itemsize) != (len(held[name]), held[name].itemsize) or not 0 <= changed <= length:
            raise ValueError(f"{damaged}: {name} has another size.")
    names = [name for name, *_ in entries]
    if len(set(names)) != len(names):
        raise ValueError(f"{damaged}: it names a tensor twice.")
    narrow = sum(changed for *_, itemsize, changed in entries if itemsize == 1)
    total = sum(changed for *_, changed in entries)
    wanted = dict(zip(_STREAMS, (total, None, narrow, total - narrow, total - narrow), strict=True))
    streams, start = {}, 8 + size
    for (name, count), (length, packed) in zip(wanted.items(), sizes, strict=True):
        if length != count and not (count is None and 0 <= length <= 4 * total):
            raise ValueError(f"{damaged}: its {name} are of another number.")
        try:
            streams[name] = _inflate(zlib.decompressobj(-15), block[start : start + packed], length)
        except (ValueError, zlib.error) as error:
            raise ValueError(f"{damaged}: {error}") from error
        if len(streams[name]) != length:
            raise ValueError(f"{damaged}: its {name} end too early.")
        start += packed
    if start != len(block):
        raise ValueError(f"{damaged}: it has {len(block)} bytes instead of {start}.")
    return entries, streams


def _take(streams: dict[str, np.ndarray], name: str, count: int) -> np.ndarray:
    """The next `count` numbers of a stream."""
    taken, streams[name] = streams[name][:count], streams[name][count:]
    return taken


def _changes(old: np.ndarray, new: np.ndarray) -> dict[str, list[np.ndarray]]:
    """The streams of the elements that differ, in the order of `_order`, piece by piece."""
    kinds = {"distances": np.uint8, "far": "<u4"} | (
        {"bytes": np.uint8} if old.itemsize == 1 else {"low": np.uint8, "high": np.uint8}
    )
    pieces = {stream: [np.empty(0, kind)] for stream, kind in kinds.items()}
    last = -1
    for start in range(0, len(old), _BLOCK):
        before = old[start : start + _BLOCK]
        after = new[start : start + _BLOCK]
        # Of booleans, which numpy finds ten times as fast.
        has_changed = after != before
        if not has_changed.any():
            continue
        if old.itemsize == 2:
            order = _order(before)
            at = np.flatnonzero(has_changed[order])
            there = order[at]
        else:
            there = at = np.flatnonzero(has_changed)
        values, distances = after[there] - before[there], np.diff(at, prepend=last - start) - 1
        last = start + int(at[-1])
        pieces["far"].append(distances[distances >= _FAR].astype("<u4"))
        pieces["distances"].append(np.minimum(distances, _FAR).astype(np.uint8))
        if old.itemsize == 1:
            pieces["bytes"].append(values)
            continue
        signed = values.view(np.int16)
        zigzag = ((signed << 1) ^ (signed >> 15)).view(np.uint16)
        pieces["low"].append(zigzag.astype(np.uint8))
        pieces["high"].append((zigzag >> 8).astype(np.uint8))
    return pieces


def _positions(distances: np.ndarray, far: np.ndarray) -> Iterator[np.ndarray]:
    """Positions of changes, in chunks, from the gaps between them."""
    last = -1
    for start in range(0, len(distances), _CHUNK):
        steps = distances[start : start + _CHUNK].astype(np.int64)
        is_far = steps == _FAR
        steps[is_far], far = np.split(far, [np.count_nonzero(is_far)])
        at = last + np.cumsum(steps + 1)
        last = at[-1]
        yield at


def _write(array: np.ndarray, positions: Iterator[np.ndarray], values: list[np.ndarray]) -> None:
    """Add `values`, bytes or low and high ones, a block at a time, whose order is that of its old elements."""
    at, used = np.empty(0, np.int64), 0
    for start in range(0, len(array), _BLOCK):
        part, pieces = array[start : start + _BLOCK], [at]
        while not len(pieces[-1]) or pieces[-1][-1] < start + _BLOCK:
            if (piece := next(positions, None)) is None:
                break
            pieces.append(piece)
        at = np.concatenate(pieces)
        count = np.searchsorted(at, start + _BLOCK)
        here, at = at[:count] - start, at[count:]
        added = [stream[used : used + count] for stream in values]
        used += count
        if not count:
            continue
        if array.itemsize == 1:
            part[here] += added[0]
            continue
        zigzag = added[0] | (added[1].astype(np.uint16) << 8)
        part[_order(part)[here]] += (zigzag >> 1) ^ (-(zigzag & 1).astype(np.int16)).view(np.uint16)


def _order(elements: np.ndarray) -> np.ndarray:
    """Numbers of two bytes in the order of their exponents; bfloat16 has its eight bits of it below the sign."""
    return np.argsort((elements >> 7).astype(np.uint8), kind="stable")


def _deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    return packer.compress(data) + packer.flush()


def _inflate(unpacker, data: bytes, limit: int) -> bytes:
    # One byte more would tell of what goes on after the limit; nothing at all is a limit of its own for zlib.
    content = unpacker.decompress(data, limit + 1)
    if not unpacker.eof or unpacker.unused_data or len(content) > limit:
        raise ValueError("a stream of it is cut off, or goes on after its end.")
    return content
