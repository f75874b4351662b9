"""
Modules and tensors under the names they have in a checkpoint of the model itself, also where PEFT has wrapped its
layers.

PEFT puts a model into `base_model.model` and a layer it adapts into `base_layer` of a wrapper that holds the adapters.
Both are recognised by their attributes, as PEFT is optional.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


# Name of the module inside the one that torch puts around it to compute its forward again in backward.
_CHECKPOINTED = "_checkpoint_wrapped_module"

__all__ = [
    "adapted_layers",
    "architecture",
    "base_model",
    "base_modules",
    "base_state_dict",
    "is_adapted",
    "is_peft_model",
    "layer_of",
]


def is_adapted(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into `model`."""
    return any(map(_is_wrapper, model.modules()))


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """PEFT's wrappers by the names of the layers inside them."""
    return ((name, module) for name, module in _modules(base_model(model)) if _is_wrapper(module))


def base_model(model: nn.Module) -> nn.Module:
    """Return the model itself, of a `PeftModel` the one inside; its adapted layers stay wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def architecture(model: nn.Module) -> str:
    """Return the name of the base model's class, out of which FSDP2 makes one of its own."""
    return type(base_model(model)).__name__.removeprefix("FSDP")


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules` of the model without its adapters: an adapted layer goes by its own name, its wrapper not at
    all."""
    yield from _walk(base_model(model), "", set())


def base_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """`state_dict` of the model without its adapters."""
    model = base_model(model)
    wrappers = {name for name, module in _modules(model) if _is_wrapper(module)}
    inside = tuple(f"{name}." for name in wrappers)
    tensors = {}
    # The parameters themselves, by which ties are known.
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
    """`named_modules` under the names of the `state_dict`, from which torch's activation checkpointing takes its own
    part."""
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
    """Return whether `model` is a `PeftModel`; PEFT is imported only where it is installed and something has a
    configuration of it."""
    if not isinstance(model, nn.Module) or not hasattr(model, "peft_config"):
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def layer_of(name: str) -> str:
    """Return the layer that a tensor is part of: its name up to the first number, such as `"model.layers.3"`, else its
    module."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return match[0] if match else name.rpartition(".")[0] or name
