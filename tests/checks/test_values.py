"""Values that cannot be are refused by name, with what is allowed and why, all in one message."""

import math

import numpy
import pytest

from testing_utils.trainings import config
from trl_qarl.checks.problems import Problems


NAN, INF = math.nan, math.inf
REFUSED = [
    ({"num_generations": 0}, "num_generations=0 must be at least 2: advantages compare"),
    ({"num_generations": 1}, "num_generations=1 must be at least 2"),
    ({"num_iterations": 0}, "num_iterations=0 must be at least 1"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be at least 1"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be at least 1"),
    ({"steps_per_generation": 0}, "steps_per_generation=0 must be at least 1"),
    ({"max_completion_length": 0}, "max_completion_length=0 must be at least 1"),
    (
        {"learning_rate": "1e-3"},
        "learning_rate='1e-3' is of type str, and must be float. Write it without quotes, and in YAML with a point, as 1.0e-03.",
    ),
    ({"learning_rate": -1e-3}, "learning_rate=-0.001 must be at least 0"),
    ({"learning_rate": INF}, "learning_rate=inf must be finite"),
    ({"output_dir": ""}, "output_dir='' is empty. Name the folder"),
    ({"temperature": INF}, "temperature=inf must be finite"),
    ({"temperature": NAN}, "temperature=nan is not a number"),
    ({"max_grad_norm": NAN}, "max_grad_norm=nan is not a number"),
    ({"reward_weights": [1.0, NAN]}, "reward_weights=[1.0, nan] is not a number"),
    ({"reward_weights": [1.0, INF]}, "reward_weights=[1.0, inf] must be finite"),
    ({"reward_weights": ["1"]}, "reward_weights=['1'] is of type list"),
    ({"mismatch_cap": NAN}, "mismatch_cap=nan is not a number"),
    ({"beta": NAN}, "beta=nan is not a number"),
    ({"max_steps": 0}, "max_steps=0 must be at least 1, or -1: -1 trains for"),
    ({"max_steps": 1.5}, "max_steps=1.5 is of type float, and must be int"),
    ({"num_train_epochs": 0}, "num_train_epochs=0 must be greater than 0"),
    ({"use_vllm": "false"}, "use_vllm='false' is of type str, and must be bool"),
    ({"vllm_server_port": 0}, "vllm_server_port=0 must be from 1 to 65535"),
    ({"vllm_group_port": 99999}, "vllm_group_port=99999 must be from 1"),
    ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
    ({"min_p": 2.0}, "min_p=2.0 must be from 0 to 1"),
    ({"top_k": -2}, "top_k=-2 must be at least 0, or -1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be greater than 0"),
    ({"adam_beta2": 1.0}, "adam_beta2=1.0 must be at least 0 and below 1"),
    ({"seed": -1}, "seed=-1 must be at least 0"),
    ({"data_seed": -1}, "data_seed=-1 must be at least 0"),
    ({"pad_to_multiple_of": NAN}, "pad_to_multiple_of=nan is not a number"),
    ({"pad_to_multiple_of": 0}, "pad_to_multiple_of=0 must be at least 1"),
    ({"eval_accumulation_steps": 0}, "eval_accumulation_steps=0 must be at least 1"),
    ({"entropy_target": -1.0}, "entropy_target=-1.0 must be at least 0"),
    ({"save_steps": -5}, "save_steps=-5 must be at least 0"),
    ({"vllm_gpu_memory_utilization": 70.0}, "vllm_gpu_memory_utilization=70.0 must be above 0 and at most 1"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_a_value_that_cannot_be_is_refused(tmp_path, options, message):
    with pytest.raises(Problems) as error:
        config(**({"output_dir": tmp_path} | options))
    (problem,) = error.value.problems
    assert problem.startswith(message)


def test_all_wrong_values_come_in_one_message(tmp_path):
    options = {name: value for given, _ in REFUSED for name, value in given.items() if name != "output_dir"}
    with pytest.raises(Problems) as error:
        config(tmp_path, **options, torch_compile=True, loss_type="ppo")
    found = {problem.split("=")[0] for problem in error.value.problems}
    assert found == options.keys() | {"torch_compile", "loss_type"}
    assert len(error.value.problems) == len(found) and str(error.value).startswith(f"{len(found)} problems:\n- ")


def test_problems_of_trl_join_those_of_ours(tmp_path):
    with pytest.raises(Problems) as error:
        config(tmp_path, torch_compile=True, per_device_train_batch_size=3, num_generations=4, steps_per_generation=1)
    assert [problem.split("=")[0].split(" ")[0] for problem in error.value.problems] == [
        "torch_compile",
        "generation_batch_size",
    ]


def test_numbers_of_numpy_and_infinite_bounds_are_taken(tmp_path):
    c = config(
        tmp_path,
        max_steps=numpy.int64(3),
        learning_rate=numpy.float32(0.5),
        max_grad_norm=INF,
        positive_epsilon_high=INF,
        reward_weights=[1, 0.5],
    )
    assert (c.max_steps, c.learning_rate, c.reward_weights) == (3, 0.5, [1, 0.5])
