"""Checks of the trainer's arguments, which are not part of a configuration."""

import inspect
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import DistributedType
from datasets import IterableDataset
from torch import nn
from transformers import AutoConfig

from ..adapters.tensors import base_of, is_adapter_folder
from ..checkpoint.files import check_writable
from ..checkpoint.load import DEQUANTIZED, check_release, is_low_bit, skeleton
from ..checkpoint.record import check_config
from ..quantization.names import base_model, is_peft_model, method_of
from .adapter import is_nf4, problems_of_adapter, problems_of_options, problems_of_quantized_base, problems_of_start
from .architectures import problem_of_processor
from .batches import fit_generation_batch
from .configuration import check_optimizer, low_precision_masters
from .content import (
    PICTURE_COLUMNS,
    columns_among,
    error_of_call,
    evaluates,
    has_pictures,
    has_texts,
    problems_of_content,
    problems_of_reward,
)
from .launch import Launch, problems_of_ignored_sharding, problems_of_launch
from .model import problem_of_kind
from .names import is_no_folder
from .resume import problems_before_loading


_METRICS = ("reward", "reward_std", "frac_reward_zero_std", "entropy", "kl")


def _problem_of_model(model: Any) -> str | None:
    """Return why `model`, loaded or by name, is no language model, or `None`. One by name is not read."""
    if isinstance(model, nn.Module):
        inner = base_model(model)
        if problem := problem_of_kind(type(inner).__name__, inner, getattr(inner, "config", None)):
            return problem
        is_empty = any(parameter.is_meta for parameter in model.parameters())
        return (
            "The model is on the meta device, without weights. Load it with `from_pretrained`." if is_empty else None
        )
    if isinstance(model, str) and model:
        return f"The model {model!r} is not a folder." if is_no_folder(model) or Path(model).is_file() else None
    said = "empty" if model == "" else f"of type {type(model).__name__}"
    return f"`model` is {said}. Give a causal language model, or the name or the folder of one."


def _problems_of_output(args: Any, model: Any) -> Iterator[str]:
    """Yield a problem of an `output_dir` in which nothing can be written, or where the model would be written over."""
    if not args.should_save:
        return
    try:
        check_writable(args.output_dir)
    except ValueError as error:
        yield f"output_dir={error}"
    if isinstance(model, str) and Path(model).is_dir() and Path(args.output_dir).resolve() == Path(model).resolve():
        yield f"output_dir={args.output_dir!r} is the folder of the model, which would be written over. Name another folder."


