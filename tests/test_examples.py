"""The tasks of `examples/study.py`: what is asked and what is rewarded."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("study", Path(__file__).parent.parent / "examples" / "study.py")
    module = sys.modules["study"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["study"]


@pytest.mark.parametrize("task", ["addition", "counting"])
def test_held_out_problems_are_not_trained_on_nor_shown(study, task):
    train, held_out = study.TASKS[task].make_problems(40, "<eos>")
    questions = [problem["prompt"].splitlines()[-1] for problem in (*train, *held_out)]
    assert len(held_out) == 40 and len(set(questions)) == len(questions)
    assert not any(question in held_out[0]["prompt"].split("\n")[:-1] for question in questions)


@pytest.mark.parametrize("task", ["addition", "counting"])
def test_only_the_answer_earns_the_full_reward(study, task):
    (problem, *_), _ = study.TASKS[task].make_problems(40, "<eos>")
    answer = problem["answer"]
    right, *wrong = study.TASKS[task].reward(
        [f" {answer}", f" {answer} 7", f" {answer}\nList", " 1", "", answer[:-1]], [answer] * 6
    )
    assert right == 1 and all(0 <= reward < 1 for reward in wrong)


@pytest.mark.parametrize(
    "completion, reward",
    [
        (" 46 47 48 49", 1),
        (" 46 47 48", 3 / 4),
        (" 46 47 8 49", 2 / 4),
        (" 46 47 48 49 50", 0),
        (" 46 47 48 49\nList the digits of", 0),
        (" 45 46 47 48", 0),
        ("", 0),
    ],
)
def test_counting_is_rewarded_up_to_the_first_wrong_number(study, completion, reward):
    assert study.share_in_place([completion], ["46 47 48 49"]) == [reward]
