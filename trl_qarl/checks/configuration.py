"""Checks of a [`QaRLConfig`]. Each function yields problems; only `check_scheme` changes the configuration: it parses
`precisions`."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, SchedulerType, Trainer, get_scheduler
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.training_args import trainer_log_levels

from ..bitwise.availability import contradicting_options
from ..engines.gpu_kernels import Gpu, reason_against
from ..hub import problem_of_push
from ..options import CHOICES, MUONS, optimizer_name
from ..quantization.precisions import parse_precisions, problems_of_precisions
from .problems import quote_options
from .refused import GENERATION_KWARGS_THAT_RESHAPE, MODEL_INIT_KWARGS_REFUSED, REFUSED, VLLM_SAMPLING_KWARGS
from .values import as_dict


_CHOICES = CHOICES | {
    "vllm_mode": ("server", "colocate"),
    **dict.fromkeys(("log_level", "log_level_replica"), (*trainer_log_levels,)),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}


def check_scheme(config) -> Iterator[str]:
    try:
        plan = config.plan
    except ValueError as error:
        yield str(error)
        return
    try:
        config.precisions = parse_precisions(config.precisions)
    except ValueError as error:
        yield str(error)
    else:
        if config.precisions is not None:
            yield from problems_of_precisions(config.precisions, plan, config.max_steps)


def check_turns(config) -> Iterator[str]:
    num_micro_batches = config.steps_per_generation * config.num_iterations
    if config.precisions is not None and num_micro_batches % config.gradient_accumulation_steps != 0:
        given = quote_options(config, "precisions", "steps_per_generation", "num_iterations")
        fix = f"Give a multiple of {quote_options(config, 'gradient_accumulation_steps')}"
        yield f"{given}: an update would have micro-batches of {num_micro_batches} at different bits. {fix}."


def check_numerics(config) -> Iterator[str]:
    if config.numerics in ("engine", "exact"):
        for problem in contradicting_options(config):
            yield f"{quote_options(config, 'numerics')} contradicts {problem}, or use numerics='fast'."


def check_choices(config) -> Iterator[str]:
    for name, known in _CHOICES.items():
        if (value := getattr(config, name)) not in known and value != getattr(type(config), name):
            yield f"{name}={value!r} is unknown. Choose one of {list(known)}."


def check_gpu(config) -> Iterator[str]:
    # A server on another machine checks this when it starts.
    gpu = Gpu.here() if config.starts_engine and not config.use_cpu else None
    # Errors of the plan itself come from `check_scheme`.
    with suppress(ValueError):
        if gpu is not None:
            reasons = (reason_against(scheme, gpu) for scheme in config.plan.schemes)
            yield from (f"use_vllm=True: {reason}" for reason in reasons if reason)


def check_hub(config) -> Iterator[str]:
    if config.push_to_hub:
        name = config.hub_model_id or Path(config.output_dir or "trainer_output").absolute().name
        if problem := problem_of_push(name, config.hub_token):
            yield problem


def check_inherited(config) -> Iterator[str]:
    yield from refused_by_all(config)
    for name, why in MODEL_INIT_KWARGS_REFUSED.items():
        if as_dict(config, "model_init_kwargs").get(name) not in (None, False):
            yield f"model_init_kwargs[{name!r}] is not supported: {why}."


def check_trackers(config) -> Iterator[str]:
    if not isinstance(config.report_to, str | list | tuple | None):
        yield f"report_to={config.report_to!r} is of type {type(config.report_to).__name__}. Give the name of a tracker, a list of them, or 'none'."
        return
    for tracker in [config.report_to] if isinstance(config.report_to, str) else config.report_to or []:
        if tracker not in ("none", "all", *get_available_reporting_integrations()):
            yield f"report_to={tracker!r}: its package is not installed. Install it, or set `report_to` to 'none'."


def check_schedule(config) -> Iterator[str]:
    if config.lr_scheduler_type in [*SchedulerType]:
        optimizer = torch.optim.SGD([torch.zeros(1)])
        try:
            options = as_dict(config, "lr_scheduler_kwargs")
            get_scheduler(config.lr_scheduler_type, optimizer, 0, 2, scheduler_specific_kwargs=options)
        except (ValueError, TypeError) as error:
            yield f"{quote_options(config, 'lr_scheduler_type', 'lr_scheduler_kwargs')}: {error}."


def check_gradient_checkpointing(config) -> Iterator[str]:
    if not config.gradient_checkpointing:
        return
    parameters = inspect.signature(checkpoint).parameters.values()
    # torch takes the last one from its `**kwargs`.
    known = [*(p.name for p in parameters if p.kind is p.KEYWORD_ONLY), "preserve_rng_state"]
    if unknown := sorted(as_dict(config, "gradient_checkpointing_kwargs").keys() - {*known}):
        yield f"gradient_checkpointing_kwargs contains {unknown}, which torch's `checkpoint` does not take, only {known}. Remove or correct them."


def check_optimizer(config) -> Iterator[str]:
    """Yield why transformers cannot make the optimizer here, except for those that ask for the model first."""
    if config.optim in MUONS:
        return
    try:
        made, options = Trainer.get_optimizer_cls_and_kwargs(config)
        if isinstance(made, type) and issubclass(made, torch.optim.Optimizer):
            made([torch.nn.Parameter(torch.zeros(1))], **options)
    except Exception as error:
        if "model" not in str(error):
            yield f"optim={optimizer_name(config)!r}, {quote_options(config, 'optim_args')} cannot be made: {error}"


def check_generation_kwargs(config) -> Iterator[str]:
    given = as_dict(config, "generation_kwargs")
    if reshaping := sorted(GENERATION_KWARGS_THAT_RESHAPE & given.keys()):
        why = "which change the sampling, and its log-probs would be wrong"
        yield f"generation_kwargs contains {reshaping}, {why}. Remove them; `temperature`, `top_p`, `top_k` and `min_p` are options."
    if config.use_vllm and (reshaping := sorted(VLLM_SAMPLING_KWARGS & given.keys())):
        yield f"generation_kwargs contains {reshaping}, which change vLLM's samples or their log-probs. Remove them."
    refused = GENERATION_KWARGS_THAT_RESHAPE | (VLLM_SAMPLING_KWARGS if config.use_vllm else set())
    yield from _wrong_generation_kwargs(config, {name: given[name] for name in given if name not in refused})


def _wrong_generation_kwargs(config, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem of names and values that the class of sampling parameters does not take."""
    # A server may run on another machine, with another vLLM.
    if not given or (config.use_vllm and find_spec("vllm") is None):
        return
    if config.use_vllm:
        from vllm import SamplingParams

        owner, known, make = "vllm.SamplingParams", [*SamplingParams.__struct_fields__], SamplingParams
    else:
        owner, known, make = "transformers.GenerationConfig", [*vars(GenerationConfig())], GenerationConfig
    known = [name for name in known if not name.startswith("_")]
    if unknown := sorted(map(str, given.keys() - {*known})):
        similar = [match for name in unknown for match in get_close_matches(name, known, 1)]
        hint = f" Did you mean {similar}?" if similar else ""
        yield f"generation_kwargs contains {unknown}, which {owner} does not have. Remove or correct them.{hint}"
        return
    if "disable_compile" in given and not config.use_vllm:
        yield "generation_kwargs contains 'disable_compile', for which TRL gives `True`. Remove it."
        return
    for name in ("eos_token_id", "pad_token_id", "stop_token_ids"):
        tokens = given.get(name) or []
        if not all(isinstance(token, Integral) for token in (tokens if isinstance(tokens, list) else [tokens])):
            yield f"generation_kwargs contains {name}={tokens!r}, and a token is its number. Give `tokenizer.convert_tokens_to_ids(...)`."
            return
    try:
        make(**given)
    except Exception as error:
        # vLLM has an error of its own, which is no `ValueError`.
        yield f"generation_kwargs={given!r}: {owner} does not take them ({error}). Correct or remove them."


