"""Packs 3- and 2-bit codes into 3 and 2 bits for readers that support it. Everywhere else these codes have INT4's
container."""

from typing import Any

import torch

from ..quantization.experts import QuantizedExperts
from ..quantization.formats.int4_packed import to_words
from ..quantization.inventory import Inventory
from ..quantization.schemes import INT4_PACKED, QuantScheme
from ..wire.describe import scheme_of_group


__all__ = ["compact", "is_compact", "problem_of_compact"]


def _is_coarse(scheme: QuantScheme) -> bool:
    return scheme.container == INT4_PACKED and scheme.grid.num_bits < scheme.container.num_bits


def problem_of_compact(inventory: Inventory) -> str | None:
    """Return why the codes of a model cannot be packed closer, or `None`."""
    for name, module in inventory.layers.items():
        if isinstance(module, QuantizedExperts) and _is_coarse(module.scheme):
            return f"experts ({name!r}) with scheme {module.scheme.name!r} can be read only in INT4's container. Leave the option out."
    schemes = [scheme for scheme, _ in inventory.formats.values()]
    if not any(map(_is_coarse, schemes)):
        names = list(dict.fromkeys(scheme.name for scheme in schemes))
        return f"no layer has codes of 3 or 2 bits, only {names or ['bf16']}. Add --bits 3 or --bits 2, or leave the option out."
    return None


def compact(inventory: Inventory, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Pack codes of 3 and 2 bits with [`~trl_qarl.quantization.formats.int4_packed.to_words`], in place, in tensors of
    a model under their names in a checkpoint, and say so in its `quantization_config`. It must have no
    [`problem_of_compact`]."""
    for name, (scheme, _) in inventory.formats.items():
        if _is_coarse(scheme):
            key = f"{inventory.names.of_tensor(name)}.weight_packed"
            tensors[key] = to_words(tensors[key], scheme.grid.num_bits)
    for name, group in config["config_groups"].items():
        scheme = scheme_of_group(name, group)
        if _is_coarse(scheme):
            group["weights"]["num_bits"] = scheme.grid.num_bits


def is_compact(config: dict[str, Any]) -> bool:
    """Return whether a `quantization_config` is one of [`compact`]; others of 3 and 2 bits are for transformers to
    read."""
    return any(
        weights["num_bits"] < INT4_PACKED.num_bits and scheme_of_group(name, group) is not None
        for name, group in config.get("config_groups", {}).items()
        if (weights := group.get("weights"))
    )
