"""Sharded masters: FSDP2 and DeepSpeed's ZeRO-3 as a [`~trl_qarl.quantization.storage.Storage`] each."""
