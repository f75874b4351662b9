"""
One set of masters read at several precisions, one after the other. Needs no torch.

Grids with signed scales nest: the scale of `b` bits is the largest weight of a group over `-2^(b-1)`, so that of 3 bits is twice that of
4 and that of 2 four times, exactly. In one container a change of precision is other codes and scales of the same shapes: an engine
that was started for 4 bits runs 3 and 2 as they are published, and each comes from the masters.

| written | precision |
|---|---|
| `[4, 3]` | of one generation batch after the other, in turn |
| `{0: 4, 60: 3}` | of the batches that begin at this update or later |
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from .plan import QuantPlan
from .schemes import GRIDS, SCHEMES, QuantScheme


__all__ = [
    "at_bits",
    "bits_of",
    "parse_precisions",
    "plan_at_bits",
    "precision_at",
    "problems_of_precisions",
    "set_precision",
]

Precisions = list[int] | dict[int, int]


class _Layer(Protocol):
    quantized_weights: Mapping[str, Any]


def parse_precisions(value: Any) -> Precisions | None:
    """
    Return the precisions that an option says: a list, or a mapping whose keys are numbers; JSON of either, as on a command line.

    Raises:
        ValueError: for anything else, and for a mapping that does not begin at update 0.
    """
    if value is None:
        return None
    written = value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(
                f"precisions={written!r} is not JSON ({error}). Write '[4, 3]' or '{{\"0\": 4}}'."
            ) from error
    if isinstance(value, Mapping):
        try:
            value = dict(sorted((int(update), bits) for update, bits in value.items()))
        except (TypeError, ValueError):
            raise ValueError(f"precisions={written!r}: keys are numbers of updates, as in {{0: 4, 60: 3}}.") from None
        if 0 not in value or min(value) < 0:
            raise ValueError(f"precisions={written!r} must say the precision from update 0 on, as in {{0: 4, 60: 3}}.")
    if not isinstance(value, list | tuple | dict) or not value or any(type(bits) is not int for bits in _bits(value)):
        raise ValueError(
            f"precisions={written!r} is neither a list of bits, [4, 3], nor bits by updates, {{0: 4, 60: 3}}."
        )
    return value if isinstance(value, dict) else list(value)


def _bits(precisions: Any) -> Iterable[Any]:
    return precisions.values() if isinstance(precisions, dict) else precisions


def bits_of(precisions: Precisions) -> list[int]:
    """Return the bits that occur in `precisions`, most first."""
    return sorted(set(_bits(precisions)), reverse=True)


def problems_of_precisions(precisions: Precisions, plan: QuantPlan, max_steps: int) -> Iterator[str]:
    """Yield what is wrong with `precisions` for the schemes of `plan` and a run of `max_steps` updates, -1 for an unknown number."""
    nesting = [scheme.grid.num_bits for scheme in plan.schemes if scheme.grid and scheme.grid.has_signed_scales]
    if not nesting:
        signed = [name for name, scheme in SCHEMES.items() if scheme.grid and scheme.grid.has_signed_scales]
        yield (
            f"precisions={precisions} with scheme {plan.name!r}: no grid of fewer bits nests in its own, which only grids with signed "
            f"scales do. Choose one of {signed}."
        )
        return
    allowed = sorted(
        grid.num_bits for grid in GRIDS.values() if grid.has_signed_scales and grid.num_bits <= max(nesting)
    )
    for bits in dict.fromkeys(_bits(precisions)):
        if bits not in allowed:
            yield (
                f"precisions={precisions} has {bits} bits, which no layer of scheme {plan.name!r} can have: an engine keeps the container "
                f"it was started with. Choose from {allowed}."
            )
    if isinstance(precisions, dict) and 0 < max_steps <= max(precisions):
        yield (
            f"precisions={precisions} changes at update {max(precisions)}, and training ends after max_steps={max_steps}. Remove the "
            "change, or raise `max_steps`."
        )


def precision_at(precisions: Precisions, update: int, updates_per_batch: int) -> int:
    """Return the bits of the generation batch that begins after `update` updates."""
    if isinstance(precisions, dict):
        return precisions[max(start for start in precisions if start <= update)]
    return precisions[update // updates_per_batch % len(precisions)]


def at_bits(scheme: QuantScheme, bits: int) -> QuantScheme:
    """Return `scheme` with the grid of `bits` bits that nests in its own; itself where it has no more, or no such grid."""
    grid = scheme.grid
    if grid is None or not grid.has_signed_scales or grid.num_bits <= bits:
        return scheme
    coarser = next(other for other in GRIDS.values() if replace(grid, name=other.name, num_bits=bits) == other)
    parts = (coarser, scheme.container, scheme.activation)
    name = next(name for name, other in SCHEMES.items() if (other.grid, other.container, other.activation) == parts)
    return replace(scheme, name=name, grid=coarser)


def plan_at_bits(plan: QuantPlan, bits: int) -> QuantPlan:
    """Return `plan` with each of its schemes at `bits` bits at most."""
    return replace(plan, rules=tuple((pattern, at_bits(scheme, bits)) for pattern, scheme in plan.rules))


def set_precision(layers: Mapping[str, _Layer], schemes: Mapping[str, QuantScheme], bits: int | None) -> bool:
    """
    Have layers quantize their masters at `bits` bits from now on, and return whether that changes any.

    Args:
        layers (`Mapping[str, QuantizedLayer]`):
            Quantized layers by name.
        schemes (`Mapping[str, QuantScheme]`):
            The scheme that each was prepared with.
        bits (`int` or `None`):
            Bits of the layers whose grid nests; `None` for what they were prepared with.
    """
    has_changed = False
    for name, layer in layers.items():
        scheme = schemes[name] if bits is None else at_bits(schemes[name], bits)
        for weight in layer.quantized_weights.values():
            if weight.scheme != scheme:
                weight.scheme, has_changed = scheme, True
                weight.invalidate()
    return has_changed
