"""
Special facts about families of models: rules that hold for every family, then one row for each family that needs more.

A dense family that transformers and vLLM both know needs no row. Rules are about names of layers, because engines and
checkpoints go by names. Imports neither torch nor vLLM.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Last components of the names of layers that vLLM fuses into one matrix, which has one scheme."""

ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
"""Components of the names of routers. They are compared whole, as `gate*` would also match `gate_proj`."""

MIN_INPUTS = 32
"""Layers with fewer inputs, less than the smallest group, mix streams of a model (Gemma 3n's `correction_coefs`).
They stay in high precision."""

RECURRENT_STEPS = ("dt_proj", "x_proj")
"""Last components of the names of Mamba 1's layers that compute step sizes, of any number of outputs."""

MIN_RECURRENT_OUTPUTS = 128
"""Layers of a recurrence with fewer outputs compute a few numbers for each head, such as decays and step sizes. Their
errors add up over the tokens (https://github.com/microsoft/onnxruntime-genai/issues/2100)."""

SHARED_BLOCK = "shared_transformer"
"""Component of the names of a block that several layers of Zamba 2 are, which vLLM does not name."""

IN_FLOAT32 = ("e_score_correction_bias", "expert_bias")
"""Last components of the names of routers' biases, which vLLM keeps in float32: they decide between scores that 16
bits do not tell apart."""


@dataclass(frozen=True)
class Family:
    """
    One family of models, by the class of its checkpoints.

    - `architecture`: name of transformers' class, as in `architectures` of a `config.json`.
    - `model_type`: the same in `model_type`.
    - `engine_layers`: how vLLM computes its layers, if all their operations have engine numerics: `"fused"` norms sums
      of the residual stream before they are rounded, `"rounded"` norms rounded ones, and `"transformers"` is
      transformers' own code around vLLM's linear layers, norms and attention.
    - `left_vllm`: the release of vLLM from which on it has no class of its own, and runs transformers' in its backend.
    - `vllm_fields`: fields of a `config.json` that vLLM's class reads, and transformers' configuration does not have
      unless the file does, each with the function of that configuration that transformers' class computes.
    - `vllm_values`: values of its configuration that vLLM's class has, whatever the configuration says.
    - `problem_of_plain_vllm`: what vLLM's class leaves out where this package is not installed next to it
      ([`trl_qarl.vllm_plugin.corrected`]).
    - `problem_of_float32`: the reason why an engine in float32 computes something in bfloat16.
    - `shares_head`: whether vLLM's class shares the weight of embedding and output head, whatever the configuration
      says; `None` if it follows the configuration.
    - `has_longer_window`: whether vLLM's layers with a sliding window see one more token than transformers' (Cohere 2:
      https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/commandr.py).
    - `has_one_window`: whether vLLM's layers all have the same sliding window, or none, also as the text of a class of
      pictures and text.
    - `initialized_layers`: last components of the names of layers whose `weight`, which a packed one does not have,
      transformers reads when it loads a model (`_init_weights` of its class, 5.17).
    - `has_compared_pictures`: whether prompts, tensors and log-probs of its pictures were.
    - `gguf`: its architecture in GGUF. For others llama.cpp's conversion changes tensors in ways that are not
      implemented.
    """

    architecture: str
    model_type: str
    engine_layers: str | None = None
    left_vllm: str | None = None
    vllm_fields: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    vllm_values: Mapping[str, Any] = field(default_factory=dict)
    problem_of_plain_vllm: str | None = None
    problem_of_float32: str | None = None
    shares_head: bool | None = None
    has_longer_window: bool = False
    has_one_window: bool = False
    initialized_layers: tuple[str, ...] = ()
    has_compared_pictures: bool = False
    gguf: str | None = None


@dataclass(frozen=True)
class Always:
    """The value of a field that transformers' class always has, whatever a file says."""

    value: Any

    def __call__(self, config: Any) -> Any:
        return self.value


def _always(**fields: Any) -> dict[str, Callable[[Any], Any]]:
    return {name: Always(value) for name, value in fields.items()}


def _windows(config: Any) -> list[int | None]:
    return [config.sliding_window if kind == _SLIDING else None for kind in config.layer_types]


def _head_dim(config: Any) -> int:
    return config.hidden_size // config.num_attention_heads


def _first_dense(config: Any) -> int:
    return [*config.mlp_layer_types, "sparse"].index("sparse")


def _rotated(config: Any) -> int:
    return int(config.head_dim * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0))


