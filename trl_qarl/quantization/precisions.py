"""
Quantization of one set of masters at several precisions, one after the other. Needs no torch.

Grids with signed scales nest: scales of 3 bits are exactly twice those of 4 bits, scales of 2 bits four times. In one
container a change of precision means other codes and scales of the same shapes, which an engine runs without change.

Precisions are written as `[4, 3]`, for generation batches in turn, or as `{0: 4, 60: 3}`, for batches from these
updates on. A precision is a number of bits for all layers, or a mapping from patterns of names to bits. Layers that no
pattern matches have the bits of their scheme.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from operator import mul
from typing import Any

from .plan import QuantPlan, check_pattern, matching_names, pattern_of
from .schemes import SCHEMES, QuantScheme


Precision = int | dict[str, int]
Precisions = list[Precision] | dict[int, Precision]
NESTING_BITS = tuple(sorted((scheme.grid.num_bits for scheme in SCHEMES.values() if scheme.nests), reverse=True))
"""Bits of the schemes that nest, most first."""


def parse_precisions(value: Any) -> Precisions | None:
    """Return the precisions of an option, which may be JSON: a list, or a mapping whose keys are numbers. `ValueError`
    is raised for anything else, also inside, and for a mapping that does not begin at update 0."""
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
    if not isinstance(value, list | tuple | dict) or not value or any(type(bits) is not int for bits in _bits(value)):
        raise ValueError(
            f"precisions={written!r} is neither a list of bits, [4, 3], nor bits by updates, {{0: 4, 60: 3}}. Bits are a number, or "
            "numbers by patterns of layers' names, {'re:.*layers[.]0[.].*': 3}."
        )
    for pattern in _patterns(value):
        check_pattern(pattern, "precisions")
    return value if isinstance(value, dict) else list(value)


def _each(precisions: Any) -> Iterable[Any]:
    return precisions.values() if isinstance(precisions, dict) else precisions


def _bits(precisions: Any) -> Iterator[Any]:
    for precision in _each(precisions):
        # An empty mapping is not a precision.
        yield from precision.values() if isinstance(precision, Mapping) and precision else [precision]


def _patterns(precisions: Any) -> list[Any]:
    return list(dict.fromkeys(pattern for of in _each(precisions) if isinstance(of, Mapping) for pattern in of))


def bits_of(precisions: Precisions) -> list[int]:
    """Return the bits that occur in `precisions`, most first."""
    return sorted(set(_bits(precisions)), reverse=True)


def problems_of_precisions(precisions: Precisions, plan: QuantPlan, max_steps: int) -> Iterator[str]:
    """Yield problems of `precisions` with the schemes of `plan` and with `max_steps` updates, -1 for any number."""
    nesting = [scheme.grid.num_bits for scheme in plan.schemes if scheme.nests]
    if not nesting:
        nested = [name for name, scheme in SCHEMES.items() if scheme.nests]
        yield (
            f"precisions={precisions} with scheme {plan.name!r}: no scheme of fewer bits nests in it. Choose one of {nested}."
        )
        return
    allowed = sorted(bits for bits in NESTING_BITS if bits <= max(nesting))
    for bits in dict.fromkeys(_bits(precisions)):
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


def problems_of_patterns(precisions: Precisions, schemes: Mapping[str, QuantScheme]) -> Iterator[str]:
    """Yield the patterns of `precisions` that change nothing in a model whose quantized layers have `schemes`."""
    nesting = [name for name, scheme in schemes.items() if scheme.nests]
    for pattern in _patterns(precisions):
        try:
            matching_names(pattern, "precisions", nesting, "layers whose bits can change")
        except ValueError as error:
            yield str(error)


def precision_at(precisions: Precisions, update: int, updates_per_batch: int) -> Precision:
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


def mean_bits(layers: Iterable[Any]) -> tuple[float, bool]:
    """Return the mean bits of the weights in quantized `layers` whose grids nest, and whether they differ."""
    weights = [weight for layer in layers for weight in layer.quantized_weights.values()]
    nesting = [weight for weight in weights if weight.scheme.nests]
    bits = [weight.scheme.grid.num_bits for weight in nesting]
    sizes = [weight.shape.numel() for weight in nesting]
    return sum(map(mul, sizes, bits)) / sum(sizes), len(set(bits)) > 1


def set_precision(layers: Mapping[str, Any], schemes: Mapping[str, QuantScheme], precision: Precision | None) -> bool:
    """Set the precision at which quantized layers quantize their masters, `None` for that of their preparation, and
    return whether any layer changes. `schemes` has the scheme with which each layer was prepared."""
    has_changed = False
    for name, layer in layers.items():
        bits = precision.get(pattern_of(precision, name) or "") if isinstance(precision, Mapping) else precision
        scheme = schemes[name] if bits is None else at_bits(schemes[name], bits)
        for weight in layer.quantized_weights.values():
            if weight.scheme != scheme:
                weight.scheme, has_changed = scheme, True
                weight.invalidate()
    return has_changed
