"""The trained adapter in the formats of PEFT and engines, and the reasons why vLLM cannot serve an adapter."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import ADAPTER_CONFIG_NAME

from ..quantization.names import is_peft_model
from ..quantization.storage import whole
from ..wire.protocol import engine_rank


if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_NAME = "default"
"""Name of the trained adapter; TRL may add `ref`, a copy from the start of training."""


def is_adapter_folder(name_or_path: Any) -> bool:
    """Return whether the path is a folder with an adapter saved by PEFT."""
    return isinstance(name_or_path, (str, Path)) and (Path(name_or_path) / ADAPTER_CONFIG_NAME).is_file()


def base_of(adapter_folder: str) -> str | None:
    """Return the name of the model that an adapter's configuration names, from which TRL takes the tokenizer."""
    from peft import PeftConfig

    return PeftConfig.from_pretrained(adapter_folder).base_model_name_or_path


def adapter_tensors(model: "PeftModel") -> dict[str, torch.Tensor]:
    """Return the trained adapter with the names in `adapter_model.safetensors`, detached. `model` must not be wrapped
    by accelerate."""
    from peft import get_peft_model_state_dict

    # Embeddings are never targets here, so PEFT need not look for changed embeddings.
    tensors = get_peft_model_state_dict(model, adapter_name=ADAPTER_NAME, save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def adapter_config(model: "PeftModel") -> dict[str, Any]:
    """Return the content of the trained adapter's `adapter_config.json`."""
    # Like PEFT: a saved adapter is for inference unless it is loaded as trainable.
    config = model.peft_config[ADAPTER_NAME].to_dict() | {"inference_mode": True}
    return json.loads(json.dumps(config, default=sorted))


def iter_adapter_tensors(
    model: nn.Module, dtype: torch.dtype, to_main: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield A and B of the adapter next to the layers of `model`, if it has one, in the engine's `dtype`: B is
    multiplied by the scaling and then rounded. If FSDP2 has sharded them, every process has to iterate over all, and
    with `to_main` only the main process gets values."""
    if not _runs_beside(model):
        return
    config = adapter_config(model)
    scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    for name, tensor in adapter_tensors(model).items():
        tensor, name = whole(tensor, to_main=to_main), name.removeprefix("base_model.model.")
        yield name, (tensor * scaling if name.endswith(".lora_B.weight") else tensor).to(dtype)


def lora_arguments(model: nn.Module) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for the adapter of `model`; empty without an adapter."""
    return arguments_for(adapter_config(model)["r"], _targets(model)) if _runs_beside(model) else {}


def arguments_for(rank: int, targets: list[str]) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for an adapter of `rank` next to layers whose names end in `targets`."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": engine_rank(rank), "lora_target_modules": targets}


def adapter_problems(model: nn.Module, engine: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why an engine with the description `engine` could not serve the adapter of `model`."""
    if not _runs_beside(model):
        return
    lora, rank = engine.get("lora"), adapter_config(model)["r"]
    add = f"Start it with `--max_lora_rank {engine_rank(rank)}`"
    if lora is None:
        yield f"adapter: the learner trains one of rank {rank}, but the engine was started without LoRA. {add}"
        return
    if rank > lora["max_rank"]:
        yield f"adapter: learner rank {rank}, engine at most {lora['max_rank']}. {add}"
    if lora["dtype"] != engine["dtype"]:
        yield f"adapter: the engine would round it to {lora['dtype']}, its weights are {engine['dtype']}. Leave out --lora-dtype"
    missing = sorted(set(_targets(model)) - set(lora["modules"]))
    if missing:
        yield (
            f"adapter: the learner trains one on {missing}, the engine serves adapters only on {lora['modules']}. Leave them out of "
            "`target_modules`, or use lora_mode='merged'"
        )


def _runs_beside(model: nn.Module) -> bool:
    """Return whether `model` has an adapter outside its low-bit weights."""
    return is_peft_model(model) and not any(getattr(module, "holds_adapter", False) for module in model.modules())


def _targets(model: nn.Module) -> list[str]:
    return sorted({name.split(".lora_")[0].rpartition(".")[2] for name in adapter_tensors(model)})