def _scaling_of_queries(config: Any) -> dict[str, Any] | None:
    rotations = config.rope_parameters or {}
    beta, length = (rotations.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    return {"original_max_position_embeddings": length, "beta": beta} if beta else None


_SLIDING = "sliding_attention"
_FIELDS_OF_MIMO: dict[str, Callable[[Any], Any]] = {
    "hybrid_layer_pattern": lambda config: [int(kind == _SLIDING) for kind in config.layer_types],
    "moe_layer_freq": lambda config: [int(kind == "sparse") for kind in config.mlp_layer_types],
    "layernorm_epsilon": lambda config: config.rms_norm_eps,
    "sliding_window_size": lambda config: config.sliding_window,
    "swa_head_dim": lambda config: config.head_dim,
    "swa_v_head_dim": lambda config: config.v_head_dim,
    "swa_num_attention_heads": lambda config: config.num_attention_heads,
    "swa_num_key_value_heads": lambda config: 2 * config.num_key_value_heads,
    "rope_theta": lambda config: config.rope_parameters["full_attention"]["rope_theta"],
    "swa_rope_theta": lambda config: config.rope_parameters[_SLIDING]["rope_theta"],
    "partial_rotary_factor": lambda config: config.rope_parameters[_SLIDING].get("partial_rotary_factor", 1.0),
    **_always(add_swa_attention_sink_bias=True),
}

# Queries beyond the original context are scaled by position, in vLLM only if a field of Mistral's own files says so.
_SCALING_OF_MISTRAL: dict[str, Callable[[Any], Any]] = {"llama_4_scaling": _scaling_of_queries}
_VALUES_OF_DEEPSEEK = {"attention_bias": False, "rope_interleave": True}
_WIDTHS_OF_LFM2: dict[str, Callable[[Any], Any]] = dict.fromkeys(
    ("block_dim", "conv_dim"), lambda config: config.hidden_size
)

_UNBIASED = {"attention_bias": False}
_ROWS = (
    Family(
        "AfmoeForCausalLM",
        "afmoe",
        shares_head=False,
        vllm_fields=_always(n_group=1, topk_group=1, route_norm=True, score_func="sigmoid"),
    ),
    Family("AXK1ForCausalLM", "axk1", shares_head=False, vllm_values=_VALUES_OF_DEEPSEEK),
    # Its gated norms have groups, those of transformers are of a whole layer.
    Family("BambaForCausalLM", "bamba", vllm_values={"mamba_n_groups": 1}),
    Family("BloomForCausalLM", "bloom", vllm_values={"tie_word_embeddings": True}),
    Family(
        "ApertusForCausalLM",
        "apertus",
        problem_of_float32="vLLM keeps the parameters of its activation in bfloat16 (`XIELU` in layers/activation.py)",
    ),
    Family("ArceeForCausalLM", "arcee", engine_layers="fused", left_vllm="0.32"),
    Family("CohereForCausalLM", "cohere", vllm_values=_UNBIASED, shares_head=True),
    Family("Cohere2ForCausalLM", "cohere2", vllm_values=_UNBIASED, shares_head=True, has_longer_window=True),
    Family("Cohere2MoeForCausalLM", "cohere2_moe", vllm_values=_UNBIASED, shares_head=True, has_longer_window=True),
    Family("DeepseekV2ForCausalLM", "deepseek_v2", shares_head=False, vllm_values=_UNBIASED | {"mlp_bias": False}),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        shares_head=False,
        vllm_values=_VALUES_OF_DEEPSEEK,
        vllm_fields=_always(scoring_func="sigmoid", topk_method="noaux_tc"),
    ),
    Family("Ernie4_5ForCausalLM", "ernie4_5", engine_layers="fused", vllm_values={"use_bias": False}),
    Family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", vllm_values={"use_bias": False}),
    Family("Exaone4ForCausalLM", "exaone4", engine_layers="rounded"),
    Family("ExaoneMoeForCausalLM", "exaone_moe", vllm_fields={"sliding_windows": _windows}),
    Family(
        "FalconForCausalLM",
        "falcon",
        vllm_values={"activation": "gelu"},
        initialized_layers=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    Family("FalconH1ForCausalLM", "falcon_h1", vllm_values=_UNBIASED | {"mlp_bias": False}),
    Family("FalconMambaForCausalLM", "falcon_mamba", initialized_layers=("out_proj",)),
    Family("GemmaForCausalLM", "gemma", engine_layers="fused", vllm_values=_UNBIASED),
    Family("Gemma2ForCausalLM", "gemma2", engine_layers="fused", shares_head=True),
    Family("Gemma3ForCausalLM", "gemma3_text", engine_layers="fused"),
    Family("Gemma4ForConditionalGeneration", "gemma4", has_compared_pictures=True),
    Family(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        shares_head=True,
        problem_of_plain_vllm="the embeddings of each layer (models/gemma3n.py)",
    ),
    Family("GlmForCausalLM", "glm", engine_layers="fused", left_vllm="0.32"),
    Family("Glm4ForCausalLM", "glm4", engine_layers="fused"),
    Family("Glm4MoeForCausalLM", "glm4_moe", shares_head=False, vllm_fields={"head_dim": _head_dim}),
    Family(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        shares_head=False,
        vllm_values={"rope_interleave": True},
        vllm_fields={"first_k_dense_replace": _first_dense},
    ),
    Family("Glm4vForConditionalGeneration", "glm4v", vllm_fields=_always(attention_bias=True)),
    Family(
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        vllm_fields={"head_dim": _head_dim, **_always(use_qk_norm=False)},
    ),
    Family("GPTJForCausalLM", "gptj", shares_head=False),
    Family("GPTBigCodeForCausalLM", "gpt_bigcode", initialized_layers=("c_proj",)),
    Family("GptOssForCausalLM", "gpt_oss", shares_head=False, vllm_values={"attention_bias": True}),
    Family("GraniteForCausalLM", "granite", engine_layers="rounded"),
    Family("GraniteMoeSharedForCausalLM", "granitemoeshared", vllm_values=_UNBIASED),
    Family("GraniteMoeHybridForCausalLM", "granitemoehybrid", vllm_values={"mamba_n_groups": 1}),
    Family(
        "HYV3ForCausalLM",
        "hy_v3",
        vllm_values=_UNBIASED,
        vllm_fields={
            "expert_hidden_dim": lambda config: config.moe_intermediate_size,
            "first_k_dense_replace": _first_dense,
        },
    ),
    Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", engine_layers="transformers"),
    Family("Idefics3ForConditionalGeneration", "idefics3", has_compared_pictures=True),
    Family("InternVLForConditionalGeneration", "internvl", has_compared_pictures=True),
    Family("JambaForCausalLM", "jamba", shares_head=False),
    Family("LagunaForCausalLM", "laguna", problem_of_plain_vllm="the bias of the router (models/laguna.py)"),
    Family("Lfm2ForCausalLM", "lfm2", shares_head=True, vllm_fields=_WIDTHS_OF_LFM2),
    Family("Lfm2MoeForCausalLM", "lfm2_moe", shares_head=True),
    Family("Lfm2VlForConditionalGeneration", "lfm2_vl", vllm_fields=_WIDTHS_OF_LFM2),
    Family("LightOnOcrForConditionalGeneration", "lighton_ocr", has_compared_pictures=True),
    Family("LlamaForCausalLM", "llama", engine_layers="fused", gguf="llama"),
    Family("LlavaForConditionalGeneration", "llava", has_compared_pictures=True),
    Family("LlavaNextForConditionalGeneration", "llava_next", has_compared_pictures=True),
    Family("MambaForCausalLM", "mamba", initialized_layers=("out_proj",)),
    Family("Mamba2ForCausalLM", "mamba2", vllm_values={"n_groups": 1}, initialized_layers=("out_proj",)),
    Family(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        shares_head=False,
        vllm_fields=_FIELDS_OF_MIMO,
        vllm_values={"routed_scaling_factor": 1.0},
    ),
    Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        shares_head=False,
        vllm_fields={"rotary_dim": _rotated, **_always(scoring_func="sigmoid", use_routing_bias=True)},
    ),
    Family("MiniCPM3ForCausalLM", "minicpm3", vllm_values=_UNBIASED),
    Family("Ministral3ForCausalLM", "ministral3", vllm_fields=_SCALING_OF_MISTRAL),
    Family("MistralForCausalLM", "mistral", engine_layers="fused", gguf="llama"),
    Family(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        vllm_fields=_SCALING_OF_MISTRAL,
        has_compared_pictures=True,
    ),
    Family("MixtralForCausalLM", "mixtral", engine_layers="fused"),
    Family("NanoChatForCausalLM", "nanochat", initialized_layers=("o_proj",)),
    Family("OlmoForCausalLM", "olmo", engine_layers="transformers"),
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        shares_head=False,
        vllm_values=_UNBIASED | {"clip_qkv": None, "norm_topk_prob": False},
    ),
    Family("Olmo2ForCausalLM", "olmo2", engine_layers="transformers"),
    Family("Olmo3ForCausalLM", "olmo3", engine_layers="transformers"),
    Family(
        "PhiForCausalLM",
        "phi",
        shares_head=False,
        vllm_values={"qk_layernorm": False},
        vllm_fields={"n_inner": lambda config: config.intermediate_size},
    ),
    Family("Phi3ForCausalLM", "phi3", engine_layers="fused"),
    Family(
        "PhimoeForCausalLM",
        "phimoe",
        problem_of_plain_vllm="the bias of the output head (models/phimoe.py)",
        vllm_values={
            "attention_bias": True,
            "lm_head_bias": True,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01,
        },
    ),
    Family("Qwen2ForCausalLM", "qwen2", engine_layers="fused", has_one_window=True, gguf="qwen2"),
    Family(
        "Qwen2MoeForCausalLM", "qwen2_moe", engine_layers="fused", vllm_values={"qkv_bias": True}, has_one_window=True
    ),
    Family("Qwen2VLForConditionalGeneration", "qwen2_vl", has_one_window=True, has_compared_pictures=True),
    Family("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", has_one_window=True, has_compared_pictures=True),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        engine_layers="fused",
        has_one_window=True,
        vllm_values=_UNBIASED,
        gguf="qwen3",
    ),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", engine_layers="fused", vllm_values=_UNBIASED),
    Family("Qwen3NextForCausalLM", "qwen3_next", shares_head=False, vllm_values=_UNBIASED),
    Family("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", vllm_fields=_always(norm_topk_prob=True)),
    Family("Qwen3_5ForCausalLM", "qwen3_5_text", vllm_values=_UNBIASED),
    Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", vllm_values=_UNBIASED),
    Family("Qwen3_5ForConditionalGeneration", "qwen3_5", has_compared_pictures=True),
    Family("Qwen3VLForConditionalGeneration", "qwen3_vl", has_compared_pictures=True),
    Family(
        "SeedOssForCausalLM",
        "seed_oss",
        engine_layers="fused",
        left_vllm="0.32",
        vllm_values={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    ),
    Family("SmolLM3ForCausalLM", "smollm3", engine_layers="transformers"),
    Family("SmolVLMForConditionalGeneration", "smolvlm", has_compared_pictures=True),
    Family(
        "StableLmForCausalLM",
        "stablelm",
        engine_layers="rounded",
        vllm_values={"qk_layernorm": False, "use_parallel_residual": False},
    ),
    Family("Starcoder2ForCausalLM", "starcoder2", engine_layers="transformers"),
    Family("VaultGemmaForCausalLM", "vaultgemma", engine_layers="transformers"),
    Family("VipLlavaForConditionalGeneration", "vipllava", has_compared_pictures=True),
    Family("Zamba2ForCausalLM", "zamba2", shares_head=True),
)