def problems_of_arguments(
    policy: Any, *, model, args, train_dataset, eval_dataset, peft_config, optimizers=(None, None), **others
) -> Iterator[str]:
    """
    Yield all problems of the trainer's arguments that are known before a model is loaded or an engine started, with
    this [`~trl_qarl.trainer.policy.Policy`], and last the one that lowers our default of `steps_per_generation` in
    `args` ([`fit_generation_batch`]). Of a model that is yet to be loaded, its layers are judged on the meta device.
    """
    yield from args.problems()
    yield from _problems_of_output(args, model)
    if problem_of_model := _problem_of_model(model):
        yield problem_of_model
    has_own_adapter = is_peft_model(model) or is_adapter_folder(model)
    has_adapter = has_own_adapter or peft_config is not None
    yield from problems_of_options(args, has_adapter)
    yield from problems_of_start(model, has_adapter)
    of_adapter = [*_problems_of_adapters(args, model, peft_config, has_own_adapter)]
    yield from of_adapter
    yield from _problems_of_callables(others, train_dataset)
    if others.get("rollout_func") is not None and not args.quantize_learner and not args.use_vllm:
        yield "`rollout_func` was given with quantize_learner=False: it would sample from masters. Set `use_vllm=True`."
    environment_factory, quantization_config = others.get("environment_factory"), others.get("quantization_config")
    if quantization_config is None:
        loaded = getattr(getattr(model, "config", None), "quantization_config", None)
        quantization_config = loaded if is_nf4(loaded) else None
    yield from problems_of_quantized_base(args, quantization_config, has_adapter)
    rewards, processing_class = others.get("reward_funcs") or [], others.get("processing_class")
    rewards = rewards if isinstance(rewards, list) else [rewards]
    # A `rollout_func` may give them arguments of its own.
    judged = rewards if others.get("rollout_func") is None else []
    inputs = train_dataset, eval_dataset, judged, processing_class, environment_factory, others.get("tools")
    yield from problems_of_content(args, model, *inputs)
    yield from _problems_of_rewards(args, rewards, others.get("reward_processing_classes"))
    # Callbacks may add metrics.
    if evaluates(args) and args.metric_for_best_model is not None and not others.get("callbacks"):
        yield from _problems_of_metric(args.metric_for_best_model, eval_dataset, rewards)
    if args.use_vllm and environment_factory is not None and has_pictures(train_dataset, eval_dataset):
        yield "`environment_factory` was given with a dataset of pictures, which is untested. Use one of the two."
    if args.rollout_ahead:
        yield from _problems_of_ahead(args, train_dataset, others)
    if args.is_colocated:
        yield from _problems_of_colocation(args)
    launch = Launch.of_arguments(args)
    state = args.distributed_state
    on_cpu = state is not None and state.device.type == "cpu"
    # With a GPU only accelerate knows.
    if on_cpu and state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        yield from problems_of_ignored_sharding(Launch(), state.device.type, state.num_processes)
    yield from problems_of_launch(launch, args, has_adapter, is_nf4(quantization_config))
    config, given = None if problem_of_model else getattr(model, "config", None), args.model_init_kwargs or {}
    if problem_of_model:
        pass
    elif isinstance(model, nn.Module):
        if peft_config is None:
            yield from policy.judge(model).problems
    elif not has_own_adapter:
        try:
            config = _config_of(model, args)
        except (OSError, ValueError) as error:
            yield f"The model {model!r} cannot be read: {error}"
        described = getattr(config, "quantization_config", None)
        # TRL's QLoRA, whose base may be stored in bitsandbytes' 4 bits.
        if not (is_nf4(described) and has_adapter and not args.is_quantized and not args.use_vllm):
            try:
                check_release(model, described)
            except ValueError as error:
                yield str(error)
                config = None
        if not has_adapter:
            # The command line adds `dtype` after the configuration has been checked.
            yield from low_precision_masters(args, given.get("dtype", given.get("torch_dtype")))
        if not of_adapter:
            yield from _problems_of_layers(policy, config, args, peft_config)
        if args.use_vllm and config is not None and (problem := problem_of_processor(model, config)):
            yield f"use_vllm=True: {problem}"
    elif (base := base_of(model)) and is_no_folder(base):
        yield f"The base {base!r} of the adapter {model!r} is not a folder. Correct it in the adapter's configuration."
    optimizer = optimizers[0] if _is_pair(optimizers) else None
    yield from check_optimizer(args) if optimizer is None else _problems_of_optimizer(model, optimizer, peft_config)
    if not _is_pair(optimizers):
        yield f"`optimizers` is of type {type(optimizers).__name__}. Give a pair of an optimizer and a schedule, or `None`."
    yield from problems_before_loading(args, model, config, peft_config, optimizer, launch)
    yield from fit_generation_batch(args, train_dataset)


def _problems_of_rewards(args: Any, rewards: list[Any], tokenizers: Any) -> Iterator[str]:
    number = "is 1 reward function" if len(rewards) == 1 else f"are {len(rewards)} reward functions"
    tokenizers = [tokenizers] if tokenizers is not None and not isinstance(tokenizers, list) else tokenizers
    if tokenizers is not None and len(tokenizers) != len(rewards):
        yield f"`reward_processing_classes` has {len(tokenizers)} elements, and there {number}. Give one for each."
        tokenizers = None
    for reward, tokenizer in zip(rewards, tokenizers or [None] * len(rewards), strict=True):
        yield from problems_of_reward(reward, tokenizer)
    if (weights := args.reward_weights) is not None and len(weights) != len(rewards):
        yield f"reward_weights={weights!r} has {len(weights)} numbers, and there {number}. Give one for each."


