"""[`Inventory`]: the layers of a model, found in one walk over its modules and cached with the model. All code outside
a forward asks it for quantized layers, their formats and checkpoint names, and the layers in high precision.
[`reasons_to_skip`] and the functions next to it select the layers to quantize."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from ..models import MIN_INPUTS, MIN_RECURRENT_OUTPUTS, RECURRENT_STEPS, SHARED_BLOCK, family_of, is_router
from .experts import (
    DOWN,
    QuantizedExperts,
    experts_format,
    has_stacked_matrices,
    matrices_of_experts,
    problem_of_experts,
)
from .formats.registry import format_of
from .linear import is_plain
from .names import (
    CheckpointNames,
    architecture,
    base_model,
    base_modules,
    base_state_dict,
    find_checkpoint_names,
    has_tower,
    layer_of,
    stacks_experts,
)
from .plan import matches_whole
from .schemes import QuantScheme
from .storage import shapes_of
from .tensors import LowBitTensor
from .weight import QuantizedLayer, QuantizedWeight


_ATTRIBUTE = "_trl_qarl_inventory"


class LayerWeights(NamedTuple):
    """One layer by [`layer_of`], with names in the base model: its part of the `state_dict` and the owning modules."""

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
        """Names in a checkpoint that differ from those in the model. Those of a model of text without experts do not,
        unless transformers renames tensors of its very class (GPT-NeoX): it may come from a checkpoint of pictures and
        text, whose names vLLM's class of text does not know."""
        is_renamed = get_checkpoint_conversion_mapping(architecture(self.model)) is not None
        has_names = is_renamed or has_tower(self.model) or any(map(stacks_experts, self.modules.values()))
        return find_checkpoint_names(self.model, self.modules) if has_names else CheckpointNames()

    @property
    def _low_bit(self) -> dict[str, QuantizedLayer | LowBitTensor]:
        """Every prepared layer, and the weight of every converted one."""
        found = {name: self.layers.get(name, getattr(module, "weight", None)) for name, module in self.modules.items()}
        return {name: each for name, each in found.items() if isinstance(each, QuantizedLayer | LowBitTensor)}

    @property
    def formats(self) -> dict[str, tuple[QuantScheme, int | None]]:
        """Scheme and group size of every prepared or converted layer."""
        return {name: (each.scheme, each.group_size) for name, each in self._low_bit.items()}

    @property
    def global_scales(self) -> dict[str, float]:
        """Global scale of every prepared or converted layer that has one."""
        scales = {name: each.shared_scale for name, each in self._low_bit.items()}
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
        for _, members in groupby(base_state_dict(self.model).items(), key=lambda item: layer_of(item[0])):
            tensors = dict(members)
            owners = dict.fromkeys(tensor.rpartition(".")[0] for tensor in tensors)
            yield LayerWeights(tensors, {name: self.modules[name] for name in owners if name in self.modules})

    def weights(self) -> Iterator[tuple[str, QuantizedWeight]]:
        """Yield every quantized weight in the same order, by the name of its linear layer or experts' parameter."""
        for layer in self.walk():
            yield from ((name.removesuffix(".weight"), weight) for name, weight in layer.quantized.items())


