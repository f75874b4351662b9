"""
Quantization of one set of masters at several precisions, one after the other. Needs no torch.

Grids with signed scales nest: scales of 3 bits are exactly twice those of 4 bits, scales of 2 bits four times. In one
container a change of precision means other codes and scales of the same shapes, which an engine runs without change.

Precisions are written as `[4, 3]`, for generation batches in turn, or as `{0: 4, 60: 3}`, for batches from these
updates on.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .plan import QuantPlan
from .schemes import SCHEMES, QuantScheme


Precisions = list[int] | dict[int, int]


def parse_precisions(value: Any) -> Precisions | None:
    """Return the precisions of an option, which may be JSON: a list, or a mapping whose keys are numbers. `ValueError`
    is raised for anything else, and for a mapping that does not begin at update 0."""
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
            value = dict(sorted((int(str(update)), bits) for update, bits in value.items()))
        except (TypeError, ValueError):
            raise ValueError(f"precisions={written!r}: keys are numbers of updates, as in {{0: 4, 60: 3}}.") from None
        if 0 not in value or min(value) < 0:
            raise ValueError(f"precisions={written!r} must say the precision from update 0 on, as in {{0: 4, 60: 3}}.")
    bits = value.values() if isinstance(value, dict) else value
    if not isinstance(value, list | tuple | dict) or not value or any(type(number) is not int for number in bits):
        raise ValueError(
            f"precisions={written!r} is neither a list of bits, [4, 3], nor bits by updates, {{0: 4, 60: 3}}. Write one of them."
        )
    return value if isinstance(value, dict) else list(value)


def problems_of_precisions(precisions: Precisions, plan: QuantPlan, max_steps: int) -> Iterator[str]:
    """Yield problems of `precisions` with the schemes of `plan` and with `max_steps` updates, -1 for any number."""
    nesting = [scheme.grid.num_bits for scheme in plan.schemes if scheme.nests]
    bits_by_name = {name: scheme.grid.num_bits for name, scheme in SCHEMES.items() if scheme.nests}
    if not nesting:
        yield (
            f"precisions={precisions} with scheme {plan.name!r}: no scheme of fewer bits nests in it. Choose one of {[*bits_by_name]}."
        )
        return
    allowed = sorted(bits for bits in bits_by_name.values() if bits <= max(nesting))
    for bits in dict.fromkeys(precisions.values() if isinstance(precisions, dict) else precisions):
        if bits not in allowed:
            yield (
                f"precisions={precisions} has {bits} bits, which no layer of scheme {plan.name!r} can have: an engine keeps the container "
                f"with which it was started. Choose from {allowed}."
            )
    if isinstance(precisions, dict) and 0 < max_steps <= max(precisions):
        yield (
            f"precisions={precisions} changes at update {max(precisions)}, but training ends after max_steps={max_steps}. Remove the "
            "change, or raise `max_steps`."
        )


def precision_at(precisions: Precisions, update: int, updates_per_batch: int) -> int:
    """Return the precision of the generation batch that begins after `update` updates."""
    if isinstance(precisions, dict):
        return precisions[max(start for start in precisions if start <= update)]
    return precisions[update // updates_per_batch % len(precisions)]


def at_bits(scheme: QuantScheme, bits: int) -> QuantScheme:
    """Return `scheme` with the grid of `bits` bits that nests in its own; `scheme` itself without such a grid."""
    if not scheme.nests or scheme.grid.num_bits <= bits:
        return scheme
    coarser = next(other for other in SCHEMES.values() if other.nests and other.grid.num_bits == bits)
    return replace(coarser, group_size=scheme.group_size)


def plan_at_bits(plan: QuantPlan, bits: int) -> QuantPlan:
    """Return `plan` with each of its schemes at `bits` bits at most."""
    return replace(plan, rules=tuple((pattern, at_bits(scheme, bits)) for pattern, scheme in plan.rules))


def set_precision(layers: Mapping[str, Any], schemes: Mapping[str, QuantScheme], bits: int | None) -> bool:
    """Set the bits at which quantized layers quantize their masters, `None` for those of their preparation, and return
    whether any layer changes. `schemes` has the scheme with which each layer was prepared."""
    has_changed = False
    for name, layer in layers.items():
        scheme = schemes[name] if bits is None else at_bits(schemes[name], bits)
        for weight in layer.quantized_weights.values():
            if weight.scheme != scheme:
                weight.scheme, has_changed = scheme, True
                weight.invalidate()
    return has_changed
