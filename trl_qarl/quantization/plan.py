"""
Assigns a scheme to each layer by ordered patterns of names, like torchao's `FqnToConfig`. Needs no torch.

A pattern is the whole name of a layer, `"re:"` and a regular expression over whole names, or `"_default"` for all
layers that no other pattern fits. A plan is written as the name of one scheme, or as a mapping from patterns to
schemes: names, `{"scheme": "w4a16", "group_size": 32}`, or `None` for scheme `"bf16"`. Layers that no pattern matches
stay in high precision.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..models import FUSED
from .schemes import SCHEMES, QuantScheme, get_scheme


DEFAULT = "_default"
_EXPRESSION = "re:"
_HIGH_PRECISION = SCHEMES["bf16"]


@dataclass(frozen=True)
class QuantPlan:
    """A scheme for every layer; made by [`get_plan`]. `rules` are patterns and their schemes, in order."""

    rules: tuple[tuple[str, QuantScheme], ...]

    @classmethod
    def of_layers(cls, schemes: Mapping[str, QuantScheme]) -> "QuantPlan":
        """Return the plan of layers with these schemes: one rule if all are the same, else one for each layer."""
        one = set(schemes.values())
        return cls(((DEFAULT, one.pop()),) if len(one) == 1 else tuple(schemes.items()))

    @property
    def schemes(self) -> tuple[QuantScheme, ...]:
        """The quantized schemes of the plan, each once, in the order of its rules."""
        return tuple(dict.fromkeys(scheme for _, scheme in self.rules if scheme.is_quantized))

    @property
    def is_quantized(self) -> bool:
        """True if the plan changes any weight."""
        return bool(self.schemes)

    @property
    def is_uniform(self) -> bool:
        """True if every layer has the same scheme."""
        return len(self.rules) == 1 and self.rules[0][0] == DEFAULT

    @property
    def name(self) -> str:
        """Names of its schemes, each once, such as `"w4a16-w8a8"`, for folders, cards and reports."""
        return "-".join(dict.fromkeys(scheme.name for scheme in self.schemes)) or _HIGH_PRECISION.name

    @property
    def group_size(self) -> int | None:
        """Group size of a plan that is written as the name of one scheme; `None` for a mapping."""
        return self.rules[0][1].group_size if self.is_uniform else None

    @property
    def option_value(self) -> str | dict[str, Any]:
        """The plan without `group_size` in a form for JSON, from which [`get_plan`] makes it again."""
        if self.is_uniform:
            return self.rules[0][1].name
        return {
            pattern: {"scheme": scheme.name, "group_size": scheme.group_size} if scheme.group_size else scheme.name
            for pattern, scheme in self.rules
        }

    @property
    def summary(self) -> dict[str, Any]:
        """Entries `scheme` and, for a mapping, `layers`, for reports and cards."""
        if self.is_uniform:
            return {"scheme": self.name}
        return {"scheme": self.name, "layers": self.option_value}

    def assign(
        self,
        names: Iterable[str],
        skipped: Mapping[str, str],
        parts: Mapping[str, Sequence[Sequence[str]]] | None = None,
        outside: Mapping[str, str] | None = None,
    ) -> tuple[dict[str, QuantScheme], dict[str, str]]:
        """
        Return the scheme of each quantized layer among the linear layers `names`, and the reason for each other one.

        `skipped` has the reasons of layers that are never quantized. `outside` has those of layers around a language
        model, which stay in high precision unless a pattern matches only such layers. `parts` are as in
        [`matches_whole`]. `ValueError` is raised if a pattern matches no layer, only some parts of one, or with a
        quantized scheme only skipped layers.
        """
        names, parts, outside = list(names), parts or {}, outside or {}
        rules, hits = dict(self.rules), dict[str, set[str]]()
        for pattern, scheme in self.rules:
            if pattern == DEFAULT:
                continue
            said, fits = f"scheme: pattern {pattern!r}", re.compile(_expression(pattern)).fullmatch
            found = [name for name in names if matches_whole(fits, name, parts.get(name, ()), said)]
            hits[pattern] = set(found)
            if not found:
                example = next(iter(names), "")
                raise ValueError(
                    f"{said} matches none of the {len(names)} linear layers. Give a whole name, such as {example!r}, or an expression over "
                    f"whole names, such as 're:.*{example.rpartition('.')[2]}'."
                )
            if scheme.is_quantized and all(name in skipped for name in found):
                left = sorted({skipped[name] for name in found})
                raise ValueError(
                    f"{said} asks for {scheme.name!r} but matches only layers that are not quantized, such as {found[0]!r} "
                    f"({'; '.join(left)}). Remove it."
                )
        # A name comes before expressions, the first of which counts.
        ordered = sorted(hits, key=lambda pattern: pattern.startswith(_EXPRESSION))
        # `re:.*mlp.*` is meant for the decoder's layers, although vision towers have MLPs too.
        of_outside = [pattern for pattern in ordered if outside.keys() >= hits[pattern]]
        schemes: dict[str, QuantScheme] = {}
        reasons: dict[str, str] = {}
        for name in names:
            if name in skipped:
                continue
            default = DEFAULT if DEFAULT in rules and name not in outside else None
            pattern = next((p for p in (of_outside if name in outside else ordered) if name in hits[p]), default)
            scheme = rules.get(pattern or "", _HIGH_PRECISION)
            if scheme.is_quantized:
                schemes[name] = scheme
            elif pattern is None:
                reasons[name] = outside.get(name, "matches no pattern")
            else:
                reasons[name] = f"bf16 by {pattern!r}"
        return schemes, reasons


def get_plan(scheme: "str | QuantScheme | QuantPlan | Mapping[str, Any]", group_size: int | None = None) -> QuantPlan:
    """
    Make a plan from one scheme for every layer, or from schemes by patterns as above. A plan is returned as it is.
    `group_size` applies to each scheme with groups that does not name its own. `ValueError` is raised for an unknown
    scheme, a group size that no kernel accepts or no scheme takes, or an invalid expression.
    """
    if isinstance(scheme, QuantPlan):
        if group_size is not None:
            raise ValueError(f"group_size={group_size}: the schemes of a plan have theirs. Remove it.")
        return scheme
    if isinstance(scheme, Mapping):
        return QuantPlan(tuple(_rules(scheme, group_size)))
    if not isinstance(scheme, str | QuantScheme):
        raise ValueError(
            f"scheme={scheme!r} is neither the name of a scheme nor a mapping from patterns to names. Choose one of "
            f"{sorted(SCHEMES)}."
        )
    return QuantPlan(((DEFAULT, get_scheme(scheme, group_size)),))


def parse_scheme(text: Any) -> Any:
    """Return a scheme from a command line: JSON becomes a mapping, other text stays; `ValueError` for broken JSON."""
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f'scheme={text!r} is not JSON ({error}). Write it as \'{{"re:.*mlp.*": "w4a16", "_default": "w8a8"}}\'.'
        ) from error


def check_fused(schemes: Mapping[str, QuantScheme], names: Iterable[str]) -> None:
    """Raise `ValueError` if layers that vLLM fuses do not share a scheme: it would apply the first one's to all.
    `schemes` has the scheme of each quantized layer, `names` are those of all linear layers."""
    for group in fused_layers(names):
        found = {name: schemes.get(name, _HIGH_PRECISION) for name in group}
        if len(set(found.values())) > 1:
            sizes = {name: f" in groups of {s.group_size}" if s.group_size else "" for name, s in found.items()}
            listed = ", ".join(f"{name} is {scheme.name}{sizes[name]}" for name, scheme in found.items())
            leaves = " and ".join(name.rpartition(".")[2] for name in group)
            raise ValueError(
                f"{listed}: vLLM holds {leaves} of a layer in one matrix, which has one scheme. Give them the same."
            )


def fused_layers(names: Iterable[str]) -> Iterable[list[str]]:
    """Group the names of layers by the matrices that vLLM makes of them."""
    groups = defaultdict(list)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        groups[next((f"{parent}.{'+'.join(leaves)}" for leaves in FUSED if leaf in leaves), name)].append(name)
    return groups.values()


def _rules(mapping: Mapping[str, Any], group_size: int | None) -> Iterable[tuple[str, QuantScheme]]:
    if not mapping:
        raise ValueError("scheme={} quantizes nothing. Name a scheme, or patterns with schemes.")
    has_groups = False
    for pattern, value in mapping.items():
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(
                f"scheme: {pattern!r} is not a pattern. Give names of layers, 're:' and an expression, or '_default'."
            )
        try:
            re.compile(_expression(pattern))
            scheme, size = _parts(value)
            own = get_scheme(scheme)
            has_groups |= own.group_size is not None
            if size is None and own.group_size is not None:
                size = group_size
            yield pattern, get_scheme(own, size)
        except re.error as error:
            raise ValueError(
                f"scheme: {pattern!r} is not a valid regular expression ({error}). Correct what follows 're:'."
            ) from error
        except ValueError as error:
            raise ValueError(f"scheme: {pattern!r}: {error}") from None
    if group_size is not None and not has_groups:
        raise ValueError(f"group_size={group_size} was given, but no scheme of the plan has groups. Remove it.")


def _parts(value: Any) -> tuple[str | QuantScheme, int | None]:
    if value is None:
        return _HIGH_PRECISION, None
    if isinstance(value, str | QuantScheme):
        return value, None
    is_pair = isinstance(value, Mapping) and set(value) <= {"scheme", "group_size"}
    if is_pair and isinstance(value.get("scheme"), str | QuantScheme):
        return value["scheme"], value.get("group_size")
    raise ValueError(f"{value!r} is neither a scheme's name, None, nor {{'scheme': NAME, 'group_size': NUMBER}}.")


def plan_of(options: Mapping[str, Any]) -> QuantPlan:
    """Return the plan in a command's options or in a record."""
    return get_plan(options["scheme"], options.get("group_size"))


def _expression(pattern: str) -> str:
    return pattern[len(_EXPRESSION) :] if pattern.startswith(_EXPRESSION) else re.escape(pattern)


def matches_whole(fits: Callable[[str], Any], name: str, parts: Sequence[Sequence[str]], said: str) -> bool:
    """Return whether a pattern matches the name of a layer, or the names of all parts in one of the lists `parts`.
    `ValueError` is raised if it matches only some parts; the message calls the pattern `said`."""
    if fits(name):
        return True
    fitting = [[part for part in way if fits(part)] for way in parts]
    if any(found and len(found) == len(way) for found, way in zip(fitting, parts, strict=True)):
        return True
    some = next((found for found in fitting if found), None)
    if some:
        raise ValueError(
            f"{said} matches {some[0]!r}, but not all parts of {name!r}: all experts of a layer are quantized together, with gate, up "
            f"and down projection. Name them as a whole, such as {name!r}."
        )
    return False