def rotary_embeddings(modules: Iterable[nn.Module]) -> list[tuple[float, torch.Tensor]]:
    """Return factor and angles of the rotary embeddings among `modules`; transformers has one for each kind of layers
    in one module. A pair of features turns by its angle, in radians, from one position to the next."""
    return [
        (float(getattr(module, f"{kind}attention_scaling", 1.0)), buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        for kind, is_rotary, rest in [name.partition("inv_freq")]
        if is_rotary and not rest and not kind.endswith("original_") and buffer is not None and buffer.ndim == 1
    ]


def split_experts(layers: Mapping[str, nn.Module]) -> dict[str, list[list[str]]]:
    """Return the names of the matrices in each module of experts among `layers`, one by one and stacked. A pattern
    that matches only some of them does not match the module."""
    parts = {}
    for name, module in layers.items():
        if stacks_experts(module):
            stacked = matrices_of_experts(module)
            leaves = [leaf for matrices in stacked.values() for leaf in matrices]
            one_by_one = [f"{name}.{expert}.{leaf}" for expert in range(module.num_experts) for leaf in leaves]
            parts[name] = [one_by_one, [f"{name}.{leaf}" for leaf in stacked]]
    return parts


def layer_format(module: nn.Module, scheme: QuantScheme) -> tuple[QuantScheme, int | None]:
    """Return scheme and group size of a layer under `scheme`; `ValueError` is raised if no group size fits."""
    if isinstance(module, nn.Linear):
        return scheme, scheme.group_size_for(module.in_features)
    return experts_format(module, scheme)


def fails_in_transformers(model: nn.Module, name: str, scheme: QuantScheme) -> bool:
    """Return whether transformers cannot load a model in which the layer of this name has this scheme."""
    is_read = name.rpartition(".")[2] in family_of(architecture(model)).initialized_layers
    return is_read and "weight" not in format_of(scheme.container).checkpoint_names


def layers_outside_decoder(inventory: Inventory) -> dict[str, str]:
    """Return the quantizable layers outside the language model, such as those of a vision tower and its connector,
    with the reason why they stay in high precision unless a plan names them."""
    model = inventory.model
    if not isinstance(model, PreTrainedModel):
        return {}
    decoder = model.get_decoder()
    kinds = type(model.config), type(model.config.get_text_config())
    # Phi-4-multimodal's towers are in its decoder.
    towers = [
        part
        for part in decoder.children()
        if any(isinstance(each, PreTrainedModel) and not isinstance(each.config, kinds) for each in part.modules())
    ]
    if not (towers or has_tower(model)):
        return {}
    inside = {*decoder.modules(), model.get_output_embeddings()}.difference(*(part.modules() for part in towers))
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
            elif isinstance(model, PreTrainedModel) and f"{name}.{DOWN}" not in inventory.names.experts:
                reasons[name] = f"{kind}: checkpoints hold the matrices of experts in another form"
        elif module is head or leaf == "lm_head":
            reasons[name] = "output head"
        elif id(module.weight) in embedding_weights:
            reasons[name] = "shares the embedding's weight"
        elif is_router(name):
            reasons[name] = "router"
        elif SHARED_BLOCK in name.split("."):
            reasons[name] = "block that several layers share"
        elif _steers_recurrence(inventory, name, module):
            reasons[name] = "decays and step sizes of a recurrence"
        elif name in excluded:
            reasons[name] = "exclude_modules"
        elif not is_plain(module):
            reasons[name] = f"{type(module).__name__} has its own forward"
        elif shapes_of(module).get("weight", module.weight.shape).numel() == 0:
            reasons[name] = "no weights"
        elif module.in_features < MIN_INPUTS:
            reasons[name] = f"fewer than {MIN_INPUTS} inputs"
    return reasons


def _steers_recurrence(inventory: Inventory, name: str, module: nn.Linear) -> bool:
    """Return whether a layer computes a few numbers for each head or channel of a state-space model or of linear
    attention."""
    parent, _, leaf = name.rpartition(".")
    is_recurrent = bool(parent) and "A_log" in shapes_of(inventory.modules[parent])
    return is_recurrent and (leaf in RECURRENT_STEPS or module.out_features < MIN_RECURRENT_OUTPUTS)


def _excluded(layers: Mapping[str, nn.Module], patterns: str | Sequence[str] | None) -> set[str]:
    if not patterns:
        return set()
    parts = split_experts(layers)
    excluded = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        said = f"exclude_modules: {pattern!r}"
        named = re.compile(rf"(.*\.)?{re.escape(pattern)}").fullmatch
        hits = {name for name in layers if matches_whole(named, name, parts.get(name, []), said)}
        # A name such as `*_proj` is not a regular expression.
        with suppress(re.error):
            expression = re.compile(pattern.removeprefix("re:")).fullmatch
            hits = hits or {name for name in layers if matches_whole(expression, name, parts.get(name, []), said)}
        if not hits:
            raise ValueError(
                f"{said} matches none of the {len(layers)} linear layers. Give names or last components, such as "
                f"{next(iter(layers)).rpartition('.')[2]!r}, or a regular expression over the whole name."
            )
        excluded |= hits
    return excluded
