"""Selects the layers that stay in high precision."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch import nn
from transformers import PreTrainedModel

from .experts import DOWN, GATE_UP, QuantizedExperts, experts_format, problem_of_experts
from .inventory import Inventory
from .patterns import covers
from .schemes import QuantScheme
from .storage import shapes_of


ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
"""Last name components of MoE routers. They are compared whole, as `gate*` would also match `gate_proj`."""

EXPERT_LEAVES = ("gate_proj", "up_proj", "down_proj")


def parts_of_experts(layers: Mapping[str, nn.Module]) -> dict[str, list[list[str]]]:
    """Return the names of the matrices in each module of experts among `layers`, one by one and stacked. A pattern
    that matches only some of them does not match the module."""
    return {
        name: [
            [f"{name}.{expert}.{leaf}" for expert in range(module.num_experts) for leaf in EXPERT_LEAVES],
            [f"{name}.{leaf}" for leaf in (GATE_UP, DOWN)],
        ]
        for name, module in layers.items()
        if isinstance(module, QuantizedExperts)
        or (not isinstance(module, nn.Linear) and problem_of_experts(module) is None)
    }


def layer_format(module: nn.Module, scheme: QuantScheme) -> tuple[QuantScheme, int | None]:
    """Return scheme and group size of a layer under `scheme`; `ValueError` is raised if no group size fits."""
    if isinstance(module, nn.Linear):
        return scheme, scheme.group_size_for(module.in_features)
    return experts_format(module, scheme)


def layers_around(inventory: Inventory) -> dict[str, str]:
    """Return the quantizable layers outside the language model, such as those of a vision tower and its connector,
    with the reason why they stay in high precision unless a plan names them."""
    model = inventory.model
    if not isinstance(model, PreTrainedModel) or model.config.get_text_config() is model.config:
        return {}
    inside = {*model.get_decoder().modules(), model.get_output_embeddings()}
    return {
        name: "outside the language model" for name, module in inventory.quantizable.items() if module not in inside
    }


def reasons_to_skip(inventory: Inventory, exclude_modules: str | Sequence[str] | None) -> dict[str, str]:
    """Return the reason for each quantizable layer that stays in high precision. `ValueError` is raised if an exclude
    pattern matches no layer, or only some of the experts of one."""
    model, layers = inventory.model, inventory.quantizable
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    embedding_weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    excluded = _excluded(layers, exclude_modules)
    reasons = {}
    for name, module in layers.items():
        leaf = name.rpartition(".")[2]
        if not isinstance(module, nn.Linear):
            kind = type(module).__name__
            if name in excluded:
                reasons[name] = "exclude_modules"
            elif problem := problem_of_experts(module):
                reasons[name] = f"{kind}: {problem}"
            elif isinstance(model, PreTrainedModel) and f"{name}.{GATE_UP}" not in inventory.names.experts:
                reasons[name] = (
                    f"{kind}: checkpoints stack the matrices of all experts in one tensor, which has no low-bit form"
                )
        elif module is head or leaf == "lm_head":
            reasons[name] = "output head"
        elif id(module.weight) in embedding_weights:
            reasons[name] = "shares the embedding's weight"
        elif leaf in ROUTER_NAMES:
            reasons[name] = "router"
        elif name in excluded:
            reasons[name] = "exclude_modules"
        elif type(module) is not nn.Linear:
            reasons[name] = f"{type(module).__name__} has its own forward"
        elif shapes_of(module).get("weight", module.weight.shape).numel() == 0:
            reasons[name] = "no weights"
    return reasons


def _excluded(layers: Mapping[str, nn.Module], patterns: str | Sequence[str] | None) -> set[str]:
    if not patterns:
        return set()
    parts = parts_of_experts(layers)
    excluded = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        said = f"exclude_modules: {pattern!r}"
        named = re.compile(rf"(.*\.)?{re.escape(pattern)}").fullmatch
        hits = {name for name in layers if covers(named, name, parts.get(name, []), said)}
        # A name such as `*_proj` is not a regular expression.
        with suppress(re.error):
            expression = re.compile(pattern).fullmatch
            hits = hits or {name for name in layers if covers(expression, name, parts.get(name, []), said)}
        if not hits:
            raise ValueError(
                f"{said} matches none of the {len(layers)} linear layers. Give names or last components, such as "
                f"{next(iter(layers)).rpartition('.')[2]!r}, or a regular expression over the whole name."
            )
        excluded |= hits
    return excluded
