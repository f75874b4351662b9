"""Sharded masters: FSDP2 and DeepSpeed's ZeRO-3 as a [`~trl_qarl.quantization.storage.Storage`] each."""

from accelerate import Accelerator


def sharded_by(accelerator: Accelerator) -> str | None:
    """Return the backend that shards the models of `accelerator`: `"FSDP2"`, `"ZeRO-3"`, `"DeepSpeed"` for stages that
    leave masters whole, or `None`."""
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        return "FSDP2"
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin and ("ZeRO-3" if plugin.zero_stage == 3 else "DeepSpeed")
