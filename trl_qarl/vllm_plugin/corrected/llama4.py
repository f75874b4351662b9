"""Llama 4's text."""

from vllm.config import VllmConfig
from vllm.model_executor.models import llama4


class Llama4ForCausalLM(llama4.Llama4ForCausalLM):
    """vLLM's class, which takes `attn_temperature_tuning` from the generation configuration, by default `False`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        model = vllm_config.model_config
        tuning = {"attn_temperature_tuning": model.hf_config.attn_temperature_tuning}
        model.override_generation_config = tuning | model.override_generation_config
        super().__init__(vllm_config=vllm_config, prefix=prefix)