def is_router(name: str) -> bool:
    """Return whether a module with this name chooses experts, or is a part of one that does (`mlp.gate.wg`)."""
    return any(part in ROUTER_NAMES or part.endswith("_router") for part in name.split("."))


FAMILIES = {row.architecture: row for row in _ROWS}
"""The rows, by architecture."""


def family_of(architecture: str) -> Family:
    """Return the row of an architecture, one without special facts if it has none."""
    return FAMILIES.get(architecture) or Family(architecture, "")


def fields_for_vllm(architecture: str, config: Any) -> dict[str, Any]:
    """Return `vllm_fields` with the values of a configuration of text, which it may have from its file, without those
    that are `None`."""
    fields = family_of(architecture).vllm_fields
    values = {name: getattr(config, name) if hasattr(config, name) else make(config) for name, make in fields.items()}
    return {name: value for name, value in values.items() if value is not None}


def has_one_window(model_type: str) -> bool:
    """Return whether the row of a model type of text has `has_one_window`."""
    return any(row.has_one_window and row.model_type == model_type.removesuffix("_text") for row in _ROWS)


def with_fact(name: str) -> tuple[str, ...]:
    """Return the architectures whose rows have a fact, such as `"engine_layers"`."""
    return tuple(architecture for architecture, row in FAMILIES.items() if getattr(row, name))


def gguf_architectures() -> dict[str, str]:
    """Return the architectures in GGUF, by model type."""
    return {row.model_type: row.gguf for row in _ROWS if row.gguf is not None}
