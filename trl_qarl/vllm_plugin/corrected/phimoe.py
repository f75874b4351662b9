"""Phi-3.5-MoE."""

import torch
from vllm.model_executor.models import phimoe


class PhimoeForCausalLM(phimoe.PhiMoEForCausalLM):
    """vLLM's class, which leaves out the bias of the output head (models/phimoe.py)."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)
