"""
The low-bit policy as compressed-tensors names and lays it out: what engine, disk and hub read.

Format: https://github.com/vllm-project/compressed-tensors.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .linear import QuantizedLinear
from .swap import quantized_layers


__all__ = ["has_stacked_experts", "iter_checkpoint_tensors", "quantization_config", "stacked_experts"]


def iter_checkpoint_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of [`checkpoint_state_dict`] one at a time, on the model's device, layer by layer."""
    layers = quantized_layers(model)
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        prefix, _, leaf = name.rpartition(".")
        if leaf == "weight" and prefix in layers:
            for key, value in layers[prefix].checkpoint_tensors().items():
                yield f"{prefix}.{key}", value.detach()
            continue
        identity = (tensor.data_ptr(), tensor.shape)
        if identity in seen:
            continue
        seen.add(identity)
        yield name, (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach()


def quantization_config(model: nn.Module) -> dict[str, Any]:
    """
    The `quantization_config` entry of the model's `config.json`, as compressed-tensors defines it.

    One group when all layers share a group size; otherwise one per size, its layers named by a regular expression.
    """
    layers = quantized_layers(model)
    scheme = next(iter(layers.values())).scheme
    by_group_size: dict[int | None, list[str]] = defaultdict(list)
    for name, layer in layers.items():
        by_group_size[layer.group_size].append(name)
    groups = {}
    for index, (group_size, names) in enumerate(by_group_size.items()):
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if len(by_group_size) == 1 else _targets(names, layers),
            "weights": scheme.weight_args(group_size),
            "input_activations": scheme.activation_args,
            "output_activations": None,
            "format": scheme.format,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in layers],
        "kv_cache_scheme": None,
    }


def _targets(names: list[str], layers: dict[str, QuantizedLinear]) -> list[str]:
    # A last component that occurs in this group alone stands for all layers of that name.
    chosen = set(names)
    leaves = {name.rpartition(".")[2] for name in names}
    shared = {name.rpartition(".")[2] for name in layers if name not in chosen}
    whole = [f"re:.*\\.{re.escape(leaf)}$" for leaf in sorted(leaves - shared)]
    return whole + [name for name in names if name.rpartition(".")[2] in shared]


def has_stacked_experts(model: nn.Module) -> bool:
    """Whether a mixture-of-experts model keeps the matrices of all experts in one tensor, as transformers 5 does."""
    return bool(stacked_experts(model))


def stacked_experts(model: nn.Module) -> list[nn.Parameter]:
    """The tensors that [`has_stacked_experts`] speaks of."""
    return [p for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name]
