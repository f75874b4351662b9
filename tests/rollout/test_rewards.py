"""Rewards that a user's function returns, up to the training that calls it."""

import asyncio
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from testing_utils import spread
from testing_utils.trainings import make, rows
from trl_qarl.processes import Signaled
from trl_qarl.rollout.rewards import check_rewards, checked_reward


COMPLETIONS = ["a", "b", "c"]


@pytest.mark.parametrize(
    "output",
    [
        [1, 0.5, None],
        (True, 0.5, None),
        iter([1, 0.5, None]),
        [np.float32(1), np.int64(1) / 2, None],
        [torch.tensor(1), torch.tensor(0.5), None],
        [Decimal(1), Fraction(1, 2), None],
    ],
)
def test_numbers_of_all_kinds_are_rewards(output):
    assert check_rewards(output, 3, "f") == [1.0, 0.5, None]


def test_arrays_with_one_dimension_are_rewards():
    for array in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)):
        assert check_rewards(array, 3, "f") == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ({"a": 1.0, "b": 0.0, "c": 1.0}, "returned .*dict"),
        ("abc", "returned 'abc' .str"),
        (None, "returned None"),
        ([1.0, 2.0], "returned 2 rewards. Return a list with one number for each of the 3 completions"),
        (torch.ones(3, 1), r"array of shape \(3, 1\)"),
        ([1.0, "1.0", 0.0], "returned '1.0' .str. for completion 1 of 3"),
        ([1.0, 0.0, {"score": 1.0}], "dict. for completion 2 of 3"),
        ([1j, 0.0, 0.0], "complex. for completion 0 of 3"),
        ([1.0, float("-inf"), 0.0], "returned -inf .float. for completion 1 of 3. A reward is finite"),
        ([1e300, 0.0, 0.0], "returned 1e.300 .float. for completion 0 of 3. A reward is finite"),
    ],
)
def test_other_rewards_are_named_with_function_and_row(output, said):
    with pytest.raises(ValueError, match=f"The reward function 'f' .*{said}"):
        check_rewards(output, 3, "f")


@pytest.mark.parametrize("is_async", [False, True])
def test_errors_and_exits_of_a_function_name_it(is_async):
    def raising(error):
        async def fail_async(completions, **kwargs):
            raise error

        def fail(completions, **kwargs):
            raise error

        checked = checked_reward(fail_async if is_async else fail, "score")
        assert checked.__name__ == ("fail_async" if is_async else "fail")
        call = checked(completions=COMPLETIONS)
        return asyncio.run(call) if is_async else call

    with pytest.raises(KeyError) as raised:
        raising(KeyError("answer"))
    assert raised.value.__notes__ == ["Raised by the reward function 'score'."]
    with pytest.raises(RuntimeError, match=r"'score' called sys.exit\(0\)"):
        raising(SystemExit(0))
    if not is_async:
        with pytest.raises(Signaled):
            raising(Signaled(143))


def leave(completions, **kwargs):
    sys.exit(0)


def as_dict(completions, **kwargs):
    return dict(zip(range(len(completions)), spread(completions), strict=True))


async def later(completions, **kwargs):
    return [None, *spread(completions)[1:]]


def test_a_training_names_the_reward_function(tiny_model, tmp_path):
    for reward, said in ((leave, r"'leave' called sys.exit\(0\)"), (as_dict, "'as_dict' returned .*dict")):
        with pytest.raises((RuntimeError, ValueError), match=said):
            make(tiny_model, tmp_path, [spread, reward]).train()
    trainer = make(tiny_model, tmp_path, (later, spread), max_steps=1)
    trainer.train()
    assert trainer.reward_func_names == ["later", "spread"] and "rewards/later/mean" in rows(trainer)[0]
