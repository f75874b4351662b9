"""Types and ranges of option values, before any other check reads them."""

import math
from collections.abc import Iterator
from inspect import formatannotation
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..options import own_options


AT_LEAST = {
    "num_generations": (2, "advantages compare the completions of a prompt"),
    "num_iterations": (1, "batches that are never used train nothing"),
    **dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        (1, "it counts completions or micro-batches"),
    ),
    **dict.fromkeys(
        ("steps_per_generation", "generation_batch_size"),
        (1, "a generation batch needs completions"),
    ),
    "max_completion_length": (1, "a completion needs a token"),
    "vllm_max_model_length": (1, "a completion needs a token"),
    "vllm_tensor_parallel_size": (1, "it counts GPUs"),
    "ref_model_sync_steps": (1, "it counts updates"),
    **dict.fromkeys(
        ("learning_rate", "weight_decay", "max_grad_norm", "beta", "adam_epsilon", "warmup_steps"),
        (0, "a negative value has no meaning"),
    ),
}
"""Smallest values of options, with reasons."""

_MAY_BE_INFINITE = (
    *("max_grad_norm", "delta", "vllm_importance_sampling_clip_max", "mismatch_cap"),
    *("positive_epsilon_high", "negative_epsilon_low", "negative_epsilon_high"),
)
_SIMPLE = {int, float, bool, NoneType, list[float]}


def problems_of_values(config: Any, inherited: type) -> Iterator[tuple[str, str]]:
    """
    Yield name and problem of each option of `config` whose value cannot be: of another type than its field's
    annotation allows, or out of its range. Of the fields of `inherited`, a base class, only those of numbers and
    booleans are looked at, unless the class of `config` redefines their annotation.

    Integers and floats may come from NumPy. NaN is never allowed, and text may stand for a list with one element.
    """
    hints, own = get_type_hints(type(config)), own_options(type(config), inherited)
    for name in type(config).__dataclass_fields__:
        hint, value = hints[name], getattr(config, name)
        allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if name not in own and name != "output_dir" and not _SIMPLE.issuperset(allowed):
            continue
        numbers = [number for number in (value if isinstance(value, list | tuple) else [value]) if _is_float(number)]
        if any(map(math.isnan, numbers)):
            yield name, f"{name}={value!r} is not a number. Give one, or leave it out."
        elif not any(_fits(value, each) for each in allowed):
            unquoted = " Write it without quotes." if isinstance(value, str) and str not in allowed else ""
            kind = type(value).__name__
            yield name, f"{name}={value!r} is of type {kind}, and must be {formatannotation(hint)}.{unquoted}"
        elif any(map(math.isinf, numbers)) and name not in _MAY_BE_INFINITE:
            yield name, f"{name}={value!r} must be finite. Give a smaller number, or leave it out."
        elif problem := _problem_of_range(name, value):
            yield name, problem


def _problem_of_range(name: str, value: Any) -> str | None:
    if name == "output_dir" and value == "":
        return "output_dir='' is empty. Name the folder for checkpoints and the policy, or leave it out."
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    if name in AT_LEAST and value < AT_LEAST[name][0]:
        least, why = AT_LEAST[name]
        return f"{name}={value!r} must be at least {least}: {why}."
    if name == "max_steps" and value != -1 and value < 1:
        return f"max_steps={value!r} must be at least 1, or -1 to train for `num_train_epochs`."
    if name == "num_train_epochs" and value <= 0:
        return f"num_train_epochs={value!r} must be greater than 0: no prompt would be used."
    if name in ("vllm_server_port", "vllm_group_port") and not 1 <= value <= 65535:
        return f"{name}={value!r} is not a port. Give a number from 1 to 65535; the default is free on most machines."
    if name == "vllm_gpu_memory_utilization" and not 0 < value <= 1:
        return f"{name}={value!r} must be above 0 and at most 1: it is the share of a GPU's memory that vLLM takes."
    return None


def _is_float(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, Integral)


def fits(value: Any, hint: Any) -> bool:
    """Return whether an annotation allows a value."""
    allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return any(_fits(value, each) for each in allowed)


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
