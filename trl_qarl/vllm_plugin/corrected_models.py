"""
Classes of vLLM 0.31 that compute another function than transformers', or cannot load a low-bit layer, put right where
they differ, and one that it no longer has. vLLM's registry names this module, which is imported when an engine needs
one of them.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.models import (
    bloom,
    gemma3n,
    glm4_moe_lite,
    granitemoehybrid,
    jamba,
    laguna,
    llama4,
    mamba,
    minicpm3,
    olmo_hybrid,
    phimoe,
    qwen3_moe,
    zamba2,
)
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from ..models import SHARED_BLOCK
from ..replacing import replaced


BloomForCausalLM = bloom.BloomForCausalLM
GraniteMoeHybridForCausalLM = granitemoehybrid.GraniteMoeHybridForCausalLM
JambaForCausalLM, OlmoHybridForCausalLM = jamba.JambaForCausalLM, olmo_hybrid.OlmoHybridForCausalLM
Qwen3MoeForCausalLM = qwen3_moe.Qwen3MoeForCausalLM
LagunaForCausalLM, MiniCPM3ForCausalLM = laguna.LagunaForCausalLM, minicpm3.MiniCPM3ForCausalLM


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


@MambaMixer.register_oot
class LowBitMambaMixer(MambaMixer):
    """vLLM's layer of Mamba 1, which makes its linear layers without the scheme of a checkpoint (mamba_mixer.py)."""

    def __init__(self, hidden_size: int, *args: Any, use_bias: bool, prefix: str = "", **kwargs: Any):
        super().__init__(hidden_size, *args, use_bias=use_bias, prefix=prefix, **kwargs)
        width, scheme = self.intermediate_size, get_current_vllm_config().quant_config
        # Others quantize what a checkpoint has in high precision.
        options = {"bias": use_bias, "quant_config": scheme if isinstance(scheme, CompressedTensorsConfig) else None}
        self.in_proj = MergedColumnParallelLinear(hidden_size, [width] * 2, prefix=f"{prefix}.in_proj", **options)
        self.out_proj = RowParallelLinear(width, hidden_size, prefix=f"{prefix}.out_proj", **options)
        # Gives `out_proj` contiguous rows, which low-bit kernels require too.
        self.is_lora_enabled = True


def _make_jambas_mixer(*args: Any, prefix: str, **kwargs: Any) -> MambaMixer:
    """Make a layer with the name that it has in checkpoints, which may leave parts of it in high precision."""
    return MambaMixer(*args, prefix=f"{prefix.removesuffix('mixer')}mamba", **kwargs)


jamba.MambaMixer = _make_jambas_mixer


class MambaForCausalLM(mamba.MambaForCausalLM, SupportsLoRA):
    """vLLM's class, without what an adapter needs to know."""

    packed_modules_mapping = {"in_proj": ["in_proj"]}
    embedding_modules = {"embeddings": "input_embeddings", "lm_head": "output_embeddings"}


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


class Zamba2ForCausalLM(zamba2.Zamba2ForCausalLM):
    """vLLM's class, which gives the layers of shared blocks names that no checkpoint has (models/zamba2.py). It would
    look for low-bit ones, although a checkpoint leaves them out."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        left_out = getattr(vllm_config.quant_config, "ignore", ())
        is_plain = any(SHARED_BLOCK in name.split(".") for name in left_out)
        make = zamba2.Zamba2AttentionDecoderLayer

        def make_block(*args: Any, quant_config: Any, **kwargs: Any) -> torch.nn.Module:
            return make(*args, quant_config=None if is_plain else quant_config, **kwargs)

        with replaced(zamba2, Zamba2AttentionDecoderLayer=make_block):
            super().__init__(vllm_config=vllm_config, prefix=prefix)


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


def _with_parts(make_loader: Callable[..., Callable[..., None]]) -> Callable[..., Any]:
    """Decorate what makes the loader of a convolution whose parts have these `sizes` in a checkpoint, to find which
    part a tensor is (https://github.com/vllm-project/vllm/pull/55858), or that it is the whole."""

    @wraps(make_loader)
    def make(sizes: list[int], *ranks: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        load = make_loader(sizes, *ranks)

        # vLLM's reload sets the argument of this name.
        def load_parts(param: torch.Tensor, tensor: torch.Tensor) -> None:
            part = getattr(tensor, "shard_id", None)
            for number, rows in enumerate(tensor.split(sizes)) if part is None else [(part, tensor)]:
                load(param, rows, number)

        return load_parts

    return make


olmo_gdn_linear_attn._make_fused_conv1d_weight_loader = _with_parts(
    olmo_gdn_linear_attn._make_fused_conv1d_weight_loader
)


def _with_bias_of_router(load: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate Laguna's loader, which leaves out the bias of the router, a parameter of `routed_experts` in vLLM."""

    @wraps(load)
    def load_weights(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name.endswith("experts.e_score_correction_bias"):
                    experts = model.get_submodule(name.rpartition(".")[0])
                    experts.routed_experts.e_score_correction_bias.data.copy_(tensor)
                else:
                    yield name, tensor

        return load(model, others())

    return load_weights


def _with_name(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate what makes MiniCPM3's attention, and gives `q_a_proj` no name, by which a checkpoint may leave it in
    high precision."""

    @wraps(init)
    def __init__(self: Any, *args: Any, prefix: str, **kwargs: Any) -> None:
        make = minicpm3.ReplicatedLinear

        def make_linear(*sizes: int, prefix: str = f"{prefix}.q_a_proj", **options: Any) -> torch.nn.Module:
            return make(*sizes, prefix=prefix, **options)

        with replaced(minicpm3, ReplicatedLinear=make_linear):
            init(self, *args, prefix=prefix, **kwargs)

    return __init__


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
# vLLM adds it when the scheme of a checkpoint is known already, and only for `mlp_only_layers`.
Qwen3MoeForCausalLM.packed_modules_mapping["gate_up_proj"] = ["gate_proj", "up_proj"]
minicpm3.MiniCPM3Attention.__init__ = _with_name(minicpm3.MiniCPM3Attention.__init__)
laguna.LagunaModel.load_weights = _with_bias_of_router(laguna.LagunaModel.load_weights)
bloom.BloomModel._repack_qkv = _without_shapes(bloom.BloomModel._repack_qkv)
# vLLM 0.31 alone has it; later ones run GPT-NeoX by their Transformers backend.
if find_spec("vllm.model_executor.models.gpt_neox"):
    from vllm.model_executor.models.gpt_neox import GPTNeoXForCausalLM, GPTNeoXModel  # noqa: F401

    GPTNeoXModel._repack_qkv = _without_shapes(GPTNeoXModel._repack_qkv)
# The activation of BLOOM has a hyperbolic tangent; vLLM takes the error function.
bloom.get_act_fn = lambda name: get_act_fn({"gelu": "gelu_pytorch_tanh"}[name])
