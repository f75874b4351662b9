"""The families of the zoo: fields of a tiny configuration by model type, beside those of [`SIZES`]."""

from typing import Any

from testing_utils.pictures import KINDS, KINDS_OF_TEXT
from testing_utils.towers import TOWERS


SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_MAMBA = {"state_size": 16, "num_heads": 8, "head_dim": 32, "n_groups": 1, "chunk_size": 16, "expand": 2}
_GRANITE_HYBRID = {
    "mamba_n_heads": 32,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "layer_types": ["mamba", "attention"],
    "mamba_chunk_size": 16,
    "router_aux_loss_coef": 0.0,
}
_QWEN_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}

_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
_EIGHT = {**_EXPERTS, "num_experts": 8}
_EIGHT_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_GROUPS = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}

FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cwm": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "bloom": {"hidden_size": 128, "n_head": 4, "n_layer": 2, "tie_word_embeddings": True},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "sliding_window": 128, "num_hidden_layers": 4},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 16, "sliding_window_pattern": 2},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "bias": False},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 64, "sliding_window": 16},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 64,
        "sliding_window": 16,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3n_text": {
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "num_hidden_layers": 4,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 260,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "laurel_rank": 32,
        "intermediate_size": [256] * 4,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gemma4_text": {
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "num_hidden_layers": 4,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 260,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 128,
    },
    "gemma4_unified_text": {
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 128,
        "hidden_size_per_layer_input": 0,
    },
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4},
    "gpt_bigcode": {"n_embd": 128, "n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "gptj": {"n_embd": 128, "n_layer": 2, "n_head": 4, "rotary_dim": 16},
    "granite": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "granite_swa": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "helium": {},
    "hunyuan_v1_dense": {},
    "hyperclovax": {},
    "jais2": {},
    "llama": {},
    "minicpm3": {**_LATENT, "tie_word_embeddings": True, "head_dim": None, "num_key_value_heads": 2},
    "ministral": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "ministral3": {"sliding_window": None},
    "mistral": {"sliding_window": None},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
    "persimmon": {"num_key_value_heads": 2},
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 2},
    "phi3": {"sliding_window": None},
    "phi3 long": {
        "sliding_window": None,
        "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "long_factor": [2.0] * 32,
            "short_factor": [1.1] * 32,
            "original_max_position_embeddings": 256,
        },
    },
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "stablelm": {"partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": None},
    "youtu": {**_LATENT, "head_dim": 32, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "vaultgemma": {"query_pre_attn_scalar": 64, "sliding_window": 16},
    # Hybrids
    "bamba": {
        "mamba_n_heads": 32,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "attn_layer_indices": [1],
        "mamba_chunk_size": 16,
    },
    "falcon_h1": {
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_ssm": 256,
        "mamba_chunk_size": 16,
    },
    "falcon_mamba": {"state_size": 16, "time_step_rank": 8},
    "granitemoehybrid": {
        **_GRANITE_HYBRID,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 256,
        "position_embedding_type": "rope",
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 100,
        "expert_layer_offset": 99,
        "num_experts": 1,
        "router_aux_loss_coef": 0.0,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
    },
    "lfm2": {
        "tie_word_embeddings": True,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "mamba": {"state_size": 16, "time_step_rank": 8},
    "mamba2": {**_MAMBA},
    "nemotron_h": {
        "mamba_num_heads": 32,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 16,
        "hybrid_override_pattern": "M*-",
        "num_hidden_layers": 3,
        "chunk_size": 16,
    },
    "qwen3_5_text": {**_QWEN_LINEAR, "head_dim": 128},
    "zamba2": {
        "tie_word_embeddings": True,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "mamba_d_state": 16,
        "n_mamba_heads": 32,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "adapter_rank": 32,
        "chunk_size": 16,
    },
    "olmo_hybrid": {**_QWEN_LINEAR, "head_dim": 64},
    "kimi_linear": {
        **_EXPERTS,
        **_LATENT,
        "q_lora_rank": None,
        "num_local_experts": 8,
        "n_shared_experts": 1,
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 2,
    },
    # Mixtures of experts
    "jamba moe": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 8,
        "intermediate_size": 64,
        "router_aux_loss_coef": 0.0,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
    },
    "axk1": {**_EXPERTS, **_LATENT, **_GROUPS, "head_dim": 32, "num_key_value_heads": 2},
    "afmoe": {
        **_EIGHT,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "mup_enabled": True,
        "route_scale": 1.5,
    },
    "cohere2_moe": {
        **_EIGHT,
        "intermediate_size": 64,
        "tie_word_embeddings": True,
        "sliding_window": 128,
        "num_shared_experts": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
    },
    "dots1": {**_EXPERTS, **_GROUPS, "sliding_window": None},
    "exaone_moe": {
        **_EIGHT,
        "num_shared_experts": 1,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "granitemoe_swa": {
        **_EIGHT_LOCAL,
        "router_aux_loss_coef": 0.0,
        "shared_intermediate_size": 64,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "hy_v3": {**_EIGHT, "num_shared_experts": 1},
    "laguna": {
        **_EIGHT,
        "shared_expert_intermediate_size": 64,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "longcat_flash": {
        **_LATENT,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "num_layers": 2,
        "ffn_hidden_size": 256,
        "moe_topk": 2,
        "n_routed_experts": 8,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 64,
    },
    "mellum": {**_EIGHT, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "mimo_v2_flash": {
        **_EXPERTS,
        "n_routed_experts": 8,
        "v_head_dim": 64,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    },
    "solar_open": {**_EXPERTS, "n_routed_experts": 8},
    "deepseek_v2": {
        **_EXPERTS,
        **_LATENT,
        **_GROUPS,
        "rope_parameters": _YARN,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
    },
    "deepseek_v3": {
        **_EXPERTS,
        **_LATENT,
        **_GROUPS,
        "n_group": 2,
        "rope_parameters": _YARN,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
    },
    "deepseek_v32": {**_EXPERTS, **_LATENT, **_GROUPS, "head_dim": 32, "num_key_value_heads": 2, "index_topk": 16},
    "ernie4_5_moe": {
        "moe_intermediate_size": 64,
        "moe_k": 2,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "flex_olmo": {**_EIGHT_LOCAL, "num_experts": 8},
    "gemma4_text moe": {
        **_EIGHT,
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 128,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "glm4_moe": {**_EXPERTS, **_GROUPS, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {
        **_EXPERTS,
        **_LATENT,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "head_dim": 32,
        "num_key_value_heads": 2,
    },
    "gpt_oss": {**_EIGHT_LOCAL, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss mxfp4a16": {**_EIGHT_LOCAL, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "granitemoe": {**_EIGHT_LOCAL, "router_aux_loss_coef": 0.0, "embedding_multiplier": 2.0, "logits_scaling": 2.0},
    "granitemoehybrid moe": {**_EIGHT_LOCAL, **_GRANITE_HYBRID, "shared_intermediate_size": 64},
    "granitemoeshared": {**_EIGHT_LOCAL, "router_aux_loss_coef": 0.0, "shared_intermediate_size": 64},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "num_experts_per_tok": 2, "intermediate_size": 64},
    "jetmoe": {**_EIGHT_LOCAL, "kv_channels": 64},
    "lfm2_moe": {
        **_EIGHT,
        "tie_word_embeddings": True,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "llama4_text": {
        **_EIGHT_LOCAL,
        "intermediate_size_mlp": 256,
        "num_experts_per_tok": 1,
        "router_aux_loss_coef": 0.0,
        "num_hidden_layers": 4,
        "attention_chunk_size": 128,
        "floor_scale": 16,
    },
    "minimax": {**_EIGHT_LOCAL, "layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "minimax_m2": {**_EIGHT_LOCAL, "router_aux_loss_coef": 0.0},
    "mistral4": {
        **_EXPERTS,
        **_LATENT,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 2,
    },
    "mixtral": {**_EIGHT_LOCAL, "sliding_window": None},
    "nemotron_h moe": {
        **_EXPERTS,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 16,
        "hybrid_override_pattern": "M*E",
        "num_hidden_layers": 3,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 64,
    },
    "olmoe": {**_EIGHT, "intermediate_size": 64},
    "phimoe": {**_EIGHT_LOCAL, "attention_bias": True, "lm_head_bias": True, "router_aux_loss_coef": 0.0},
    "qwen2_moe": {**_EIGHT, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**_EIGHT},
    "qwen3_moe dense": {**_EIGHT, "mlp_only_layers": [0]},
    "qwen3_5_moe_text": {**_QWEN_LINEAR, **_EIGHT, "head_dim": 128, "shared_expert_intermediate_size": 64},
    "qwen3_next": {**_QWEN_LINEAR, **_EIGHT, "head_dim": 128, "shared_expert_intermediate_size": 64},
}

WITH_TOWER = (*KINDS, *KINDS_OF_TEXT, *TOWERS)
"""Classes with a tower, which are trained on text; their configurations and processors are those of
`testing_utils.pictures` and `testing_utils.towers`."""
FAMILIES |= {kind: {} for kind in WITH_TOWER}

SCHEMES = {"gpt_oss mxfp4a16": "mxfp4a16"}
"""Schemes other than `w4a16`; the model is saved in them too, as it is released."""

# vLLM keeps Apertus' activation in it, and has kernels for CPUs of the others' linear attention, which in float32 are
# ours. Of Qwen3.5's mixture it rounds routes too, which hides other differences.
IN_BFLOAT16 = {"apertus", "qwen3_5", "qwen3_5_text"}

# Their configuration computes it from the other sizes.
WITHOUT_HEAD_DIM = {"falcon", "glm4_moe", "zamba2"}

REFUSED: dict[str, str] = {
    "kimi_linear": "checkpoints hold the matrices of experts in another form",
    "longcat_flash": "interface for the computation of experts",
    "deepseek_v32": "sparse attention",
    "gpt2": "Its `Conv1D` is no linear layer",
    "jetmoe": "interface for the computation of experts",
    "minimax": "only if all its layers attend",
    "youtu": "sets the embedding of the padding token to 0",
}
"""Parts of the refusals of families that do not train with vLLM on a CPU."""

_MIXTURES = [
    family
    for family, fields in FAMILIES.items()
    if family == "glm4v_moe"
    or fields.keys() & {"moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts"}
]
_SIZES = "supported sizes are multiples of 32"
EXPORT_FAILS: dict[tuple[str, str], str] = {
    # vLLM for CPUs has experts in INT4 only where AMX is, for some routers, and rounds their activations there.
    **{(family, "vllm"): "No WNA16 MoE backend" for family in (*_MIXTURES, "qwen3_5_moe", "qwen3_vl_moe")},
    ("gpt_oss mxfp4a16", "vllm"): "No MXFP4 MoE backend",
    # Their loaders reorder `weight_shape` by heads.
    **dict.fromkeys((("bloom", "vllm"), ("gpt_neox", "vllm")), "is invalid for input of size 2"),
    ("falcon_h1", "vllm"): _SIZES,
    ("laguna", "vllm"): _SIZES,
    # Without a name it is no layer of a group of several.
    ("minicpm3", "vllm"): "q_a_proj.weight_packed",
    # On CPUs with bf16 instructions; on others its log-probs are wrong without this package's plugin.
    **dict.fromkeys((("lfm2", "vllm"), ("lfm2_vl", "vllm")), "support only width of 4"),
    ("mamba2", "vllm"): _SIZES,
    ("nemotron_h moe", "vllm"): _SIZES,
    # vLLM 0.31 itself has no class of Bamba, gives no scheme to layers of Mamba 1, asks for Triton in OLMo's linear
    # attention, and looks for low-bit layers in Zamba 2's shared blocks.
    ("bamba", "vllm"): "vLLM has no other way to handle it",
    **{(family, "vllm"): "no attribute 'data'" for family in ("falcon_mamba", "jamba", "mamba")},
    ("olmo_hybrid", "vllm"): "no attribute 'set_allocator'",
    ("zamba2", "vllm"): "not divisible by group_size",
    # transformers 5.17 reads `weight` of all its linear layers, which packed ones do not have (`_init_weights`).
    ("falcon", "transformers"): "no attribute 'weight'",
    # Their checkpoints in 16 bits stack experts, and transformers reads low-bit experts only one by one.
    ("gemma4_text moe", "transformers"): "random values",
    ("gpt_oss", "transformers"): "random values",
    ("mistral4", "transformers"): "random values",
    ("llama4_text", "transformers"): "Quantization of module type",
    ("granitemoe", "transformers"): "random values",
    ("granitemoe_swa", "transformers"): "random values",
    ("granitemoehybrid moe", "transformers"): "random values",
    ("granitemoeshared", "transformers"): "random values",
    ("qwen3_vl_moe", "transformers"): "random values",
}
"""Parts of the errors of plain engines that cannot load an export, by family and engine."""

OTHERWISE = {("gemma3n_text", "vllm")}
"""Families that a plain engine loads and computes otherwise, for which an export warns."""

ADAPTED: dict[str, str] = {
    **dict.fromkeys(_MIXTURES, r".*(self_attn|linear_attn)\.\w*proj\w*"),
    **dict.fromkeys(WITH_TOWER, r".*(language_model|text_model)\.layers\..*_proj"),
    # PEFT refuses adapters of `out_proj` in these.
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "nemotron_h"), r".*\.(?!out_proj)\w+_proj"),
    **dict.fromkeys(("afmoe", "nemotron_h moe"), r".*\.[qkvo]_proj"),
    **dict.fromkeys(
        ("glm4v_moe", "qwen3_5_moe", "qwen3_vl_moe"), r".*language_model.*(self_attn|linear_attn)\.\w*proj\w*"
    ),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), r".*\.in_proj"),
}
"""Layers that get an adapter, instead of all linear ones, which would include experts, routers or a tower."""

LORA_FAILS: dict[str, str] = {
    **dict.fromkeys(
        ("bloom", "cohere2_moe", "falcon", "gemma3n_text", "gpt_neox", "gptj", "mamba2", "mimo_v2_flash", "stablelm"),
        "takes no adapters",
    ),
    **dict.fromkeys(("llava_onevision", "mistral4"), "takes no adapters"),
    "zamba2": "takes no adapters",
    "gpt_bigcode": "could not be wrapped",
}
"""Parts of the refusals of adapters next to low-bit layers, by family."""

LOOSE = {"nemotron_h": 1e-4, "nemotron_h moe": 1e-4, "zamba2": 2e-4}
"""Limits of families whose operations enlarge rounding, such as a squared ReLU, or differ: transformers limits the
step sizes of Nemotron-H and Zamba 2."""

NOTES: dict[str, str] = {
    **dict.fromkeys(("cohere2", "cohere2_moe"), "sequences within the window"),
    **dict.fromkeys(
        (
            "granitemoe",
            "granitemoe_swa",
            "granitemoehybrid",
            "granitemoehybrid moe",
            "granitemoeshared",
            "jamba",
            "jamba moe",
            "llama4_text",
            "phimoe",
        ),
        "`router_aux_loss_coef=0`",
    ),
    "gpt_oss mxfp4a16": "from a checkpoint in MXFP4",
    "phi3 long": "sequences within `original_max_position_embeddings`",
}
