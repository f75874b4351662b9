import pytest

from trl_qarl.scripts import quickstart


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("31", 1.0), (" 31", 1.0), (" 31 ", 1.0), ("31\n", 0.0), ("311", 0.0), ("31.", 0.0), ("", 0.0), ("3 1", 0.0)],
)
def test_reward_is_one_for_exactly_the_sum(completion, reward):
    assert quickstart.exact_sum([completion], answer=["31"], prompts=["23 + 8 ="]) == [reward]


def test_problems_are_right_disjoint_and_fixed_by_the_seed():
    train, held_out = quickstart.make_problems(100, seed=0, eos_token="</s>")
    prompts = [problem["prompt"] for problem in train + held_out]
    assert (len(train), len(held_out), len(set(prompts))) == (260, 100, 360)
    for problem in train + held_out:
        *examples, question = problem["prompt"].splitlines()
        left, right = question.removesuffix(" =").split(" + ")
        assert int(left) + int(right) == int(problem["answer"]) and all(e.endswith("</s>") for e in examples)
    assert quickstart.make_problems(100, seed=0, eos_token="</s>") == (train, held_out)
    assert quickstart.make_problems(100, seed=1, eos_token="</s>")[1] != held_out


@pytest.mark.parametrize("num_eval", [0, 181])
def test_too_many_held_out_problems_are_refused(num_eval):
    with pytest.raises(ValueError, match="between 1 and 180"):
        quickstart.make_problems(num_eval, seed=0, eos_token="")
