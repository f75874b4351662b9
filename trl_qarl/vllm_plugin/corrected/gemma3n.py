"""Gemma 3n's text."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import gemma3n


class Gemma3nForCausalLM(gemma3n.Gemma3nForCausalLM):
    """vLLM's class of text, which leaves out the embeddings of each layer that the class of pictures and text passes
    (models/gemma3n.py, models/gemma3n_mm.py), and the scale of their projection, `hidden_size ** -0.5`, before a norm:
    only the norm's epsilon depends on it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model.self_decoder.per_layer_projection_norm.variance_epsilon *= self.config.hidden_size

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **kwargs: Any) -> Any:
        if kwargs.get("per_layer_inputs") is None:
            of_layers = self.model.get_per_layer_input_embeddings(input_ids)
            shape = self.config.num_hidden_layers, self.config.hidden_size_per_layer_input
            kwargs["per_layer_inputs"] = of_layers.unflatten(-1, shape)
        return super().forward(input_ids, positions, **kwargs)
