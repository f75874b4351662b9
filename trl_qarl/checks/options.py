"""Checks of a [`QaRLConfig`]. Each function yields problems; only `check_scheme` changes the configuration: it parses
`precisions`."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.trainer_utils import HubStrategy

from ..hub import problem_of_push
from ..numerics.availability import contradicting_options
from ..options import CHOICES, MUONS
from ..quantization.precisions import parse_precisions, problems_of_precisions
from ..rollout.gpu_kernels import Gpu, reason_against
from ..wire.describe import CANARY_TOKENS
from .problems import raise_problems as raise_problems
from .refused import (
    GENERATION_KWARGS_THAT_RESHAPE,
    MODEL_INIT_KWARGS_REFUSED,
    REFUSED,
    VLLM_SAMPLING_KWARGS,
)


_CHOICES = CHOICES | {
    "vllm_mode": ("server", "colocate"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}

_TAKE_BFLOAT16 = ("muon_8bit", "adamw_torch_8bit", "adamw_torch_4bit")


def check_scheme(config) -> Iterator[str]:
    try:
        plan = config.plan
    except ValueError as error:
        yield str(error)
        return
    if not plan.is_quantized and not config.quantize_learner:
        yield (
            f"{said(config, 'quantize_learner')} with {said(config, 'scheme')}: there is no low-bit weight for the rollout to run. "
            "Choose a quantized scheme, or remove `quantize_learner`."
        )
    if config.exclude_modules and not plan.is_quantized:
        yield f"exclude_modules={config.exclude_modules!r} was given, but scheme 'bf16' quantizes nothing. Remove it."
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
        yield (
            f"{said(config, 'precisions', 'steps_per_generation', 'num_iterations')}: the {num_micro_batches} micro-batches of a generation "
            "batch are not a whole number of updates, so one update would add gradients at different bits. Give a multiple of "
            f"{said(config, 'gradient_accumulation_steps')}."
        )


def check_numerics(config) -> Iterator[str]:
    if config.numerics in ("engine", "exact"):
        for problem in contradicting_options(config):
            yield f"{said(config, 'numerics')} contradicts {problem}, or use numerics='fast'."


def check_choices(config) -> Iterator[str]:
    for name, known in _CHOICES.items():
        if (value := getattr(config, name)) not in known and value != getattr(type(config), name):
            yield f"{name}={value!r} is unknown. Choose one of {list(known)}."


def _check_gpu(config) -> Iterator[str]:
    # A server on another machine checks this when it starts.
    is_here = config.vllm_mode == "colocate" or config.vllm_server_autostart
    gpu = Gpu.here() if is_here and not config.use_cpu else None
    # Errors of the plan itself come from `check_scheme`.
    with suppress(ValueError):
        if gpu is not None:
            reasons = (reason_against(scheme, gpu) for scheme in config.plan.schemes)
            yield from (f"use_vllm=True: {reason}" for reason in reasons if reason)


def check_vllm(config) -> Iterator[str]:
    has_own_server = config.use_vllm and config.vllm_mode == "server" and not config.vllm_server_autostart
    if config.vllm_token_file is not None and not has_own_server:
        but = said(config, "use_vllm", "vllm_mode", "vllm_server_autostart")
        yield f"{said(config, 'vllm_token_file')} is for a server that you start yourself, but {but}. Remove it."
    url = config.vllm_server_base_url
    if url is not None and not re.match(r"http://[^/]", url):
        yield (
            f"{said(config, 'vllm_server_base_url')} is not of the form 'http://HOST:PORT', the only one that a server of `trl-qarl "
            "vllm-serve` has. For encryption, set 'http://127.0.0.1:8000' and forward that port: `ssh -N -L 8000:127.0.0.1:8000 HOST`."
        )
    if not config.use_vllm:
        if config.vllm_server_autostart:
            yield "vllm_server_autostart=True was given, but use_vllm=False. Set `use_vllm=True`."
        return
    if config.vllm_server_autostart and (config.vllm_mode != "server" or config.vllm_server_base_url is not None):
        other = said(config, "vllm_mode", "vllm_server_base_url")
        yield (
            f"vllm_server_autostart=True starts a server on this machine, which contradicts {other}. Use vllm_mode='server' and choose "
            "its port with `vllm_server_port`."
        )
    if config.vllm_model_impl not in ("vllm", "auto"):
        impl = said(config, "vllm_model_impl")
        yield f"{impl} is not supported: the audit knows only the parameters of vLLM's own models. Use 'vllm'."
    yield from _check_gpu(config)
    if config.vllm_server_autostart and config.vllm_server_host not in ("0.0.0.0", "127.0.0.1", "localhost"):
        both = f"{said(config, 'vllm_server_host')} with vllm_server_autostart=True"
        yield f"{both}: the server is started on this machine and listens on 127.0.0.1. Remove it."
    if config.vllm_max_model_length is not None and config.vllm_max_model_length <= CANARY_TOKENS:
        yield (
            f"{said(config, 'vllm_max_model_length')} must be at least {CANARY_TOKENS + 1}: a fixed text of {CANARY_TOKENS} tokens is scored "
            "after each publication, to compare engine and learner."
        )
    for name in ("vllm_server_port", "vllm_group_port"):
        if not 0 < getattr(config, name) < 2**16:
            yield f"{said(config, name)} is not a port. Use a number from 1024 to 65535."
    reshaping = sorted(VLLM_SAMPLING_KWARGS & as_dict(config, "generation_kwargs").keys())
    if reshaping:
        yield (
            f"generation_kwargs contains {reshaping}, which change vLLM's samples or results, so sampling log-probs and "
            "the learner's would differ. Remove them."
        )
    if config.vllm_structured_outputs_regex is not None:
        yield (
            "vllm_structured_outputs_regex masks tokens while sampling, so sampling log-probs and the learner's would "
            "differ. Remove it."
        )
    neutrals = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (None, 0.0), "repetition_penalty": (1.0,)}
    for name, neutral in neutrals.items():
        if getattr(config, name) not in neutral:
            yield (
                f"{said(config, name)} with use_vllm=True: vLLM's log-probs would be those of the reshaped distribution, the learner's "
                f"those of the full one, and every importance weight would be biased. Use {neutral[0]!r}; `temperature` applies to both."
            )


def check_ahead(config) -> Iterator[str]:
    if config.rollout_ahead not in (0, 1):
        yield (
            f"rollout_ahead={config.rollout_ahead!r} must be 0 (rollouts of the learner's own weights) or 1: each weight sync waits for "
            "the batch in flight, so further batches would only be older."
        )
        return
    if config.rollout_ahead == 0:
        return
    ahead = said(config, "rollout_ahead")
    if not config.use_vllm or config.vllm_mode != "server":
        yield (
            f"{ahead} needs a vLLM server, but {said(config, 'use_vllm', 'vllm_mode')}: an engine in the trainer's process and the "
            "learner take turns. Set use_vllm=True and vllm_mode='server', or remove it."
        )
    if config.precisions is not None:
        both = f"{ahead} is unsupported with {said(config, 'precisions')}"
        yield f"{both}: a batch would be drawn with the bits of the one before. Leave out one of them."
    if not config.quantize_learner:
        yield (
            f"{ahead} is unsupported with quantize_learner=False: only the low-bit weights that draw a batch are kept, and this learner "
            "computes old log-probs with masters. Leave out one of them."
        )


def check_hub(config) -> Iterator[str]:
    if not config.push_to_hub:
        return
    name = config.hub_model_id or Path(config.output_dir or "trainer_output").absolute().name
    if problem := problem_of_push(name, config.hub_token):
        yield problem
    if config.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        yield (
            f"hub_strategy={HubStrategy(config.hub_strategy).value!r} uploads checkpoints, but only the policy is pushed, because a "
            "repository with masters next to it loads as another model. Use 'every_save' or 'end', and upload checkpoints yourself: "
            "hf upload USER/NAME-checkpoints out/checkpoint-10."
        )


def check_inherited(config) -> Iterator[str]:
    if config.fp16 and config.is_quantized:
        yield (
            f"fp16=True with scheme={config.scheme!r}: under quantized training float16 with loss scaling underflows to "
            "NaN (arXiv 2604.07853). Set `bf16=True`, or `bf16=False` for float32, and remove `fp16`."
        )
    elif config.fp16 and config.use_cpu:
        yield (
            "fp16=True with use_cpu=True: accelerate has no float16 autocast on CPUs and silently computes in float32. "
            "Set `bf16=True`, or `bf16=False` for float32, and remove `fp16`."
        )
    yield from refused_by_all(config)
    for name, why in MODEL_INIT_KWARGS_REFUSED.items():
        if as_dict(config, "model_init_kwargs").get(name) not in (None, False):
            yield f"model_init_kwargs[{name!r}] is not supported: {why}."
    reshaping = sorted(GENERATION_KWARGS_THAT_RESHAPE & as_dict(config, "generation_kwargs").keys())
    if reshaping:
        yield (
            f"generation_kwargs contains {reshaping}, which change the sampling, so the recorded sampling log-probs would be "
            "wrong. Remove them; `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` are separate options."
        )
    yield from _unknown_generation_kwargs(config)
    strings = sorted({"stop", "stop_strings"} & as_dict(config, "generation_kwargs").keys())
    if strings and config.mask_truncated_completions:
        yield (
            f"generation_kwargs contains {strings} with mask_truncated_completions=True: a completion that ends at such a string has no "
            "end token, so it would count as truncated and be masked. Use `stop_token_ids` with vLLM, or `eos_token_id` "
            "without, or mask_truncated_completions=False."
        )
    if not config.temperature > 0:
        yield f"{said(config, 'temperature')} must be greater than 0: the learner divides its logits by it. Use 1.0, or a small number for nearly greedy rollouts."
    if config.optim in ("lomo", "adalomo"):
        yield (
            f"optim={str(config.optim)!r} is not supported: it writes to the weights during the backward pass, while low-bit "
            "weights of the old values are in use. Use 'adamw_8bit' or 'adamw_torch_4bit', which also have a small state."
        )
    if config.gradient_dtype == "bfloat16" and config.optim not in _TAKE_BFLOAT16:
        yield (
            f"{said(config, 'gradient_dtype', 'optim')}: this optimizer needs gradients in the dtype of the masters, float32. Use one of "
            f"{list(_TAKE_BFLOAT16)}, or gradient_dtype='float32'."
        )
    if config.optim in MUONS and config.optim_args:
        yield (
            f"optim_args={config.optim_args!r} is not honoured by {said(config, 'optim')}, which has the options `learning_rate`, "
            "`weight_decay`, `adam_beta1`, `adam_beta2` and `adam_epsilon`. Remove it or choose another `optim`."
        )


def _unknown_generation_kwargs(config) -> Iterator[str]:
    given = as_dict(config, "generation_kwargs").keys() - GENERATION_KWARGS_THAT_RESHAPE
    # A server may run on another machine, with another vLLM.
    if not given or (config.use_vllm and find_spec("vllm") is None):
        return
    if config.use_vllm:
        from vllm import SamplingParams

        owner, known = "vllm.SamplingParams", [*SamplingParams.__struct_fields__]
    else:
        owner, known = "transformers.GenerationConfig", [*vars(GenerationConfig())]
    known = [name for name in known if not name.startswith("_")]
    if unknown := sorted(given - {*known}):
        similar = [match for name in unknown for match in get_close_matches(name, known, 1)]
        hint = f" Did you mean {similar}?" if similar else ""
        yield f"generation_kwargs contains {unknown}, which {owner} does not have. Remove or correct them.{hint}"


def refused_by_all(config) -> Iterator[str]:
    for name, why in REFUSED.items():
        if getattr(config, name, None):
            yield f"{said(config, name)} is not supported: {why}."


def said(config: Any, *names: str) -> str:
    """Return options in the form of messages: `name=value, ...`."""
    return ", ".join(f"{name}={getattr(config, name)!r}" for name in names)


def low_precision_masters(config, dtype: torch.dtype | str | None) -> Iterator[str]:
    """Yield the problem of masters in `dtype`; none for float32, or if the dtype is only known after loading."""
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype) or (dtype.is_floating_point and dtype.itemsize >= 4):
        return
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


def as_dict(config: Any, name: str) -> dict[str, Any]:
    """Return an option that is a dictionary: `{}` for `None`, and JSON text of the command line parsed."""
    value = getattr(config, name)
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
        if not isinstance(value, dict):
            raise ValueError(
                f"{name}={value!r} is not a JSON object, such as '{{\"key\": 1}}'. Write one, or leave it out."
            )
    return value or {}
