"""
One walk over a model's weights, layer by layer: whoever reads or writes them outside a forward takes it.

Where FSDP2 has sharded the masters, these are the parts that this process holds: [`~trl_qarl.quantization.sharded.whole`] gathers one
that is needed in all, so that nothing in high precision is held in all for longer than one tensor.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn

from .experts import QuantizedExperts
from .linear import QuantizedLinear
from .names import base_modules, base_state_dict
from .tensors import LowBitTensor
from .weight import QuantizedWeight


__all__ = ["LayerWeights", "iter_layers", "iter_quantized_weights", "layer_of"]


class LayerWeights(NamedTuple):
    """
    The weights of one layer, under the names they have in the base model; valid until the walk goes on.

    Args:
        name (`str`):
            From [`layer_of`], such as `"model.layers.3"`.
        tensors (`dict[str, torch.Tensor]`):
            Its part of the `state_dict`: masters, low-bit weights of frozen layers, and all that is in high precision.
        linears (`dict[str, nn.Linear]`):
            Its linear layers, quantized or not.
        experts (`dict[str, QuantizedExperts]`):
            Its quantized experts.
    """

    name: str
    tensors: dict[str, torch.Tensor]
    linears: dict[str, nn.Linear]
    experts: dict[str, QuantizedExperts]

    @property
    def quantized(self) -> dict[str, QuantizedWeight]:
        """Its quantized weights, by the names of their tensors."""
        layers = {
            name: layer for name, layer in self.linears.items() if isinstance(layer, QuantizedLinear)
        } | self.experts
        return {
            f"{name}.{leaf}": weight
            for name, layer in layers.items()
            for leaf, weight in layer.quantized_weights.items()
        }

    @property
    def in_high_precision(self) -> dict[str, torch.Tensor]:
        """The tensors that an engine has in high precision too: neither a master nor a low-bit weight."""
        masters = self.quantized
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if name not in masters and not isinstance(tensor, LowBitTensor)
        }


def iter_layers(model: nn.Module) -> Iterator[LayerWeights]:
    """Yield the weights of `model`, without its adapters, layer by layer in the order of the `state_dict`."""
    modules = dict(base_modules(model))
    for layer, members in groupby(base_state_dict(model).items(), key=lambda item: layer_of(item[0])):
        tensors = dict(members)
        owners = {owner: modules[owner] for name in tensors if (owner := name.rpartition(".")[0]) in modules}
        yield LayerWeights(
            layer,
            tensors,
            linears={name: module for name, module in owners.items() if isinstance(module, nn.Linear)},
            experts={name: module for name, module in owners.items() if isinstance(module, QuantizedExperts)},
        )


def iter_quantized_weights(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield every quantized weight of `model` on the same walk, by the name of its linear layer, or of the experts' parameter."""
    for layer in iter_layers(model):
        yield from ((name.removesuffix(".weight"), weight) for name, weight in layer.quantized.items())


def layer_of(name: str) -> str:
    """Return the layer that a tensor is part of: its name up to the first number, such as `"model.layers.3"`, else its module."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return match[0] if match else name.rpartition(".")[0] or name
