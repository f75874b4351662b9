"""Masters in pieces: FSDP2 and DeepSpeed's ZeRO-3, each behind [`~trl_qarl.quantization.storage.Storage`]."""
