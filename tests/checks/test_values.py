"""Values that cannot be are refused by name, with what is allowed and why, all in one message."""

import json
import math
from datetime import date

import numpy
import pytest

from testing_utils.trainings import config
from trl_qarl.checks.problems import Problems


NAN, INF = math.nan, math.inf
# Values just outside of a range, by what is allowed; each reason is said with one of its options.
OUTSIDE = {
    "at least 2: advantages compare": "num_generations=0 num_generations=1",
    "at least 1: batches that are never used": "num_iterations=0",
    "at least 1: it counts": "gradient_accumulation_steps=0 per_device_train_batch_size=0 steps_per_generation=0 "
    "max_completion_length=0 pad_to_multiple_of=0 eval_accumulation_steps=0",
    "at least 1, or -1: -1 trains for": "max_steps=0",
    "at least 0: a negative value": "learning_rate=-0.001 data_seed=-1 entropy_target=-1.0 save_steps=-5",
    "from 0 to 2**32 - 1: NumPy": "seed=-1 seed=4294967296",
    "at least 0: it is an offset": "positive_epsilon_high=-0.1 negative_epsilon_high=-0.0001 epsilon=-0.5",
    "at least 0, or -1": "top_k=-2",
    "at least 0 and below 1": "adam_beta2=1.0",
    "above 0 and at most 1": "top_p=0.0 vllm_gpu_memory_utilization=70.0",
    "greater than 0": "temperature=0.0 num_train_epochs=0 repetition_penalty=0.0",
    "greater than 1": "mismatch_cap=1.0",
    "from 0 to 1": "min_p=2.0 negative_epsilon_low=-0.0001 negative_epsilon_low=1.5",
    "from 1 to 65535": "vllm_server_port=0 vllm_group_port=99999",
    "0 (rollouts of the learner's own weights) or 1": "rollout_ahead=-1 rollout_ahead=2",
}
REFUSED = [
    *(
        ({name: json.loads(value)}, f"{name}={value} must be {allowed}")
        for allowed, options in OUTSIDE.items()
        for name, value in (option.split("=") for option in options.split())
    ),
    (
        {"learning_rate": "1e-3"},
        "learning_rate='1e-3' is of type str, and must be float. Write it without quotes, and in YAML with a point, as 1.0e-03.",
    ),
    ({"learning_rate": INF}, "learning_rate=inf must be finite"),
    ({"output_dir": ""}, "output_dir='' is empty. Name the folder"),
    *(
        ({"accelerator_config": value}, f"accelerator_config={value!r} is {why}. Give a dictionary")
        for value, why in (("even", "no file"), (3, "of type int"))
    ),
    *(
        ({"parallelism_config": value}, f"parallelism_config={value!r} has options of the launch")
        for value in ([2], {"tp_size": 2})
    ),
    *(
        ({name: value}, f"{name}={value!r} is of type {type(value).__name__}, and must be str | None.{how}")
        for name, value, how in (
            ("run_name", date(2026, 5, 1), " Write it in quotes."),
            ("metric_for_best_model", 3, " Write it in quotes."),
            ("cache_implementation", ["static"], ""),
        )
    ),
    ({"num_generations": None}, "num_generations=None is of type NoneType, and must be int"),
    ({"reward_weights": [1.0, NAN]}, "reward_weights=[1.0, nan] is not a number"),
    ({"reward_weights": [1.0, INF]}, "reward_weights=[1.0, inf] must be finite"),
    ({"reward_weights": ["1"]}, "reward_weights=['1'] is of type list"),
    ({"max_steps": 1.5}, "max_steps=1.5 is of type float, and must be int"),
    ({"use_vllm": "false"}, "use_vllm='false' is of type str, and must be bool"),
    *(({name: NAN}, f"{name}=nan is not a number") for name in ("temperature", "max_grad_norm", "beta")),
    *(
        ({name: value}, f"{name}={value!r} is unknown. Choose one of ['{known}'")
        for name, value, known in (
            ("eval_strategy", "step", "no"),
            ("logging_strategy", "always", "no"),
            ("save_strategy", "epochs", "no"),
            ("hub_strategy", "never", "end"),
            ("lr_scheduler_type", "cosin", "linear"),
            ("optim", "adam", "muon"),
        )
    ),
    ({"generation_kwargs": [1]}, "generation_kwargs=[1] is of type list. Give a dictionary"),
    ({"model_init_kwargs": 3}, "model_init_kwargs=3 is of type int. Give a dictionary"),
    ({"gradient_checkpointing_kwargs": "reentrant"}, "gradient_checkpointing_kwargs='reentrant' is not a JSON object"),
    ({"report_to": 3}, "report_to=3 is of type int"),
    ({"chat_template_kwargs": True}, "chat_template_kwargs=True is of type bool. Give a dictionary"),
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


def test_an_unknown_key_of_a_dictionary_is_a_problem(tmp_path):
    with pytest.raises(Problems, match="unexpected keyword argument 'even'"):
        config(tmp_path, accelerator_config={"even": True})


def test_none_as_a_text_of_yaml_is_no_tracker(tmp_path):
    assert config(tmp_path, report_to="None").report_to == []


def test_a_wrong_size_of_a_batch_is_one_problem(tmp_path):
    """Although it does not fit the other sizes either."""
    with pytest.raises(Problems, match="^num_generations=1 must be at least 2"):
        config(tmp_path, num_generations=1, per_device_train_batch_size=4, steps_per_generation=1)


def test_problems_of_trl_join_those_of_ours(tmp_path):
    with pytest.raises(Problems) as error:
        config(tmp_path, torch_compile=True, per_device_train_batch_size=3, num_generations=4, steps_per_generation=1)
    ours, theirs = error.value.problems
    assert ours.startswith("torch_compile=") and theirs.startswith("generation_batch_size ")


def test_numbers_of_numpy_and_infinite_bounds_are_taken(tmp_path):
    numbers = {"max_steps": numpy.int64(3), "learning_rate": numpy.float32(0.5), "reward_weights": [1, 0.5]}
    others = {"rollout_ahead": numpy.int64(0), "mismatch_cap": 3, "exclude_modules": "lm_head"}
    c = config(tmp_path, max_grad_norm=INF, positive_epsilon_high=INF, **numbers, **others)
    assert (c.max_steps, c.learning_rate, c.reward_weights) == (3, 0.5, [1, 0.5])
