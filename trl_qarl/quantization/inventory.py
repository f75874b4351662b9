"""[`Inventory`]: the layers of a model, found in one walk over its modules and cached with the model. All code outside
a forward asks it for quantized layers, their formats and checkpoint names, and the layers in high precision."""

from collections.abc import Iterator
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn

from .experts import QuantizedExperts, has_stacked_matrices
from .names import CheckpointNames, base_model, base_modules, base_state_dict, find_checkpoint_names, layer_of
from .schemes import QuantScheme
from .storage import shapes_of
from .tensors import LowBitTensor
from .weight import QuantizedLayer, QuantizedWeight


_ATTRIBUTE = "_trl_qarl_inventory"


class LayerWeights(NamedTuple):
    """One layer by [`layer_of`], with names in the base model: its part of the `state_dict` and the owning modules."""

    name: str
    tensors: dict[str, torch.Tensor]
    modules: dict[str, nn.Module]

    @property
    def linears(self) -> dict[str, nn.Linear]:
        """Its linear layers, quantized or not."""
        return {name: module for name, module in self.modules.items() if isinstance(module, nn.Linear)}

    @property
    def quantized(self) -> dict[str, QuantizedWeight]:
        """Its quantized weights, by the names of their tensors."""
        return {
            f"{name}.{leaf}": weight
            for name, layer in self.modules.items()
            if isinstance(layer, QuantizedLayer)
            for leaf, weight in layer.quantized_weights.items()
        }

    @property
    def in_high_precision(self) -> dict[str, torch.Tensor]:
        """Its tensors in high precision in an engine: neither masters nor low-bit weights."""
        masters = self.quantized
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if name not in masters and not isinstance(tensor, LowBitTensor)
        }


class Inventory:
    """
    The layers of one model, by their names in the base model: an adapted layer keeps its name, its wrapper has none.

    - `model`: the base model.
    - `modules`: its modules without the adapters.
    - `layers`: the quantized layers.
    - `quantizable`: linear layers and stacked experts that are not quantized.

    Tensors and schemes are read from the modules at each call, because sharding, loading and `precisions` replace
    them.
    """

    def __init__(self, model: nn.Module):
        self.model = base_model(model)
        self._modules = list(self.model.modules())
        self.modules = dict(base_modules(self.model))
        self.layers = {name: module for name, module in self.modules.items() if isinstance(module, QuantizedLayer)}
        self.quantizable = {
            name: module
            for name, module in self.modules.items()
            if name not in self.layers and (isinstance(module, nn.Linear) or has_stacked_matrices(name, module))
        }

    @classmethod
    def of(cls, model: nn.Module) -> "Inventory":
        """Return the inventory of `model`, a new one if its modules have changed since the last call."""
        attributes = vars(base_model(model))
        known = attributes.get(_ATTRIBUTE)
        if known is None or known._modules != list(known.model.modules()):
            known = attributes[_ATTRIBUTE] = cls(model)
        return known

    @cached_property
    def names(self) -> CheckpointNames:
        """Names in a checkpoint that differ from those in the model."""
        return find_checkpoint_names(self.model, self.modules)

    @property
    def formats(self) -> dict[str, tuple[QuantScheme, int | None]]:
        """Scheme and group size of every prepared or converted layer."""
        found = {name: self.layers.get(name, getattr(module, "weight", None)) for name, module in self.modules.items()}
        return {
            name: (source.scheme, source.group_size)
            for name, source in found.items()
            if isinstance(source, (QuantizedLayer, LowBitTensor))
        }

    @property
    def global_scales(self) -> dict[str, float]:
        """Global scale of every prepared or converted layer that has one."""
        scales = {
            name: self.layers[name].global_scale if name in self.layers else self.modules[name].weight.shared_scale
            for name in self.formats
        }
        return {name: scale for name, scale in scales.items() if scale is not None}

    @property
    def stacked_experts(self) -> dict[str, nn.Parameter]:
        """Parameters in high precision that stack the matrices of all experts of a layer."""
        return {
            f"{name}.{leaf}": getattr(module, leaf)
            for name, module in self.quantizable.items()
            if not isinstance(module, nn.Linear)
            for leaf, shape in shapes_of(module).items()
            if len(shape) == 3
        }

    @property
    def experts(self) -> dict[str, nn.Module]:
        """Modules of experts, quantized or not."""
        return {
            name: module
            for name, module in self.modules.items()
            if isinstance(module, QuantizedExperts) or (name in self.quantizable and not isinstance(module, nn.Linear))
        }

    @property
    def holds_adapter(self) -> bool:
        """True if adapters are part of the weights that are quantized (`lora_mode="merged"`)."""
        return any(layer.holds_adapter for layer in self.layers.values())

    def walk(self) -> Iterator[LayerWeights]:
        """Yield the weights of the model, without its adapters, layer by layer in the order of the `state_dict`.
        Sharded masters are the parts of this process; [`~trl_qarl.quantization.storage.whole`] gathers one."""
        for layer, members in groupby(self.tensors().items(), key=lambda item: layer_of(item[0])):
            tensors = dict(members)
            owners = dict.fromkeys(tensor.rpartition(".")[0] for tensor in tensors)
            yield LayerWeights(layer, tensors, {name: self.modules[name] for name in owners if name in self.modules})

    def weights(self) -> Iterator[tuple[str, QuantizedWeight]]:
        """Yield every quantized weight in the same order, by the name of its linear layer or experts' parameter."""
        for layer in self.walk():
            yield from ((name.removesuffix(".weight"), weight) for name, weight in layer.quantized.items())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the `state_dict` of the model without its adapters, with the parameters themselves."""
        return base_state_dict(self.model)