def _problems_of_colocation(args: Any) -> Iterator[str]:
    if args.vllm_enable_sleep_mode and args.use_cpu:
        yield "vllm_enable_sleep_mode=True with use_cpu=True: vLLM sleeps on GPUs only. Remove `vllm_enable_sleep_mode`."
    if args.world_size % args.vllm_tensor_parallel_size:
        size = f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}"
        yield f"{size} must divide the number of processes, {args.world_size}, which share engines. Change one of them."


def problems_of_absence(
    args: Any, train_dataset: Any, eval_dataset: Any, rewards: Any, environment_factory: Any
) -> Iterator[str]:
    """Yield a problem for each argument that the trainer needs and was not given."""
    if train_dataset is None and environment_factory is None:
        yield "There is no training dataset. Give `train_dataset`, with a column `prompt`."
    if eval_dataset is None and evaluates(args):
        yield "`eval_strategy` or `eval_on_start` asks for an evaluation, and there is no `eval_dataset`. Give one."
    if not rewards and environment_factory is None:
        yield "There is no reward. Give `reward_funcs`, or an `environment_factory` with rewards."


def _problems_of_metric(metric: str, eval_dataset: Any, rewards: list[Any]) -> Iterator[str]:
    """Yield a problem of a metric for the best checkpoint that no evaluation has, unless a reward may log it."""
    losses = [f"{name}_loss" for name in eval_dataset] if isinstance(eval_dataset, dict) else ["loss"]
    name = metric.removeprefix("eval_")
    functions = [reward for reward in rewards if callable(reward) and not isinstance(reward, nn.Module)]
    may_be_logged = any("log_metric" in inspect.signature(function).parameters for function in functions)
    if not ("/" in name or name in (*_METRICS, *losses) or may_be_logged):
        fix = f"Give one of {[*losses, *_METRICS]}, or one that a reward logs by `log_metric`"
        yield f"metric_for_best_model={metric!r} is no metric of an evaluation. {fix}."


def _problems_of_callables(given: Mapping[str, Any], train_dataset: Any) -> Iterator[str]:
    """Yield a problem for each of callbacks, tools and functions that is no such thing, or is never called."""
    if (callbacks := given.get("callbacks")) is not None and not (
        isinstance(callbacks, list) and all(hasattr(each, "on_train_begin") for each in callbacks)
    ):
        yield f"`callbacks` is {callbacks!r}. Give a list of `TrainerCallback`s."
    if (tools := given.get("tools")) and not (isinstance(tools, list) and all(map(callable, tools))):
        yield f"`tools` is {tools!r}. Give a list of functions."
    elif tools and has_texts(train_dataset):
        yield "`tools` was given, and the prompts are texts, after which TRL looks for no calls. Give lists of messages."
    for name in ("rollout_func", "environment_factory"):
        value = given.get(name)
        factories = value.values() if isinstance(value, dict) and name == "environment_factory" else [value]
        if value is not None and not all(map(callable, factories)):
            yield f"`{name}` is {value!r}, which cannot be called. Give a function, or a class."
        elif value is not None and name == "rollout_func" and (error := error_of_call(value, "prompts", "trainer")):
            yield f"`rollout_func` cannot be called: {error}. It gets the prompts and the trainer."


def _is_pair(optimizers: Any) -> bool:
    return isinstance(optimizers, tuple | list) and len(optimizers) == 2


