import dataclasses
import re

import numpy
import pytest
from trl import GRPOConfig

from testing_utils.trainings import config
from trl_qarl import QaRLConfig


OWN = sorted({f.name for f in dataclasses.fields(QaRLConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)})


@pytest.mark.parametrize("value", [object(), float("nan")], ids=["object", "nan"])
@pytest.mark.parametrize("name", OWN)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_option(tmp_path, name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        config(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantize_learner", "false"),
        ("in_flight_updates", 0),
        ("mismatch_probe_steps", True),
        ("rollout_ahead", 1.0),
        ("positive_epsilon_high", "4e-4"),
        ("exclude_modules", [1, "lm_head"]),
        ("vllm_request_timeout", None),
        ("vllm_generation_timeout", -1.0),
        ("objective_kwargs", "sharp"),
        ("objective_kwargs", "[1]"),
        # Annotated anew, as `None` stands for the value of the objective.
        ("epsilon", "0.2"),
    ],
)
def test_values_that_resemble_a_right_one_are_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=name):
        config(tmp_path, **{name: value})


def test_numbers_of_numpy_and_a_single_pattern_are_taken(tmp_path):
    c = config(
        tmp_path,
        mismatch_probe_steps=numpy.int64(2),
        positive_epsilon_high=numpy.float32(0.5),
        mismatch_cap=3,
        exclude_modules="lm_head",
    )
    assert (c.mismatch_probe_steps, c.positive_epsilon_high, c.mismatch_cap) == (2, 0.5, 3)
