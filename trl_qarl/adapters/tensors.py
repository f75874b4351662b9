"""The adapter that is trained, as PEFT writes it and an engine reads it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..quantization.names import is_peft_model


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

__all__ = [
    "ADAPTER_NAME",
    "CONFIG_FILE",
    "adapter_config",
    "adapter_tensors",
    "describe_adapter",
    "is_adapter_folder",
    "saved_adapter_config",
]

CONFIG_FILE = "adapter_config.json"
"""PEFT's description of a saved adapter."""

ADAPTER_NAME = "default"
"""Name of the adapter that is trained; TRL may add `ref`, a copy of where training started."""


def is_adapter_folder(name_or_path: Any) -> bool:
    """Return whether PEFT has saved an adapter there."""
    return isinstance(name_or_path, (str, Path)) and (Path(name_or_path) / CONFIG_FILE).is_file()


def saved_adapter_config(folder: str | Path) -> "PeftConfig":
    """Return the configuration of a saved adapter."""
    from peft import PeftConfig

    return PeftConfig.from_pretrained(str(folder))


def adapter_tensors(model: "PeftModel") -> dict[str, torch.Tensor]:
    """Return the trained adapter of a model that is not wrapped by accelerate under the names of
    `adapter_model.safetensors`, such as `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`; detached."""
    from peft import get_peft_model_state_dict

    # Embeddings are never targets here, so PEFT need not look for changed ones.
    tensors = get_peft_model_state_dict(model, adapter_name=ADAPTER_NAME, save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def adapter_config(model: "PeftModel") -> dict[str, Any]:
    """Content of the trained adapter's `adapter_config.json`, which is JSON."""
    # As PEFT writes it: a saved adapter is for inference unless it is loaded as trainable.
    config = model.peft_config[ADAPTER_NAME].to_dict() | {"inference_mode": True}
    return json.loads(json.dumps(config, default=sorted))


def describe_adapter(model: nn.Module, lora_mode: str) -> dict[str, Any]:
    """Return what a record of the run says about the adapter of `model`: its mode, size and layers. Nothing without an
    adapter."""
    if not is_peft_model(model):
        return {}
    config = adapter_config(model)
    names = ("r", "lora_alpha", "use_rslora", "target_modules")
    return {"lora_mode": lora_mode, "lora": {name: config[name] for name in names}}
