"""Granite 4 and Bamba, which has its layers."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import wraps
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import granitemoehybrid
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from ...replacing import replaced


GraniteMoeHybridForCausalLM = granitemoehybrid.GraniteMoeHybridForCausalLM


class BambaForCausalLM(granitemoehybrid.GraniteMoeHybridForCausalLM):
    """Bamba, whose class has left vLLM (https://github.com/vllm-project/vllm/pull/45990), as a Granite 4 without
    multipliers, whose layers have other names."""

    packed_modules_mapping = {
        **granitemoehybrid.GraniteMoeHybridForCausalLM.packed_modules_mapping,
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={
            ".A_log": ".A",
            ".feed_forward.": ".shared_mlp.",
            ".pre_ff_layernorm": ".post_attention_layernorm",
            ".final_layernorm": ".norm",
        },
        orig_to_new_stacked={
            **{f".{name}_proj": (".qkv_proj", name) for name in "qkv"},
            **{f".{name}_proj": (".gate_up_proj", number) for number, name in enumerate(("gate", "up"))},
        },
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        config = deepcopy(vllm_config.model_config.hf_config)
        config.residual_multiplier = config.embedding_multiplier = config.logits_scaling = 1.0
        config.attention_multiplier = (config.hidden_size // config.num_attention_heads) ** -0.5
        config.position_embedding_type, config.num_local_experts = "rope", 0
        config.shared_intermediate_size = config.intermediate_size
        sizes = config.hidden_size, config.intermediate_size, config.hidden_act

        def make_mlp(config: Any, quant_config: Any, prefix: str) -> LlamaMLP:
            return LlamaMLP(*sizes, quant_config=quant_config, bias=config.mlp_bias, prefix=prefix)

        with (
            replaced(vllm_config.model_config, hf_config=config),
            replaced(granitemoehybrid, GraniteMoeSharedMLP=make_mlp),
        ):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        # It loads no parts of matrices but Granite's.
        self.model.load_weights = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def _with_one_shape(load: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate Granite 4's loader, which raises for a tensor of experts that are complete: vLLM counts the shapes of
    an expert's first two matrices, for which it has one place, twice."""

    @wraps(load)
    def load_weights(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return load(model, ((name, tensor) for name, tensor in weights if not name.endswith("up_proj.weight_shape")))

    return load_weights


granitemoehybrid.GraniteMoeHybridModel.load_weights = _with_one_shape(
    granitemoehybrid.GraniteMoeHybridModel.load_weights
)
