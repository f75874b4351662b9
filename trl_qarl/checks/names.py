"""Names of options and folders that do not exist: options that TRL and transformers have renamed or removed, and
spelling mistakes."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any


RENAMED = {
    # transformers' TrainingArguments
    "evaluation_strategy": "eval_strategy",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "no_cuda": "use_cpu",
    "warmup_ratio": "warmup_steps",
    "torchdynamo": "torch_compile_backend",
    "xpu_backend": "ddp_backend",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "include_tokens_per_second": "include_num_input_tokens_seen",
    # TRL's GRPOConfig and ModelConfig
    "torch_dtype": "dtype",
    "use_liger_loss": "use_liger_kernel",
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
}
"""Options of earlier releases that take the same values under another name."""

_ENGINE = (
    "vLLM runs on the GPUs of the training (`vllm_mode: colocate`) or of its server (`vllm_mode: server`); remove it"
)
_OPEN_R1 = "it is an option of open-r1's own script; "

REMOVED = {
    # transformers' TrainingArguments
    "overwrite_output_dir": "an output directory is never emptied, and `resume_from_checkpoint` continues a run; remove it",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "adafactor": "write `optim: adafactor`",
    "gradient_checkpointing_use_reentrant": "write `gradient_checkpointing_kwargs: {use_reentrant: false}`",
    "include_inputs_for_metrics": "write `include_for_metrics: [inputs]`",
    "push_to_hub_organization": "write `hub_model_id: ORGANIZATION/NAME`",
    "sharded_ddp": "launch with FSDP2 (`accelerate launch --config_file`)",
    **dict.fromkeys(("dispatch_batches", "split_batches"), "TRL gives each process its own batches; remove it"),
    # TRL's GRPOConfig
    "max_prompt_length": "TRL does not truncate prompts; remove it, and leave prompts that are too long out of the dataset",
    "vllm_device": _ENGINE,
    "vllm_dtype": "the engine takes the learner's dtype (`bf16`); remove it",
    # open-r1's GRPO recipes
    "dataset_configs": f"{_OPEN_R1}write `dataset_config: NAME`",
    "dataset_prompt_column": f"{_OPEN_R1}name the column `prompt` in the dataset",
    "system_prompt": f"{_OPEN_R1}begin each prompt of the dataset with a message of the role `system`",
    "chat_template": f"{_OPEN_R1}set it in the tokenizer of the model",
    "wandb_entity": f"{_OPEN_R1}set the environment variable WANDB_ENTITY",
    "wandb_project": f"{_OPEN_R1}set the environment variable WANDB_PROJECT",
    "wandb_run_group": f"{_OPEN_R1}set the environment variable WANDB_RUN_GROUP",
}
"""Options of earlier releases and of open-r1 without an equal one here, and what to do. Those that only go are not
listed."""


OF_THE_TRAINER = {
    "torch_dtype": "it is called `dtype` and belongs into `model_init_kwargs`; the masters need float32, the default",
    "dtype": "it belongs into `model_init_kwargs`; the masters need float32, the default",
    "attn_implementation": "it belongs into `model_init_kwargs`",
    "model_revision": "it belongs into `model_init_kwargs`, as `revision`",
    "model_name_or_path": "give `QaRLTrainer(model=...)`",
    "reward_funcs": "give `QaRLTrainer(reward_funcs=...)`",
    "reward_model_name_or_path": "give `QaRLTrainer(reward_funcs=...)`",
    **dict.fromkeys(
        ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming"),
        "give `QaRLTrainer(train_dataset=...)`",
    ),
    **dict.fromkeys(
        ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save"),
        "give `QaRLTrainer(peft_config=...)`",
    ),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "give `QaRLTrainer(quantization_config=...)`"),
}
"""Options of `trl-qarl train` that are no options of `QaRLConfig`, and what they are in Python."""


def problems_of_names(given: Mapping[str, Any], known: Collection[str]) -> Iterator[str]:
    """Yield a problem for each option in `given`, none of which is among the `known` ones of a training. Another name
    is suggested if it differs by a spelling mistake."""
    for name, value in given.items():
        if name in RENAMED and RENAMED[name] in known:
            share = " (a number below 1 is a share of the updates)" if name == "warmup_ratio" else ""
            yield f"{name}={value!r}: the option is now called `{RENAMED[name]}`{share}. Rename it."
        elif name in REMOVED:
            yield f"{name}={value!r} is not supported: {REMOVED[name]}."
        elif name in OF_THE_TRAINER:
            yield f"{name}={value!r} is no option of QaRLConfig: {OF_THE_TRAINER[name]}."
        else:
            best = misspelled(name, known)
            yield f"{name}={value!r}: unknown option. {'Remove it.' if best is None else f'Did you mean `{best}`?'}"


def is_no_folder(model: str) -> bool:
    """Return whether a model's name is a path without a folder, for the Hub's client a malformed name."""
    return model.startswith((".", "/", "~")) and not Path(model).is_dir()


def misspelled(name: str, known: Iterable[str]) -> str | None:
    """Return the one of the `known` options that `name` misspells, `None` if none is close enough."""
    near = [option for option in known if _is_misspelled(name, option)]
    return max(near, key=lambda option: SequenceMatcher(None, name, option).ratio(), default=None)


def _is_misspelled(name: str, option: str) -> bool:
    """Return whether the names have the same words with at most a wrong letter or two in each, or exchanged ones."""
    words, theirs = name.split("_"), option.split("_")
    if len(words) != len(theirs):
        return "".join(words) == "".join(theirs)
    pairs = zip(words, theirs, strict=True)
    return all(sorted(a) == sorted(b) or SequenceMatcher(None, a, b).ratio() >= 0.8 for a, b in pairs)
