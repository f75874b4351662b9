"""Refused options of TRL and of PEFT's LoRA, with reasons and remedies."""

GENERATION_KWARGS_THAT_RESHAPE = frozenset(
    [
        *("do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "encoder_repetition_penalty", "diversity_penalty", "exponential_decay_length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens", "guidance_scale"),
        *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("force_words_ids", "constraints", "sequence_bias", "watermarking_config", "renormalize_logits"),
        *("num_beams", "num_beam_groups", "num_return_sequences", "penalty_alpha", "dola_layers"),
        *("prompt_lookup_num_tokens", "return_dict_in_generate", "assistant_early_exit", "is_assistant", "use_mtp"),
        "token_healing",
    ]
)

# Parameters of vLLM's SamplingParams that reshape the distribution or that the trainer sets.
VLLM_SAMPLING_KWARGS = frozenset(
    [
        *("allowed_token_ids", "bad_words", "logit_bias", "frequency_penalty", "presence_penalty", "min_tokens"),
        *("structured_outputs", "logprobs", "max_tokens", "n", "logprob_token_ids", "thinking_token_budget"),
        "trace_decode_token_ids",
    ]
)

# Inherited options that no objective honours yet, with the reason and the fix.
REFUSED = {
    **dict.fromkeys(
        ("use_transformers_continuous_batching", "use_transformers_paged"),
        "continuous batching casts the master weights to 16 bits and returns no sampling log-probs; set it to `False`",
    ),
    "torch_compile": "a compiled graph ends at every quantized layer, which looks up its low-bit weight by the version of its master; "
    "set `torch_compile=False`",
    "use_liger_kernel": "Liger replaces layers when training starts, after they were quantized and rollouts were set up, and is "
    "untested with quantized layers; leave it unset",
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        "full 16-bit evaluation casts the master weights in place; `bf16=True` already evaluates in bf16",
    ),
    "fsdp": "`accelerate launch --config_file` decides how masters are sharded; launch with FSDP2 (`fsdp_version: 2`)",
    "deepspeed": "`accelerate launch --config_file` decides how masters are sharded; launch with `distributed_type: DEEPSPEED` and "
    "`zero_stage: 2`",
    "neftune_noise_alpha": "noise on the embeddings makes rollout, scoring and loss see different policies; leave it unset",
    "label_smoothing_factor": "the loss of sampled completions has no labels to smooth; leave it at 0",
    "enable_jit_checkpoint": "it can save between backward and optimizer step, and the resumed run would skip the completions of "
    "that step; save with `save_steps`",
}

MODEL_INIT_KWARGS_REFUSED = {
    **dict.fromkeys(
        ("quantization_config", "load_in_4bit", "load_in_8bit"),
        "the masters must stay in high precision, and `scheme` quantizes the forward; for QLoRA give the trainer's `quantization_config`",
    ),
    "use_kernels": "kernels of the Hub replace the forward of whole modules, which may leave out the quantized layers in them; "
    "leave it out",
    **dict.fromkeys(
        ("tp_plan", "tp_size", "distributed_config"),
        "splitting master weights over processes is unsupported; use DDP (`accelerate launch --multi_gpu`)",
    ),
}

_NOT_IN_VLLM = "vLLM cannot run such an adapter"

REFUSED_BY_LORA = {
    "use_dora": f"{_NOT_IN_VLLM}, and it needs the base weight in high precision; leave it out",
    "bias": "biases belong to the frozen base; use bias='none'",
    "lora_bias": f"{_NOT_IN_VLLM}; leave it out",
    "modules_to_save": "they would be trained in full, but the base stays frozen and low-bit; leave it out",
    "target_parameters": "parameters that are not linear layers, such as stacked experts, are not quantized; use "
    "`target_modules`",
    "trainable_token_indices": "the embedding belongs to the frozen base; leave it out",
    "layer_replication": "the base would differ from the checkpoint that is served; leave it out",
    "rank_pattern": "vLLM, which serves the adapter, scales all layers by one rank; use `r`, or lora_mode='merged'",
    "alpha_pattern": "vLLM, which serves the adapter, has one scaling for all layers; use `lora_alpha`, or lora_mode='merged'",
}
"""Options of PEFT's `LoraConfig`."""

PATTERNS_OF_LORA = ("rank_pattern", "alpha_pattern")
"""Those that an adapter inside the low-bit weights may have, because vLLM never gets it."""
