"""GLM-4-MoE-Lite."""

from vllm.config import VllmConfig
from vllm.model_executor.models import glm4_moe_lite


class Glm4MoeLiteForCausalLM(glm4_moe_lite.Glm4MoeLiteForCausalLM):
    """vLLM's class, whose norms of latents add `rms_norm_eps`, where those of transformers always add 1e-6."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for name, module in self.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                module.variance_epsilon = 1e-6
