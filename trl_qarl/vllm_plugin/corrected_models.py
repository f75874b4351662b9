"""
Classes of vLLM 0.31 that compute another function than transformers', or cannot load a low-bit layer, put right where
they differ. vLLM's registry names this module, which is imported when an engine needs one of them.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.models import bloom, gemma3n, glm4_moe_lite, gpt_neox, laguna, llama4, phimoe

from ..models import IN_FLOAT32


BloomForCausalLM, GPTNeoXForCausalLM = bloom.BloomForCausalLM, gpt_neox.GPTNeoXForCausalLM
LagunaForCausalLM = laguna.LagunaForCausalLM


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


class Glm4MoeLiteForCausalLM(glm4_moe_lite.Glm4MoeLiteForCausalLM):
    """vLLM's class, whose norms of latents add `rms_norm_eps`, where those of transformers always add 1e-6."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for name, module in self.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                module.variance_epsilon = 1e-6


class Llama4ForCausalLM(llama4.Llama4ForCausalLM):
    """vLLM's class, which takes `attn_temperature_tuning` from the generation configuration, by default `False`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        model = vllm_config.model_config
        tuning = {"attn_temperature_tuning": model.hf_config.attn_temperature_tuning}
        model.override_generation_config = tuning | model.override_generation_config
        super().__init__(vllm_config=vllm_config, prefix=prefix)


class PhimoeForCausalLM(phimoe.PhiMoEForCausalLM):
    """vLLM's class, which leaves out the bias of the output head (models/phimoe.py)."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)


def _without_shapes(reorder: Callable[..., Iterable[tuple[str, torch.Tensor]]]) -> Callable[..., Any]:
    """Decorate a loader's function that reorders the rows of a layer's tensors by heads, to leave alone the two
    numbers of `weight_shape`, which have no rows."""

    @wraps(reorder)
    def reorder_rows(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name.endswith("weight_shape"):
                yield name, tensor
            else:
                yield from reorder(model, [(name, tensor)])

    return reorder_rows


def _with_bias_of_router(load: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate Laguna's loader, which leaves out the bias of the router, a parameter of `routed_experts` in vLLM."""

    @wraps(load)
    def load_weights(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name.endswith(f"experts.{IN_FLOAT32}"):
                    experts = model.get_submodule(name.rpartition(".")[0])
                    experts.routed_experts.e_score_correction_bias.data.copy_(tensor)
                else:
                    yield name, tensor

        return load(model, others())

    return load_weights


laguna.LagunaModel.load_weights = _with_bias_of_router(laguna.LagunaModel.load_weights)
for _model in (bloom.BloomModel, gpt_neox.GPTNeoXModel):
    _model._repack_qkv = _without_shapes(_model._repack_qkv)
# The activation of BLOOM has a hyperbolic tangent; vLLM takes the error function.
bloom.get_act_fn = lambda name: get_act_fn({"gelu": "gelu_pytorch_tanh"}[name])
