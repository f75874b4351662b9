"""
Fingerprints of published tensors, and the comparison of what a learner sent with what an engine holds.

A fingerprint reads a tensor's bytes as 64-bit words and adds them up, weighted by odd numbers, modulo 2**64:

    f = sum_c m_c * sum_i a_i * word[c * C + i]        a_i = (2 i + 1) * g, m_c = 2 c + 1, C words per block

Any single changed word changes the sum, because an odd factor is invertible modulo 2**64; the order of summation does not
matter, so CPU and GPU agree. It finds transport and layout errors; it is no defence against a forger.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F


__all__ = ["config_differences", "fingerprint", "fingerprint_differences"]

_BLOCK = 1 << 18
_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as a signed 64-bit number


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
    weights = _weights(words.device)
    total = 0
    for index, block in enumerate(words.split(_BLOCK)):
        total += (2 * index + 1) * int((block * weights[: block.numel()]).sum())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} {total % 2**64:016x}"


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    return (2 * torch.arange(_BLOCK, device=device) + 1) * _GOLDEN


def fingerprint_differences(expected: Mapping[str, str], received: Mapping[str, str], limit: int = 5) -> list[str]:
    """
    What differs between the fingerprints a learner announced and those an engine computed, one line per tensor.

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


def config_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """
    What differs between two `quantization_config` entries in a way that changes numbers, as `"setting: ours, theirs"`.

    Args:
        ours (`Mapping[str, Any]`):
            The learner's, from [`~trl_qarl.export.quantization_config`]; empty for an unquantized model.
        theirs (`Mapping[str, Any]`):
            The engine's.
    """
    lines = []
    for name in ("quant_method", "format"):
        if ours.get(name) != theirs.get(name):
            lines.append(f"{name}: learner {ours.get(name)!r}, engine {theirs.get(name)!r}")
    our_groups, their_groups = (list(config.get("config_groups", {}).values()) for config in (ours, theirs))
    if len(our_groups) != len(their_groups):
        lines.append(f"config_groups: learner {len(our_groups)}, engine {len(their_groups)}")
    for our_group, their_group in zip(our_groups, their_groups, strict=False):
        if sorted(our_group["targets"]) != sorted(their_group["targets"]):
            lines.append(f"targets: learner {our_group['targets']}, engine {their_group['targets']}")
        for part in ("weights", "input_activations"):
            lines += _args_differences(part, our_group.get(part) or {}, their_group.get(part) or {})
    if set(ours.get("ignore", [])) != set(theirs.get("ignore", [])):
        lines.append(
            f"exclude list: learner {sorted(ours.get('ignore', []))}, engine {sorted(theirs.get('ignore', []))}"
        )
    return lines


def _args_differences(part: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    names = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic")
    return [
        f"{part}.{name}: learner {ours.get(name)!r}, engine {theirs.get(name)!r}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
