"""The adapter in vLLM: the tensors to send, the engine arguments, and the adapters that vLLM cannot serve."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..checkpoint.layout import iter_whole
from ..checkpoint.serving import engine_rank
from ..quantization.names import is_peft_model
from .tensors import adapter_config, adapter_tensors


__all__ = [
    "adapter_problems",
    "arguments_for",
    "iter_adapter_tensors",
    "lora_arguments",
]


def iter_adapter_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield A and B of the adapter next to the layers of `model`, if it has one, as the engine holds them, in the dtype
    in which it runs the model: B multiplied by the scaling and then rounded. Where FSDP2 has sharded them, every
    process has to go through all.
    """
    if not _runs_beside(model):
        return
    scaling = _scaling(adapter_config(model))
    for name, tensor in iter_whole(adapter_tensors(model)):
        name = name.removeprefix("base_model.model.")
        yield name, (tensor * scaling if name.endswith(".lora_B.weight") else tensor).to(dtype)


def lora_arguments(model: nn.Module) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for the adapter of `model`; empty without an adapter."""
    return arguments_for(adapter_config(model)["r"], _targets(model)) if _runs_beside(model) else {}


def arguments_for(rank: int, targets: list[str]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for an adapter of a rank, next to layers whose names end in `targets`."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": engine_rank(rank), "lora_target_modules": targets}


def adapter_problems(model: nn.Module, engine: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why an engine that describes itself as `engine` could not serve the adapter of `model`."""
    if not _runs_beside(model):
        return
    lora, rank = engine.get("lora"), adapter_config(model)["r"]
    add = f"Start it with `--max_lora_rank {engine_rank(rank)}`"
    if lora is None:
        yield f"adapter: the learner trains one of rank {rank}, the engine was started without LoRA. {add}"
        return
    if rank > lora["max_rank"]:
        yield f"adapter: learner rank {rank}, engine at most {lora['max_rank']}. {add}"
    if lora["dtype"] != engine["dtype"]:
        yield f"adapter: the engine would round it to {lora['dtype']}, its weights are {engine['dtype']}. Leave out --lora-dtype"
    missing = sorted(set(_targets(model)) - set(lora["modules"]))
    if missing:
        yield f"adapter: the learner trains one on {missing}, the engine serves adapters only on {lora['modules']}"


def _runs_beside(model: nn.Module) -> bool:
    """Return whether `model` has an adapter that is not a part of its low-bit weights."""
    return is_peft_model(model) and not any(getattr(module, "holds_adapter", False) for module in model.modules())


def _scaling(config: Mapping[str, Any]) -> float:
    return config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])


def _targets(model: nn.Module) -> list[str]:
    """Last components of the names of the layers that have an adapter."""
    return sorted({name.split(".lora_")[0].rpartition(".")[2] for name in adapter_tensors(model)})
