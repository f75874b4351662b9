"""Types and ranges of option values, before any other check reads them."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import date
from enum import Enum
from functools import cache
from inspect import formatannotation
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from transformers.training_args import OptimizerNames

from ..options import MUONS, own_options


RANGES: dict[tuple[str, ...], tuple[str, Callable[[Any], bool], str]] = {
    ("num_generations",): ("at least 2", lambda x: x >= 2, "advantages compare the completions of a prompt"),
    ("num_iterations",): ("at least 1", lambda x: x >= 1, "batches that are never used train nothing"),
    (
        *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        *("steps_per_generation", "generation_batch_size", "num_generations_eval", "ref_model_sync_steps"),
        *("max_completion_length", "vllm_max_model_length", "vllm_tensor_parallel_size", "ddp_timeout"),
        *("eval_accumulation_steps", "ddp_bucket_cap_mb", "pad_to_multiple_of"),
        "max_tokens_per_forward",
    ): ("at least 1", lambda x: x >= 1, "it counts something that there must be"),
    (
        *("learning_rate", "weight_decay", "max_grad_norm", "beta", "adam_epsilon", "warmup_steps", "eval_delay"),
        *("router_aux_loss_coef", "save_steps", "eval_steps", "logging_steps", "dataloader_num_workers"),
        *("data_seed", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        *("max_tool_calling_iterations", "num_completions_to_print"),
    ): ("at least 0", lambda x: x >= 0, "a negative value has no meaning"),
    ("seed",): ("from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32, "NumPy takes no other"),
    ("adam_beta1", "adam_beta2"): ("at least 0 and below 1", lambda x: 0 <= x < 1, "it is the decay of a mean"),
    ("top_p",): ("above 0 and at most 1", lambda x: 0 < x <= 1, "it is the probability of the tokens that are kept"),
    ("min_p",): ("from 0 to 1", lambda x: 0 <= x <= 1, "it is a share of the largest probability"),
    ("top_k",): ("at least 0, or -1", lambda x: x >= -1, "it counts tokens, and 0 and -1 keep all"),
    ("temperature",): ("greater than 0", lambda x: x > 0, "the learner divides its logits by it"),
    ("rollout_ahead",): (
        "0 (rollouts of the learner's own weights) or 1",
        lambda x: x in (0, 1),
        "each weight sync waits for the batch in flight, so further batches would only be older",
    ),
    ("repetition_penalty", "num_train_epochs", "vllm_server_timeout"): (
        "greater than 0",
        lambda x: x > 0,
        "0 would leave nothing",
    ),
    ("max_steps",): ("at least 1, or -1", lambda x: x >= 1 or x == -1, "-1 trains for `num_train_epochs`"),
    ("top_entropy_quantile", "ref_model_mixup_alpha"): ("from 0 to 1", lambda x: 0 <= x <= 1, "it is a share"),
    ("vllm_server_port", "vllm_group_port"): ("from 1 to 65535", lambda x: 1 <= x <= 65535, "it is a port"),
    ("epsilon", "epsilon_high", "positive_epsilon_high", "negative_epsilon_high"): (
        "at least 0",
        lambda x: x >= 0,
        "it is an offset from a ratio of 1",
    ),
    ("negative_epsilon_low",): ("from 0 to 1", lambda x: 0 <= x <= 1, "it is an offset from a ratio of 1"),
    ("mismatch_cap",): ("greater than 1", lambda x: x > 1, "it bounds the weight to [1/c, c]; the paper uses 2"),
    ("vllm_importance_sampling_clip_max",): ("greater than 0", lambda x: x > 0, "it bounds a ratio of probabilities"),
    ("vllm_gpu_memory_utilization",): (
        "above 0 and at most 1",
        lambda x: 0 < x <= 1,
        "it is the share of a GPU's memory that vLLM takes",
    ),
}
"""Ranges of numbers with reasons: text, test and reason of several options."""

_RANGE_OF = {name: range_ for names, range_ in RANGES.items() for name in names}

_MAY_BE_INFINITE = (
    *("max_grad_norm", "delta", "vllm_importance_sampling_clip_max", "mismatch_cap"),
    *("positive_epsilon_high", "negative_epsilon_low", "negative_epsilon_high"),
)
_SIMPLE = {int, float, bool, NoneType, list[float]}
_TEXTS = {
    *("output_dir", "run_name", "project", "metric_for_best_model", "cache_implementation", "vllm_server_host"),
    *("hub_model_id", "hub_revision", "log_completions_hub_repo", "dataloader_multiprocessing_context"),
}
"""Inherited options of any text."""


def problems_of_values(config: Any, inherited: type) -> Iterator[tuple[str, str]]:
    """
    Yield name and problem of each option of `config` whose value cannot be: of another type than its field's
    annotation allows, or out of its range. Of the fields of `inherited`, a base class, only those of numbers,
    booleans, texts and names from a list are looked at, unless the class of `config` redefines their annotation.

    Integers and floats may come from NumPy. NaN is never allowed, and text may stand for a list with one element.
    """
    for name, hint, allowed, kinds in _options_to_look_at(type(config), inherited):
        value = getattr(config, name)
        if kinds:
            known = [*(MUONS if name == "optim" else ()), *(member.value for kind in kinds for member in kind)]
            if value not in known:
                yield name, f"{name}={value!r} is unknown. Choose one of {known}."
            continue
        numbers = [number for number in (value if isinstance(value, list | tuple) else [value]) if _is_float(number)]
        if any(map(math.isnan, numbers)):
            yield name, f"{name}={value!r} is not a number. Give one, or leave it out."
        elif not any(_fits(value, each) for each in allowed):
            kind = type(value).__name__
            yield (
                name,
                f"{name}={value!r} is of type {kind}, and must be {formatannotation(hint)}.{_how_to_write(value, allowed)}",
            )
        elif any(map(math.isinf, numbers)) and name not in _MAY_BE_INFINITE:
            yield name, f"{name}={value!r} must be finite. Give a smaller number, or leave it out."
        elif problem := _problem_of_range(name, value):
            yield name, problem


@cache
def _options_to_look_at(cls: type, inherited: type) -> list[tuple[str, Any, tuple[Any, ...], list[Any]]]:
    """Return name, annotation, allowed types and enumerations of options."""
    hints, own, found = get_type_hints(cls), own_options(cls, inherited), []
    for name in cls.__dataclass_fields__:
        # TRL's annotation of the first allows `None`, by which it divides.
        hint = int if name == "num_generations" else hints[name]
        allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = [OptimizerNames] if name == "optim" else [kind for kind in allowed if _is_enum(kind)]
        # A number that a command line may give as text is looked at too.
        simple = {*allowed} - {str, NoneType}
        if kinds or name in own or name in _TEXTS or (simple and _SIMPLE.issuperset(simple)):
            # A YAML file may leave a text empty.
            found.append((name, hint, (*allowed, NoneType) if name in _TEXTS else allowed, kinds))
    return found


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _how_to_write(value: Any, allowed: tuple[Any, ...]) -> str:
    """Return how to write a number that was given as text, or a text that YAML takes for a number or a date: without
    a point it takes `1e-5` for a text."""
    if isinstance(value, Real | date) and not isinstance(value, bool) and {*allowed} == {str, NoneType}:
        return " Write it in quotes."
    if not isinstance(value, str) or str in allowed:
        return ""
    number = ""
    with suppress(ValueError):
        number = f", and in YAML with a point, as {float(value):.1e}" if "e" in value.lower() else ""
    return f" Write it without quotes{number}."


def _problem_of_range(name: str, value: Any) -> str | None:
    if name == "output_dir" and value == "":
        return "output_dir='' is empty. Name the folder for checkpoints and the policy, or leave it out."
    if name not in _RANGE_OF or not isinstance(value, Real) or isinstance(value, bool):
        return None
    allowed, holds, why = _RANGE_OF[name]
    return None if holds(value) else f"{name}={value!r} must be {allowed}: {why}."


def _is_float(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, Integral)


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
        return isinstance(value, Real) and not isinstance(value, bool)
    if origin is Literal:
        return value in arguments
    return isinstance(value, origin)


def as_dict(config: Any, name: str) -> dict[str, Any]:
    """Return a dictionary option, JSON text parsed, and `{}` for `None`; raise `ValueError` for anything else."""
    value = getattr(config, name)
    if isinstance(value, str):
        given = value
        with suppress(json.JSONDecodeError):
            value = json.loads(given)
        if not isinstance(value, dict):
            raise ValueError(
                f"{name}={given!r} is not a JSON object, such as '{{\"key\": 1}}'. Write one, or leave it out."
            )
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{name}={value!r} is of type {type(value).__name__}. Give a dictionary, or leave it out.")
    return value or {}
