"""Has FSDP2 gather low-bit weights once accelerate has sharded a model."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..quantization.inventory import Inventory
from ..quantization.names import base_model, layer_of
from .fsdp2 import as_bytes, shard_low_bit


logger = logging.getLogger(__name__)


def sharded_by(accelerator: Accelerator) -> str | None:
    """Return the backend that shards the models of `accelerator`: `"FSDP2"`, `"ZeRO-3"`, `"DeepSpeed"` for stages that
    leave masters whole, or `None`."""
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        return "FSDP2"
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin and ("ZeRO-3" if plugin.zero_stage == 3 else "DeepSpeed")


def check_units(model: nn.Module) -> None:
    """Raise `ValueError` if a unit that FSDP2 gathers is only a part of a decoder layer."""
    inventory = Inventory.of(model)
    layers = {layer_of(name) for name in inventory.layers}
    for name, module in inventory.modules.items():
        layer = layer_of(f"{name}.weight")
        if isinstance(module, FSDPModule) and layer in layers and layer != name:
            raise ValueError(
                f"FSDP2 was told to wrap {type(module).__name__}, so {name!r} is gathered apart from the rest of its layer. Use "
                "`fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP` and leave out `fsdp_transformer_layer_cls_to_wrap`, or name the "
                "class of whole layers."
            )


def shard_when_prepared(accelerator: Accelerator, then: Callable[[nn.Module], None]) -> None:
    """Have models gather low-bit weights once `accelerator.prepare` shards them, and call `then` with each."""
    prepare_whole = accelerator.prepare

    def prepare(*args: Any, **kwargs: Any) -> Any:
        for model in args:
            if isinstance(model, nn.Module):
                as_bytes(model)
        prepared = prepare_whole(*args, **kwargs)
        for each in prepared if isinstance(prepared, (list, tuple)) else [prepared]:
            if isinstance(each, FSDPModule):
                check_units(each)
                count = shard_low_bit(each)
                _gather_head(each)
                then(each)
                logger.info("FSDP2 gathers %d low-bit weights in place of their masters.", count)
            elif type(optimizer := getattr(each, "optimizer", None)).__name__ == "AdamW4bit":
                # Compiled, it fails on shards of any model (torch 2.13, torchao 0.18).
                optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
        return prepared

    # Patched on the instance: accelerate has no hook after a model is sharded.
    accelerator.prepare = prepare  # pyrefly: ignore[bad-assignment]


def _gather_head(model: nn.Module) -> None:
    """
    Have FSDP2 gather the head of `model` after the rest of the forward, because the loss reads its weight directly.

    accelerate shards the head together with the final norm, whose call gathers both, but finds that norm only in
    models of text. Otherwise each process would get the gradient of its own tokens (accelerate 1.15, TRL 1.16).
    """
    model = base_model(model)
    head = model.get_output_embeddings()
    if isinstance(head, FSDPModule):
        model.base_model.register_forward_hook(lambda *_: head.unshard())
