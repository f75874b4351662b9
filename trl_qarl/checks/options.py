"""Checks of a [`QaRLConfig`]. Each function yields problems; only `check_scheme` changes the configuration: it parses
`precisions`."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from inspect import formatannotation
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from ..checkpoint.uploads import problem_of_access, problem_of_name
from ..numerics.availability import contradicting_options
from ..objectives.registry import get_objective
from ..options import CHOICES, own_options
from ..quantization.precisions import parse_precisions, problems_of_precisions
from ..rollout.gpu_kernels import Gpu, reason_against
from .refused import (
    GENERATION_KWARGS_THAT_RESHAPE,
    MODEL_INIT_KWARGS_REFUSED,
    REFUSED,
    VLLM_SAMPLING_KWARGS,
)


_CHOICES = CHOICES | {"vllm_mode": ("server", "colocate"), "importance_sampling_level": ("token", "sequence")}


def check_types(config: Any, inherited: type) -> Iterator[str]:
    """
    Yield a problem for each value of `config` that its field's annotation does not allow. Fields of `inherited`, a
    base class that checks them itself, are skipped unless the class of `config` redefines their annotation.

    Integers and floats may come from NumPy. NaN is never allowed, and text may stand for a list with one element.
    """
    hints = get_type_hints(type(config))
    for name in own_options(type(config), inherited):
        hint = hints[name]
        allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        value = getattr(config, name)
        if not any(_fits(value, hint) for hint in allowed):
            yield f"{name}={value!r} is of type {type(value).__name__}, and must be {formatannotation(hint)}."


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is list:
        return (isinstance(value, str) and arguments == (str,)) or (
            isinstance(value, list | tuple) and all(_fits(element, arguments[0]) for element in value)
        )
    if origin is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if origin is float:
        return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    return isinstance(value, origin)


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
    if config.numerics == "engine":
        for problem in contradicting_options(config):
            yield f"numerics='engine' contradicts {problem}, or use numerics='fast'."


def check_choices(config) -> Iterator[str]:
    for name, known in _CHOICES.items():
        if (value := getattr(config, name)) not in known and value != getattr(type(config), name):
            yield f"{name}={value!r} is unknown. Choose one of {list(known)}."


def _check_transport(config) -> Iterator[str]:
    is_server, url = config.use_vllm and config.vllm_mode == "server", config.vllm_server_base_url
    for name in ("vllm_delta_sync", "vllm_transport", "vllm_allow_plain_http", "vllm_ssl_ca_certs"):
        if getattr(config, name) not in (getattr(type(config), name), False) and not is_server:
            yield (
                f"{said(config, name)} is for weights that are sent to a server, but {said(config, 'use_vllm', 'vllm_mode')}: an engine in "
                "this process gets the tensors directly. Remove it, or set vllm_mode='server'."
            )
    at = said(config, "vllm_server_base_url")
    if url is not None and not re.match(r"https?://[^/]", url):
        yield f"{at} has no URL scheme. Write 'http://HOST:PORT' or 'https://HOST:PORT'."
    if config.vllm_ssl_ca_certs is not None:
        certs = said(config, "vllm_ssl_ca_certs")
        if not Path(config.vllm_ssl_ca_certs).is_file():
            yield f"{certs} is not a file. Name one with certificates in PEM."
        if is_server and not (url or "").startswith("https://"):
            yield f"{certs} is for a server at https://, but {at}. Set `vllm_server_base_url` to the server's https:// address."


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
    if config.mismatch_probe_steps < 0:
        yield f"mismatch_probe_steps={config.mismatch_probe_steps} must be 0 (never) or a number of updates."
    if config.mismatch_probe_steps and config.use_vllm and config.vllm_mode == "colocate":
        for name, usual in (("vllm_enable_sleep_mode", False), ("vllm_tensor_parallel_size", 1)):
            if getattr(config, name) != usual:
                asks = f"{said(config, 'mismatch_probe_steps')} asks the engine between rollouts"
                yield f"{asks}, which {said(config, name)} does not allow: the engine sleeps, or needs all processes. Leave out one of them."
    has_own_server = config.use_vllm and config.vllm_mode == "server" and not config.vllm_server_autostart
    if config.vllm_token_file is not None and not has_own_server:
        but = said(config, "use_vllm", "vllm_mode", "vllm_server_autostart")
        yield f"{said(config, 'vllm_token_file')} is for a server that you start yourself, but {but}. Remove it."
    yield from _check_transport(config)
    for name in ("vllm_request_timeout", "vllm_generation_timeout"):
        if not 0 < getattr(config, name) < math.inf:
            yield (
                f"{said(config, name)} must be a positive number of seconds: a server that never answers would block the run forever. "
                f"The default is {getattr(type(config), name):g}."
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
    if config.rollout_ahead < 0:
        yield f"rollout_ahead={config.rollout_ahead!r} must be 0 (rollouts of the learner's own weights) or a number of batches."
        return
    if config.rollout_ahead == 0:
        if config.old_logps != "version":
            yield (
                f"{said(config, 'old_logps')} is for rollouts that are drawn ahead, but rollout_ahead=0: the learner has the weights that "
                "drew the batch. Remove it; objective='bypass' uses the sampler's log-probs."
            )
        if config.in_flight_updates:
            yield "in_flight_updates=True is for rollouts that are drawn ahead, but rollout_ahead=0. Set rollout_ahead=2, or remove it."
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
    with suppress(ValueError):
        # Problems of the objective itself are reported elsewhere.
        if get_objective(config).is_on_policy:
            yield f"{ahead} contradicts {said(config, 'objective')}: batches would come from earlier weights. Leave out one of them."
    if config.old_logps == "version" and not config.quantize_learner:
        yield (
            f"{ahead} with quantize_learner=False does not support old_logps='version': only low-bit weights are kept, and this learner "
            "computes with masters. Use old_logps='sampler' or 'learner'."
        )
    if not config.in_flight_updates:
        return
    if config.rollout_ahead < 2:
        yield f"in_flight_updates=True with {ahead}: nothing is in flight when weights are published. Use rollout_ahead=2."
    if config.numerics != "engine" or config.exact == "warn":
        yield (
            f"in_flight_updates=True needs numerics='engine', and not exact='warn', but {said(config, 'numerics', 'exact')}: the tokens of "
            "a completion come from several versions of the weights, and only log-probs that are equal bit for bit tell which. "
            "Remove it, or set these numerics."
        )
    if config.old_logps == "learner":
        yield "in_flight_updates=True is unsupported with old_logps='learner'. Use 'version'."


def check_hub(config) -> Iterator[str]:
    if config.publish_dir is not None and Path(config.publish_dir).exists() and not Path(config.publish_dir).is_dir():
        yield f"publish_dir={config.publish_dir!r} is a file. Name a folder, which is created if missing."
    name = config.hub_model_id
    if name is None and config.push_to_hub:
        name = Path(config.output_dir or "trainer_output").absolute().name
    if name is not None and (problem := problem_of_name(name, config.hub_export)):
        yield problem
    if config.push_to_hub and (problem := problem_of_access(config.hub_token)):
        yield problem


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
    if config.optim == "muon" and config.optim_args:
        yield (
            f"optim_args={config.optim_args!r} is not honoured by optim='muon', which has the options `learning_rate`, "
            "`weight_decay`, `adam_beta1`, `adam_beta2` and `adam_epsilon`. Remove it or choose another `optim`."
        )


def refused_by_all(config) -> Iterator[str]:
    for name, why in REFUSED.items():
        if getattr(config, name, None):
            yield f"{said(config, name)} is not supported: {why}."


def said(config: Any, *names: str) -> str:
    """Return options in the form of messages: `name=value, ...`."""
    return ", ".join(f"{name}={getattr(config, name)!r}" for name in names)


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one `ValueError` that lists all `problems`, if there are any."""
    problems = [*problems]
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise ValueError("\n".join([f"{len(problems)} problems:", *(f"- {problem}" for problem in problems)]))


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
        yield f"{text} Float16 masters also become NaN within a few updates of scheme={config.scheme!r}."
    elif not config.allow_low_precision_masters:
        yield f"{text} `allow_low_precision_masters=True` allows them."


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
