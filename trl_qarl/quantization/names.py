"""
Names of modules and tensors in a checkpoint of the base model, despite PEFT's wrappers and transformers' stacked
experts.

PEFT puts a model into `base_model.model` and an adapted layer into `base_layer` of a wrapper that holds the adapters.
Both are detected by their attributes, because PEFT is optional. transformers stacks the matrices of experts, which are
separate in a checkpoint, and renames modules around them (Mixtral's `mlp` is `block_sparse_moe` in a checkpoint). The
names are found by calling transformers' conversion of a model with marks in place of tensors.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from ..replacing import replaced
from .experts import QuantizedExperts, matrices_of_experts, problem_of_experts
from .storage import shapes_of


# Name of the module inside torch's wrapper for activation checkpointing.
_CHECKPOINTED = "_checkpoint_wrapped_module"


def is_adapted(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into `model`."""
    return any(map(_is_wrapper, model.modules()))


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield PEFT's wrappers with the names of the layers inside them."""
    return ((name, module) for name, module in _modules(base_model(model)) if _is_wrapper(module))


def base_model(model: nn.Module) -> nn.Module:
    """Return the model itself, or the one inside a `PeftModel`; its adapted layers stay wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def class_of(module: nn.Module) -> type:
    """Return the class of a module, or its former class if FSDP2 manages it."""
    # torch derives a class from `FSDPModule` and the former class.
    return type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)


def architecture(model: nn.Module) -> str:
    """Return the name of the base model's class."""
    return type(base_model(model)).__name__


def method_of(described: Any) -> str | None:
    """Return the `quant_method` of a `quantization_config`, `None` without one."""
    method = described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", None)
    return getattr(method, "value", method)


def has_tower(model: nn.Module) -> bool:
    """Return whether the language model is a part of the base model, next to a vision tower."""
    config = getattr(base_model(model), "config", None)
    return isinstance(config, PreTrainedConfig) and config.get_text_config() is not config


def shares_head(model: Any) -> bool:
    """Return whether embedding and output head of a model are one weight, whatever its configuration says."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    first, second = (getattr(each, "weight", None) for each in ends)
    # Of a class without a head, the configuration is right.
    return model.config.tie_word_embeddings if second is None else first is second


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield `named_modules` without adapters: an adapted layer keeps its name, its wrapper has none."""
    yield from _walk(base_model(model), "", set())


def base_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the `state_dict` of the model without its adapters, with the parameters themselves."""
    model = base_model(model)
    wrappers = {name for name, module in _modules(model) if _is_wrapper(module)}
    inside = tuple(f"{name}." for name in wrappers)
    tensors = {}
    # The parameters themselves, because ties are detected by identity.
    for name, tensor in model.state_dict(keep_vars=True).items():
        wrapper, _, rest = name.partition(".base_layer.")
        if wrapper in wrappers:
            tensors[f"{wrapper}.{rest}"] = tensor
        elif not name.startswith(inside):
            tensors[name] = tensor
    return tensors


def _is_wrapper(module: nn.Module) -> bool:
    return hasattr(module, "adapter_layer_names") and hasattr(module, "base_layer")


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield `named_modules` with the names in the `state_dict`, where activation checkpointing leaves no trace."""
    return ((name.replace(f"{_CHECKPOINTED}.", ""), module) for name, module in model.named_modules())


