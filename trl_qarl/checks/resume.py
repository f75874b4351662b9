"""Checks that a run can go on from a checkpoint: settings that its states and its generation batch depend on."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, TrainingArguments

from ..adapters.tensors import is_adapter_folder
from ..checkpoint.record import (
    SCHEME_FILE,
    differing,
    differing_presence,
    explain_differences,
    folder_to_resume,
    read_json,
    scheme_settings,
)
from ..options import optimizer_name
from .launch import Launch, problems_of_resumed_launch


RESUME_FILE = "resume.json"
"""File of a checkpoint with the settings that its states depend on."""

_SHAPES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings", "num_experts", "num_local_experts"),
    *("n_routed_experts", "moe_intermediate_size"),
)
_ADAPTER = (
    *("peft_type", "r", "lora_alpha", "target_modules", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "use_dora", "bias"),
)
_SAME_STATE = {"adamw_torch_fused": "adamw_torch"}
_WITH_OWN_STATE = ("reduce_lr_on_plateau", "greedy")

# Options of TRL and of this package that change neither the content of a generation batch nor its meaning: of the loss
# alone, of the connection to an engine, of logs and uploads.
_NOT_OF_A_BATCH = {
    *("epsilon", "epsilon_high", "delta", "entropy_coef", "entropy_coef_min", "entropy_coef_max"),
    *("entropy_coef_delta", "entropy_target", "use_adaptive_entropy", "top_entropy_quantile"),
    *("positive_epsilon_high", "negative_epsilon_low", "negative_epsilon_high"),
    *("sapo_temperature_neg", "sapo_temperature_pos", "router_aux_loss_coef", "off_policy_mask_threshold"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "generation_batch_size"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
    "gradient_dtype",
    *("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_server_autostart", "vllm_token_file"),
    *("log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts"),
    *("log_completions_hub_repo", "rollout_ahead", "num_generations_eval", "model_init_kwargs", "trust_remote_code"),
    "max_tokens_per_forward",
}


def batch_settings(args: Any) -> dict[str, Any]:
    """Return the options that decide what a generation batch contains and means. An option that is not known here
    counts as one of them: a batch that is dropped without need is only drawn again."""
    inherited = {option.name for option in fields(TrainingArguments)} | _NOT_OF_A_BATCH
    return {option.name: _plain(getattr(args, option.name)) for option in fields(args) if option.name not in inherited}


def state_settings(args: Any, config: Any, adapter: Mapping[str, Any] | None, optimizer: Any = None) -> dict[str, Any]:
    """Return the settings that the states of a checkpoint depend on: of the model with this `config`, of its
    `adapter`'s configuration, and of the optimizer, which is `optimizer` if the user has made it."""
    name = optimizer_name(args)
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    settings: dict[str, Any] = {
        "optim": _SAME_STATE.get(name, name) if optimizer is None else type(optimizer).__name__,
        "lr_scheduler_type": schedule if schedule in _WITH_OWN_STATE else "a function of the update",
    }
    if config is not None:
        # Sizes that differ among layers, such as those of Gemma 4's heads, cannot be read as attributes.
        sizes = config.get_text_config().to_dict() if isinstance(config, PreTrainedConfig) else vars(config)
        settings |= {key: sizes[key] for key in _SHAPES if sizes.get(key) is not None}
    settings["adapter"] = adapter and {key: _plain(adapter[key]) for key in _ADAPTER if adapter.get(key)}
    return settings


def check_states(folder: str | Path, settings: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the checkpoint in `folder` has other [`state_settings`], as far as both know them."""
    folder = Path(folder)
    if (folder / RESUME_FILE).is_file() and (changed := _differing_states(read_json(folder / RESUME_FILE), settings)):
        raise ValueError(explain_differences(folder, changed))


def _differing_states(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return a text for each difference of two [`state_settings`], which names what differs of an adapter."""
    shared = [name for name in theirs if name in ours]
    texts = differing([name for name in shared if name != "adapter"], theirs, ours)
    if "adapter" not in shared:
        return texts
    adapters = theirs["adapter"], ours["adapter"]
    if not all(adapters):
        return texts + differing_presence(*map(bool, adapters))
    return texts + [f"adapter: {text}" for text in differing(dict.fromkeys([*adapters[0], *adapters[1]]), *adapters)]


def problems_before_loading(
    args: Any, model: Any, config: Any, peft_config: Any, optimizer: Any, launch: Launch
) -> Iterator[str]:
    """Yield problems of the checkpoint of `args.resume_from_checkpoint` with a trainer's arguments, before a model is
    loaded or a server started: there is no such checkpoint, or it does not fit. `config` is that of a `model` without
    an adapter, as far as it is known."""
    try:
        folder = folder_to_resume(resume_option(args.resume_from_checkpoint), args.output_dir)
        if folder is not None:
            yield from problems_of_resumed_launch(launch, folder)
            if changed := _differences(Path(folder), args, model, config, peft_config, optimizer):
                yield explain_differences(Path(folder), changed)
    except ValueError as error:
        # A file that cannot be read.
        yield str(error)


def _differences(folder: Path, args: Any, model: Any, config: Any, peft_config: Any, optimizer: Any) -> list[str]:
    is_new = isinstance(model, str) and not is_adapter_folder(model)
    ours = state_settings(args, config, None, optimizer)
    if peft_config is not None:
        ours["adapter"] = state_settings(args, None, peft_config.to_dict())["adapter"]
        if ours["adapter"].get("target_modules") == "all-linear":
            # PEFT has replaced it by names of layers.
            ours["adapter"]["target_modules"] = _saved_targets(folder)
    elif not is_new:
        # The model may have an adapter.
        del ours["adapter"]
    problems = []
    if (folder / RESUME_FILE).is_file():
        problems += _differing_states(read_json(folder / RESUME_FILE), ours)
    if (folder / SCHEME_FILE).is_file():
        theirs, ours = read_json(folder / SCHEME_FILE), scheme_settings(args, args.plan)
        if peft_config is not None and "lora_mode" in theirs:
            ours["lora_mode"] = args.lora_mode
        if args.bf16 or args.fp16:
            ours["scale_dtype"] = "bfloat16" if args.bf16 else "float16"
        problems += differing(ours, theirs, ours)
    return problems


def resume_option(value: Any) -> str | bool | None:
    """Return `True` (the last checkpoint) for `"true"` and `"last"`, `None` for `"false"`, and a path unchanged."""
    return {"true": True, "last": True, "false": None}.get(value.lower(), value) if isinstance(value, str) else value


def _saved_targets(folder: Path) -> Any:
    path = folder / RESUME_FILE
    adapter = read_json(path).get("adapter") if path.is_file() else None
    return (adapter or {}).get("target_modules")


def _plain(value: Any) -> Any:
    """Return a value as JSON, and `torch.load` of weights alone, give it back."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    return value if value is None or type(value) in (bool, int, float, str) else str(getattr(value, "value", value))