def refused_by_all(config) -> Iterator[str]:
    for name, why in REFUSED.items():
        if getattr(config, name, None):
            yield f"{quote_options(config, name)} is not supported: {why}."


def low_precision_masters(config, dtype: torch.dtype | str | None) -> Iterator[str]:
    """Yield the problem of masters in `dtype`, none for float32 or one that is only known after loading."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or (named.is_floating_point and named.itemsize >= 4):
        if isinstance(dtype, str) and dtype not in ("auto", "float32"):
            yield f"dtype={dtype!r} is unknown. Choose one of ['float32', 'auto'], or remove it: the masters need float32, the default."
        return
    dtype = named
    name, fix = str(dtype).removeprefix("torch."), "Load the model in float32 (TRL's default: remove `dtype`)"
    if not dtype.is_floating_point:
        yield f"The masters are {name}, which takes no gradient. {fix}."
        return
    # The distance between neighbouring values at 0.02, a typical weight.
    spacing = torch.finfo(dtype).eps * 2**-6
    text = (
        f"The masters are {name}, where a weight of 0.02 moves in steps of {spacing:.1e}: updates of learning_rate="
        f"{config.learning_rate:g} round to nothing. {fix}; `bf16=True` still computes in bfloat16."
    )
    if dtype is torch.float16 and config.is_quantized:
        text += f" Float16 masters also become NaN within a few updates of scheme={config.scheme!r}."
    yield text
