"""Checks what reward functions return, where TRL fails far from the function or trains on something else."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from decimal import Decimal
from functools import wraps
from numbers import Real
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import is_async_callable

from ..processes import Signaled


logger = logging.getLogger(__name__)

_LARGEST = 1e18
"""TRL computes advantages in float32, where the squares of larger rewards overflow."""

_NOT_A_NUMBER = ", which counts as no score, like `None`"
_TOO_LARGE = (
    f": in float32 the advantages of the whole group become 0, or any number. Return rewards from {-_LARGEST:g} to {_LARGEST:g}, "
    "or `None` for no score"
)


class BadReward(ValueError):
    """Rewards that cannot be trained on. The message names the function and the completion."""


def checked_reward(function: Any, name: str) -> Any:
    """Return a reward function whose results are checked, and whose errors and exits name it. Models stay as they
    are."""
    if isinstance(function, nn.Module):
        return function

    warned: set[str] = set()

    def check(output: Any, completions: Any) -> list[float | None]:
        rewards = check_rewards(output, len(completions), name)
        for row, reward in enumerate(rewards):
            if reward is None or abs(reward) <= _LARGEST:
                continue
            what = _NOT_A_NUMBER if math.isnan(reward) else _TOO_LARGE
            if what not in warned:
                warned.add(what)
                message = "The reward function %r returned %g for completion %d of %d%s. This is logged only once."
                logger.warning(message, name, reward, row, len(rewards), what)
        return rewards

    if is_async_callable(function):

        @wraps(function)
        async def call_async(*, completions, **kwargs):
            with _named(name):
                output = await function(completions=completions, **kwargs)
            return check(output, completions)

        return call_async

    @wraps(function)
    def call(*, completions, **kwargs):
        with _named(name):
            output = function(completions=completions, **kwargs)
        return check(output, completions)

    return call


def check_rewards(output: Any, count: int, name: str) -> list[float | None]:
    """Return rewards as floats, `None` for no score. [`BadReward`] is raised unless `output` has a number or `None`
    for each of `count` completions."""
    wanted = f"Return a list with one number for each of the {count} completions, or `None` for no score"
    if not isinstance(output, Iterable) or isinstance(output, Mapping | Set | str | bytes):
        raise BadReward(f"The reward function {name!r} returned {_brief(output)}. {wanted}.")
    if getattr(output, "ndim", 1) != 1:
        raise BadReward(f"The reward function {name!r} returned an array of shape {tuple(output.shape)}. {wanted}.")
    values = output.tolist() if isinstance(output, torch.Tensor) else [*output]
    if len(values) != count:
        raise BadReward(f"The reward function {name!r} returned {len(values)} rewards. {wanted}.")
    return [
        _number(value, f"{name!r} returned {{}} for completion {row} of {count}") for row, value in enumerate(values)
    ]


def _number(value: Any, said: str) -> float | None:
    if value is None:
        return None
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, Real | Decimal):
        raise BadReward(
            f"The reward function {said.format(_brief(value))}. A reward is a number, or `None` for no score."
        )
    reward = float(value)
    if abs(reward) > torch.finfo(torch.float32).max:
        # TRL computes advantages of a whole group in float32.
        raise BadReward(f"The reward function {said.format(_brief(value))}. A reward is finite in float32.")
    return reward


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


@contextmanager
def _named(name: str) -> Iterator[None]:
    """While open, an error gets a note with the name of the function, and its exit is an error."""
    try:
        yield
    except Signaled:
        raise
    except SystemExit as error:
        raise RuntimeError(
            f"The reward function {name!r} called sys.exit({error.code!r}), which would end the training without an error. Raise an "
            "error instead."
        ) from error
    except Exception as error:
        error.add_note(f"Raised by the reward function {name!r}.")
        raise
