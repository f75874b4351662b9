"""
Changes of a layer's tensors since the engine confirmed them last: positions and values, losslessly, in one compressed
block.

The bytes of a tensor are read as elements of one byte, or of two bytes for dtypes of two. A block has only the
elements that changed: their distance from the previous change, and `new - old` modulo 256 or 65536. Elements of two
bytes are sorted by their old exponents, which both sides know: an update moves small numbers by more units in the last
place than large ones, so the changes of each exponent are similarly dense and their distances have a narrow
distribution. Distances and values are compressed by deflate with Huffman codes and runs of one byte only: they have no
repeated strings, but the high bytes of small values are zero, and so are the distances if every element changed.

A block applies only to the tensors that were confirmed. It names the fingerprint of each old tensor, which the
receiver compares with the confirmed one before anything is written; afterwards the fingerprint of the whole result is
compared with the learner's. A checksum detects damage. Needs numpy, and torch only for [`elements`].
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np


DELTA_PREFIX = "qarl.delta."
"""Prefix in the name of a block; the name of its layer follows."""

# Elements at a time: their order takes 16 MiB.
_BLOCK = 1 << 21
# Changes at a time.
_CHUNK = 1 << 18
# Distances from this one on are written in four bytes.
_FAR = 255
_STREAMS = ("distances", "far", "bytes", "low", "high")
_MAGIC = b"QDL2"


def is_delta(name: str) -> bool:
    """Return whether a published tensor is a block of changes."""
    return name.startswith(DELTA_PREFIX)


def base_digest(fingerprints: Mapping[str, str]) -> str:
    """Return a hexadecimal digest of a complete set of fingerprints by name; the empty string without any."""
    listed = json.dumps(sorted(fingerprints.items())).encode()
    return hashlib.sha256(listed).hexdigest() if fingerprints else ""


def elements(tensor) -> np.ndarray:
    """Return the memory of a contiguous `torch.Tensor` on the CPU as a 1-D array, `uint16` for dtypes of two bytes,
    else `uint8`."""
    import torch

    return tensor.view(-1).view(torch.uint16 if tensor.dtype.itemsize == 2 else torch.uint8).numpy()


def pack_delta(tensors: Sequence[tuple[str, str, np.ndarray, np.ndarray]]) -> tuple[bytes, list[str]]:
    """Return the block that turns old tensors into new ones, and the names of those that are smaller sent whole.
    `tensors` are names, fingerprints of the old tensors, and [`elements`] of old and new, of the same length."""
    parts: dict[str, list[bytes]] = {name: [] for name in _STREAMS}
    entries, left_out = [], []
    for name, base, old, new in tensors:
        split = {stream: np.concatenate(pieces) for stream, pieces in _changes(old, new).items()}
        # Runs of zeros cost next to nothing. A block that saves less than an eighth is not worth the work.
        num_bytes = sum(np.count_nonzero(numbers) for stream, numbers in split.items() if stream != "far")
        if 8 * num_bytes >= 7 * old.nbytes or len(old) >= 2**32:
            left_out.append(name)
            continue
        for stream, numbers in split.items():
            parts[stream].append(numbers.tobytes())
        entries.append([name, base, len(old), old.itemsize, len(split["distances"])])
    if not entries:
        return b"", left_out
    packed = [_deflate(b"".join(parts[name])) for name in _STREAMS]
    header = zlib.compress(json.dumps({"tensors": entries, "streams": [*map(len, packed)]}).encode())
    content = b"".join([len(header).to_bytes(4, "little"), header, *packed])
    return _MAGIC + zlib.crc32(content).to_bytes(4, "little") + content, left_out


def apply_delta(block: bytes, held: Mapping[str, np.ndarray], confirmed: Mapping[str, str]) -> list[str]:
    """Turn old tensors into new ones by a block of [`pack_delta`], in place, and return their names. `held` has the
    [`elements`] of old tensors, and `confirmed` their fingerprints, by name. `ValueError` is raised, and nothing
    written, if the block is damaged or made for other tensors."""
    checksum, content = int.from_bytes(block[4:8], "little"), memoryview(block)[8:]
    if block[:4] != _MAGIC or zlib.crc32(content) != checksum:
        raise ValueError(
            "The block of changes is damaged: its beginning or its checksum is wrong. Send or copy it again."
        )
    start = 4 + int.from_bytes(content[:4], "little")
    header = json.loads(zlib.decompress(content[4:start]))
    for name, base, length, itemsize, _ in header["tensors"]:
        if name not in held or confirmed.get(name) != base:
            raise ValueError(
                f"{name}: the changes are for {base}, but {confirmed.get(name, 'nothing')} was confirmed last."
            )
        if (length, itemsize) != (len(held[name]), held[name].itemsize):
            theirs, ours = f"{length} elements of {itemsize} bytes", f"{len(held[name])} of {held[name].itemsize}"
            raise ValueError(f"{name} has another size: the changes are for {theirs}, and {ours} are held.")
    streams = {}
    for stream, size in zip(_STREAMS, header["streams"], strict=True):
        numbers = zlib.decompress(content[start : start + size], wbits=-15)
        streams[stream], start = np.frombuffer(numbers, "<u4" if stream == "far" else np.uint8), start + size
    for name, _, _, itemsize, changed in header["tensors"]:
        distances = _take(streams, "distances", changed)
        far = _take(streams, "far", np.count_nonzero(distances == _FAR))
        values = [_take(streams, stream, changed) for stream in (("bytes",) if itemsize == 1 else ("low", "high"))]
        _write(held[name], _positions(distances, far), values)
    return [name for name, *_ in header["tensors"]]


def _take(streams: dict[str, np.ndarray], name: str, count: int) -> np.ndarray:
    taken, streams[name] = streams[name][:count], streams[name][count:]
    return taken


def _changes(old: np.ndarray, new: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Return the streams of the elements that differ, in the order of `_order`, in pieces."""
    kinds = {"distances": np.uint8, "far": "<u4"} | (
        {"bytes": np.uint8} if old.itemsize == 1 else {"low": np.uint8, "high": np.uint8}
    )
    pieces = {stream: [np.empty(0, kind)] for stream, kind in kinds.items()}
    last = -1
    for start in range(0, len(old), _BLOCK):
        before = old[start : start + _BLOCK]
        after = new[start : start + _BLOCK]
        # NumPy finds the places of booleans ten times as fast as those of numbers.
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
    last = -1
    for start in range(0, len(distances), _CHUNK):
        steps = distances[start : start + _CHUNK].astype(np.int64)
        is_far = steps == _FAR
        steps[is_far], far = np.split(far, [np.count_nonzero(is_far)])
        at = last + np.cumsum(steps + 1)
        last = at[-1]
        yield at


def _write(array: np.ndarray, positions: Iterator[np.ndarray], values: list[np.ndarray]) -> None:
    """Add `values`, bytes or low and high bytes, block by block in the order of its old elements."""
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
    """Sort numbers of two bytes by exponent, which bfloat16 has in the eight bits below the sign."""
    return np.argsort((elements >> 7).astype(np.uint8), kind="stable")


def _deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    return packer.compress(data) + packer.flush()
