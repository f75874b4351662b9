"""
One walk over a model's weights, layer by layer: whoever reads or writes them outside a forward takes it.

What has to happen before a layer's weights can be read, and what must not be held longer than for one layer, has its place here:
today nothing, as every process has all of them.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn

from .linear import QuantizedLinear
from .names import base_modules, base_state_dict
from .tensors import LowBitTensor


__all__ = ["LayerWeights", "iter_layers", "iter_quantized_layers", "layer_of"]


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
    """

    name: str
    tensors: dict[str, torch.Tensor]
    linears: dict[str, nn.Linear]

    @property
    def quantized(self) -> dict[str, QuantizedLinear]:
        """Its quantized layers."""
        return {name: linear for name, linear in self.linears.items() if isinstance(linear, QuantizedLinear)}

    @property
    def in_high_precision(self) -> dict[str, torch.Tensor]:
        """The tensors that an engine has in high precision too: neither a master nor a low-bit weight."""
        masters = {f"{name}.weight" for name in self.quantized}
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if name not in masters and not isinstance(tensor, LowBitTensor)
        }


def iter_layers(model: nn.Module) -> Iterator[LayerWeights]:
    """Yield the weights of `model`, without its adapters, layer by layer in the order of the `state_dict`."""
    linears = {name: module for name, module in base_modules(model) if isinstance(module, nn.Linear)}
    for layer, members in groupby(base_state_dict(model).items(), key=lambda item: layer_of(item[0])):
        tensors = dict(members)
        owners = (name.rpartition(".")[0] for name in tensors)
        yield LayerWeights(layer, tensors, {name: linears[name] for name in owners if name in linears})


def iter_quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield every [`QuantizedLinear`] of `model` with its name, on the same walk."""
    for layer in iter_layers(model):
        yield from layer.quantized.items()


def layer_of(name: str) -> str:
    """Return the layer that a tensor is part of: its name up to the first number, such as `"model.layers.3"`, else its module."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return match[0] if match else name.rpartition(".")[0] or name
