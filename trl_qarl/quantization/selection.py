"""Which layers of a model are left alone."""

import re
from collections.abc import Sequence
from contextlib import suppress

from torch import nn
from transformers import PreTrainedModel

from .names import base_model


__all__ = ["ROUTER_NAMES", "reasons_to_skip", "stacked_experts"]

ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
"""Last name components of MoE routers. Compared whole: a pattern such as `gate*` would also match `gate_proj`."""


def reasons_to_skip(
    model: nn.Module, linears: dict[str, nn.Linear], exclude_modules: str | Sequence[str] | None
) -> dict[str, str]:
    """
    Return why each of the linear layers of `model`, by name, that stay in high precision does so.

    Raises:
        ValueError: if an exclude pattern matches none of them.
    """
    model = base_model(model)
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    embedding_weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    excluded = _excluded(linears, exclude_modules)
    reasons = {}
    for name, module in linears.items():
        leaf = name.rpartition(".")[2]
        if module is head or leaf == "lm_head":
            reasons[name] = "output head"
        elif id(module.weight) in embedding_weights:
            reasons[name] = "shares the embedding's weight"
        elif leaf in ROUTER_NAMES:
            reasons[name] = "router"
        elif name in excluded:
            reasons[name] = "exclude_modules"
        elif type(module) is not nn.Linear:
            reasons[name] = f"{type(module).__name__} has a forward of its own"
        elif module.weight.numel() == 0:
            reasons[name] = "no weights"
    return reasons


def stacked_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Tensors, by name, in which a mixture-of-experts model keeps the matrices of all experts, as transformers 5 does."""
    return {name: p for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name}


def _excluded(linears: dict[str, nn.Linear], patterns: str | Sequence[str] | None) -> set[str]:
    if not patterns:
        return set()
    excluded = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = {name for name in linears if name == pattern or name.endswith(f".{pattern}")}
        # A name such as `*_proj` is no regular expression.
        with suppress(re.error):
            hits = hits or {name for name in linears if re.fullmatch(pattern, name)}
        if not hits:
            raise ValueError(
                f"exclude_modules: {pattern!r} matches none of the {len(linears)} linear layers. Give names or last "
                f"components, such as {next(iter(linears)).rpartition('.')[2]!r}, or a regular expression over the "
                "whole name."
            )
        excluded |= hits
    return excluded