def _walk(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    while _CHECKPOINTED in module._modules or _is_wrapper(module):
        module = module._modules.get(_CHECKPOINTED) or module.base_layer
    if module in seen:
        return
    seen.add(module)
    yield name, module
    for child_name, child in module.named_children():
        yield from _walk(child, f"{name}.{child_name}" if name else child_name, seen)


def is_peft_model(model: Any) -> bool:
    """Return whether `model` is a `PeftModel`."""
    return base_model(model) is not model


def layer_of(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number, such as `"model.layers.3"`, else its module."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return match[0] if match else name.rpartition(".")[0] or name


@dataclass(frozen=True)
class CheckpointNames:
    """Names in a checkpoint: `tensors` has the name of each tensor that is stored unchanged, by its name in the model;
    `experts` has the names, without `"weight"` ([`~trl_qarl.wire.protocol.tensor_name`]), of the matrices that a
    parameter of experts stacks, or whose biases it stacks, in order. A parameter that is in both is stored unchanged
    in 16 bits; its low-bit form has one tensor for each matrix, with the names that vLLM takes."""

    tensors: dict[str, str] = field(default_factory=dict)
    experts: dict[str, list[str]] = field(default_factory=dict)

    def of_tensor(self, name: str) -> str:
        """Return the name of a tensor, or of a module with a tensor `weight`."""
        of_module = self.tensors.get(f"{name}.weight")
        return of_module.removesuffix(".weight") if of_module else self.tensors.get(name, name)

    def of_both(self, name: str) -> list[str]:
        """Return the name of a module for engines, which is that in a checkpoint, and the model's for transformers."""
        return [*dict.fromkeys((self.of_tensor(name), name))]


def stacks_experts(module: nn.Module) -> bool:
    """Return whether a module is one of experts that are quantized, or can be."""
    return isinstance(module, QuantizedExperts) or problem_of_experts(module) is None


def find_checkpoint_names(
    model: nn.Module, modules: Mapping[str, nn.Module], is_release: bool = True
) -> CheckpointNames:
    """
    Return the names of `model`, with these `modules`, in a checkpoint: those of releases, such as `visual.` for
    Qwen2.5-VL's `model.visual.`, which vLLM knows. With `is_release=False` they are those that `save_pretrained`
    writes, which lack the `vision_model.` of Gemma 3's tower unless the model was loaded from names with it. The
    result is empty if a checkpoint does not have the matrices of experts one by one.
    """
    stacked = {
        f"{name}.{leaf}{suffix}": [
            [f"{name}.{expert}.{each}" for each in matrices] for expert in range(module.num_experts)
        ]
        for name, module in modules.items()
        if stacks_experts(module)
        for leaf, matrices in matrices_of_experts(module).items()
        for suffix in ("", *(["_bias"] if module.has_bias else []))
    }
    if not isinstance(model, PreTrainedModel):
        return CheckpointNames()
    found = CheckpointNames()
    shapes = {f"{name}.{leaf}": shape for name, m in modules.items() for leaf, shape in shapes_of(m).items()}
    # Otherwise transformers reverts those that it used to load the model.
    conversions = get_model_conversion_mapping(model, add_legacy=False) if is_release else None
    releasing = replaced(model, _weight_conversions=conversions or None) if is_release else nullcontext()
    with releasing:
        for name, tensor in base_state_dict(model).items():
            if name in stacked:
                # One row marks each matrix, with the matrix' place as its value.
                experts = stacked[name]
                mark = torch.arange(len(experts) * len(experts[0])).view(len(experts), -1, 1)
            else:
                mark = torch.empty(shapes.get(name, tensor.shape), device="meta")
            try:
                reverted = revert_weight_conversion(model, {name: mark})
            except ValueError:
                # A checkpoint joins it with others, such as ERNIE 4.5 VL's experts of text with those of pictures.
                return CheckpointNames()
            if name in stacked and len(reverted) == mark.numel() and name not in reverted:
                places = {int(matrix): of.removesuffix(".weight") for of, matrix in reverted.items()}
                found.experts[name] = [places[place] for place in sorted(places)]
                continue
            if len(reverted) != 1:
                return CheckpointNames()
            [(found.tensors[name], as_stored)] = reverted.items()
            if name in stacked:
                # Releases of Qwen3-VL's mixture have transposed matrices, and what transformers saves has not.
                if as_stored.shape not in (mark.shape, mark.mT.shape):
                    return CheckpointNames()
                found.experts[name] = [matrix for matrices in stacked[name] for matrix in matrices]
    return found
