"""
The low-bit policy as compressed-tensors names and lays it out: what engine, disk and hub read.

Format: https://github.com/vllm-project/compressed-tensors.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..quantization.linear import QuantizedLinear
from ..quantization.names import base_modules
from ..quantization.schemes import QuantScheme, group_name
from ..quantization.selection import stacked_experts
from ..quantization.tensors import LowBitTensor
from ..quantization.walk import LayerWeights, iter_layers


__all__ = [
    "has_stacked_experts",
    "iter_checkpoint_layers",
    "iter_checkpoint_tensors",
    "quantization_config",
    "quantized_formats",
]


def iter_checkpoint_layers(model: nn.Module, dtype: torch.dtype) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """
    Yield the tensors of the low-bit policy under their names in a checkpoint, a layer at a time, on the model's device. What is not
    quantized is in `dtype`; of tied tensors, the first is there.
    """
    seen: set[tuple[int, torch.Size]] = set()
    for layer in iter_layers(model):
        yield list(_checkpoint_tensors(layer, dtype, seen))


def _checkpoint_tensors(layer: LayerWeights, dtype, seen) -> Iterator[tuple[str, torch.Tensor]]:
    quantized = layer.quantized
    for name, tensor in layer.tensors.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf == "weight" and prefix in quantized:
            tensor = quantized[prefix].low_bit_weight()
        if isinstance(tensor, LowBitTensor):
            for key, value in tensor.checkpoint_tensors().items():
                yield f"{prefix}.{key}", value.detach()
            continue
        identity = (tensor.data_ptr(), tensor.shape)
        if identity in seen:
            continue
        seen.add(identity)
        yield name, (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach()


def iter_checkpoint_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of [`iter_checkpoint_layers`] one by one."""
    return chain.from_iterable(iter_checkpoint_layers(model, dtype))


def quantization_config(model: nn.Module) -> dict[str, Any]:
    """
    Return the `quantization_config` entry of the model's `config.json`, as compressed-tensors defines it.

    One group when all layers share scheme and group size; otherwise one for each, its layers named by a regular
    expression.
    """
    formats = quantized_formats(model)
    by_format: dict[tuple[QuantScheme, int | None], list[str]] = defaultdict(list)
    for name, (scheme, group_size) in formats.items():
        by_format[scheme, group_size].append(name)
    groups = {}
    for index, ((scheme, group_size), names) in enumerate(by_format.items()):
        groups[group_name(index, scheme)] = {
            "targets": ["Linear"] if len(by_format) == 1 else _targets(names, formats),
            "weights": scheme.weight_args(group_size),
            "input_activations": scheme.activation_args,
            "output_activations": None,
            "format": scheme.container.checkpoint_format,
        }
    checkpoint_formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": checkpoint_formats.pop() if len(checkpoint_formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [n for n, m in base_modules(model) if isinstance(m, nn.Linear) and n not in formats],
        "kv_cache_scheme": None,
    }


def quantized_formats(model: nn.Module) -> dict[str, tuple[QuantScheme, int | None]]:
    """Scheme and group size of every prepared or converted layer of `model`, by its name."""
    formats = {}
    for name, module in base_modules(model):
        source = module if isinstance(module, QuantizedLinear) else getattr(module, "weight", None)
        if isinstance(source, (QuantizedLinear, LowBitTensor)):
            formats[name] = source.scheme, source.group_size
    return formats


def _targets(names: list[str], layers: Iterable[str]) -> list[str]:
    # A last component that occurs in this group alone stands for all layers of that name.
    chosen = set(names)
    leaves = {name.rpartition(".")[2] for name in names}
    shared = {name.rpartition(".")[2] for name in layers if name not in chosen}
    whole = [f"re:.*\\.{re.escape(leaf)}$" for leaf in sorted(leaves - shared)]
    return whole + [name for name in names if name.rpartition(".")[2] in shared]


def has_stacked_experts(model: nn.Module) -> bool:
    """Return whether a mixture-of-experts model keeps the matrices of all experts in one tensor, as transformers 5 does."""
    return bool(stacked_experts(model))
