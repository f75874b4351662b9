"""Qwen3's mixture."""

from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM


# vLLM adds it when the scheme of a checkpoint is known already, and only for `mlp_only_layers`.
Qwen3MoeForCausalLM.packed_modules_mapping["gate_up_proj"] = ["gate_proj", "up_proj"]
