"""Checks of DeepSpeed's configuration."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.utils.deepspeed import HfDeepSpeedConfig

from .options import name_of_optimizer


__all__ = ["given_configuration", "problems_of_zero"]

_ROUNDED = (
    "it rounds the model's weights to 16 bits, and low-bit weights would be made of rounded masters. Leave it out: with bf16=True "
    "the forward computes in bfloat16 all the same"
)
_OTHER_LAUNCHES = "it has not been tried. Leave it out, or launch with FSDP2 or DDP"


def given_configuration() -> Mapping[str, Any]:
    """Return the content of the file `deepspeed_config_file`, which accelerate completes; empty without such a
    file."""
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    return {} if file == "none" else HfDeepSpeedConfig(file).config


def problems_of_zero(
    config: Mapping[str, Any], given: Mapping[str, Any], args: Any, has_adapter: bool, optimizer: str | None
) -> Iterator[str]:
    """Yield what ZeRO cannot serve: of DeepSpeed's configuration, as accelerate has filled it up and as it was
    `given`, of the run's, and of package or kind of its optimizer."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        yield f"zero_stage={stage} shards nothing. Use 1, 2 or 3, or launch with DDP (`accelerate launch --multi_gpu`)"
    if stage == 3:
        yield from _problems_of_slices(zero, args, has_adapter)
    for name in ("offload_optimizer", "offload_param"):
        device = (zero.get(name) or {}).get("device")
        if device not in (None, "none", "cpu"):
            yield f"{name}_device={device!r} with DeepSpeed: it has not been tried. Use none or cpu"
    for name in ("bf16", "fp16", "torch_autocast"):
        # `bf16.enabled` that accelerate derives from `mixed_precision: bf16` is undone later.
        found = (given if name == "bf16" else config).get(name) or {}
        if found.get("enabled") is True:
            yield f"{name}.enabled=true in DeepSpeed's configuration: {_ROUNDED}"
    for name, option in (("optimizer", "optim"), ("scheduler", "lr_scheduler_type")):
        if name in config:
            yield f"{name!r} in DeepSpeed's configuration: `{option}` chooses it. Leave it out"
    if optimizer != "torch":
        yield (
            f"optim={name_of_optimizer(args)!r} with DeepSpeed: DeepSpeed hands out flat slices of masters, where it needs matrices "
            "or is untested. Use 'adamw_torch_fused' or 'adamw_torch', or launch with FSDP2"
        )
    if has_adapter and stage != 3 and args.lora_mode == "adapter":
        yield (
            "lora_mode='adapter' with DeepSpeed: it broadcasts every parameter when it starts, and cannot send the low-bit ones "
            "of a frozen base. Use lora_mode='merged', or launch with FSDP2 or DDP"
        )


def _problems_of_slices(zero: Mapping[str, Any], args: Any, has_adapter: bool) -> Iterator[str]:
    if has_adapter:
        yield (
            "an adapter with zero_stage=3: outside a forward no process has a whole factor of it, to add to the base. Use zero_stage 1 or 2 with "
            "lora_mode='merged', or launch with FSDP2 or DDP"
        )
    if args.numerics == "engine":
        yield "numerics='engine' with zero_stage=3: it has not been tried. Use numerics='fast', or launch with DDP"
    if args.sync_ref_model:
        yield f"sync_ref_model=True with zero_stage=3: {_OTHER_LAUNCHES}"
    if zero.get("zero_quantized_weights"):
        yield (
            "zero_quantized_weights=true in DeepSpeed's configuration: low-bit weights would be made of masters rounded to 8 bits. Leave "
            "it out, or launch with FSDP2, which gathers low-bit weights"
        )
    if not zero.get("stage3_gather_16bit_weights_on_model_save"):
        yield "zero3_save_16bit_model=false with zero_stage=3: checkpoints would lack `model.safetensors`. Use true"
    if args.precisions is not None:
        yield f"precisions={args.precisions} with zero_stage=3: {_OTHER_LAUNCHES}"