def _problems_of_optimizer(model: Any, optimizer: Any, peft_config: Any) -> Iterator[str]:
    """Yield the problem of an optimizer of the user that would update nothing of the policy."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        yield f"`optimizers` has {optimizer!r}, which is no optimizer. Make one with the parameters of the model, or choose `optim`."
    elif not isinstance(model, nn.Module) or peft_config is not None:
        what = "is yet to be loaded" if peft_config is None else "is yet to get the adapter of `peft_config`"
        yield f"`optimizers` has an optimizer, and the model {what}. Give the loaded model, or choose `optim`."
    elif not {id(p) for group in optimizer.param_groups for p in group["params"]} & {*map(id, model.parameters())}:
        yield "`optimizers` has an optimizer of another model's parameters. Make it with those of the model that is given."


def _problems_of_adapters(args: Any, model: Any, peft_config: Any, has_own_adapter: bool) -> Iterator[str]:
    served = {"is_served": args.use_vllm and args.lora_mode == "adapter", "is_merged": args.lora_mode == "merged"}
    if has_own_adapter and peft_config is not None:
        yield "`peft_config` was given with a model that has an adapter already. Leave one of them out."
    elif is_adapter_folder(model):
        from peft import PeftConfig

        yield from problems_of_adapter(PeftConfig.from_pretrained(str(model)), **served)
    elif has_own_adapter:
        for config in model.peft_config.values():
            yield from problems_of_adapter(config, **served)
    elif peft_config is not None:
        yield from problems_of_adapter(peft_config, **served)


def _problems_of_ahead(args: Any, train_dataset: Any, others: Mapping[str, Any]) -> Iterator[str]:
    said = f"rollout_ahead={args.rollout_ahead} is unsupported with"
    for name in ("tools", "environment_factory", "rollout_func"):
        if others.get(name):
            yield f"{said} `{name}`: its later turns would get newer weights. Leave out one of them."
    if isinstance(train_dataset, IterableDataset):
        yield f"{said} a streamed dataset: prompts are looked up before their turn. Load it without streaming."
    if pictures := columns_among(PICTURE_COLUMNS, [train_dataset]):
        yield f"{said} pictures, and the dataset has a column {min(pictures)!r}. Leave out one of them."


def _model_arguments(args: Any) -> dict[str, Any]:
    return {"trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})


def _config_of(model: str, args: Any) -> Any:
    check_config(model)
    given = _model_arguments(args)
    names = ("revision", "trust_remote_code", "cache_dir", "token", "subfolder")
    return AutoConfig.from_pretrained(model, **{name: given[name] for name in names if given.get(name)})


def _problems_of_layers(policy: Any, config: Any, args: Any, peft_config: Any) -> Iterator[str]:
    """Yield problems of a model with this `config`, before it is loaded, and of its adapter, from its layers."""
    if config is None:
        return
    cls = getattr(transformers, (config.architectures or [""])[0], None)
    if cls is not None and (problem := problem_of_kind(cls.__name__, cls, config)):
        yield problem
        return
    method = method_of(getattr(config, "quantization_config", None))
    if method in DEQUANTIZED and args.use_vllm and not args.is_quantized:
        scheme, cls = "mxfp4a16" if method == "mxfp4" else "fp8", DEQUANTIZED[method].__name__
        yield (
            f"scheme={args.scheme!r} with a checkpoint in {method}: vLLM would make layers of it too. Use a low-bit scheme, "
            f"such as {scheme!r}, or start from the model saved in high precision (`{cls}(dequantize=True)`)."
        )
    model, given = None, _model_arguments(args)
    attention = given.get("attn_implementation")
    try:
        model = skeleton(config, bool(given.get("trust_remote_code")), attention)
    except Exception as error:
        # Of other arguments loading the model gives the reason.
        if attention is not None and isinstance(error, ValueError | ImportError):
            yield f"attn_implementation={attention!r}: {error}"
        elif isinstance(error, ImportError):
            yield f"The model cannot be loaded: {' '.join(str(error).split())}"
    if model is None or type(model).__name__ not in (config.architectures or ()):
        return
    if is_low_bit(getattr(config, "quantization_config", None)):
        # Its tensors tell which layers are in low bits.
        yield from policy.problems_of_class(model, peft_config is not None)
        return
    if peft_config is not None:
        from peft import get_peft_model

        try:
            model = get_peft_model(model, deepcopy(peft_config))
        except (ValueError, TypeError, re.error) as error:
            is_expression = isinstance(getattr(peft_config, "target_modules", None), str) and (
                isinstance(error, re.error) or "not found" in str(error)
            )
            hint = " A single text is an expression over whole names, such as '.*q_proj'." if is_expression else ""
            yield f"peft_config: {error}{hint}"
            return
    yield from policy.judge(model).problems
