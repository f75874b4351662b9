import math

import pytest

from testing_utils.recorded_runs import CONFIG, make_run, rewards_run


pytest.importorskip("pandas")
pytest.importorskip("scipy")

from trl_qarl.study.runs import compare_groups, describe_differences, make_groups


def test_groups_of_different_rewards_are_not_compared():
    runs = [rewards_run(seed, [0.1 * seed], reward_funcs=[name]) for name in "ab" for seed in (0, 1)]
    assert describe_differences(make_groups(runs)) == {"exceeds": [], "within": [], "unknown": []}


def test_runs_that_share_everything_but_the_seed_form_a_group():
    configs = (
        {"seed": 0},
        {"seed": 1},
        {"seed": 0, "scheme": "fp8"},
        {"seed": 0, "versions": {"torch": "2.14.0", "trl": "1.16.0"}},
    )
    groups = make_groups([make_run(str(index), {**CONFIG, **config}) for index, config in enumerate(configs)])
    assert [(group.label, [run.name for run in group.runs]) for group in groups] == [
        ("QaRL, tbpo, w4a16, versions.torch=2.13.0", ["0", "1"]),
        ("QaRL, tbpo, fp8", ["2"]),
        ("QaRL, tbpo, w4a16, versions.torch=2.14.0", ["3"]),
    ]


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ({"quantize_learner": True, "objective": "tbpo", "scheme": "w4a16"}, "QaRL, tbpo, w4a16"),
        ({"quantize_learner": True, "objective": "grpo-tis", "scheme": "bf16"}, "bf16, grpo-tis"),
        ({"quantize_learner": False, "scheme": "fp8", "lora_mode": "merged"}, "rollout-only, fp8, lora_merged"),
        ({}, "runs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_label_follows_from_learner_scheme_and_objective(config, label):
    (group,) = make_groups([make_run("run", {**config, "seed": 0, "model": "org/model"})])
    assert group.label == label


def test_different_models_are_named_and_not_compared():
    groups = make_groups([rewards_run(seed, [seed], model=model) for model in ("a", "b") for seed in (0, 1)])
    assert [group.label for group in groups] == ["QaRL, tbpo, w4a16, model=a", "QaRL, tbpo, w4a16, model=b"]
    assert not any(describe_differences(groups).values())


STUDENT_95 = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764}
"""Two-sided 95 % quantiles of Student's distribution by degrees of freedom, from a printed table."""


def finals(runs):
    """Final rewards of the seeds of one group."""
    (group,) = make_groups(runs)
    return list(group.results())


def test_runs_of_one_seed_count_once():
    groups = make_groups([rewards_run(0, [0.0]), rewards_run(0, [1.0]), rewards_run(1, [2.0])])
    assert list(groups[0].results()) == [0.5, 2.0]
    assert "3 runs of 2 seeds" in groups[0].runs[0].notes[0]


def test_final_reward_is_the_mean_of_the_last_quarter():
    assert finals([rewards_run(0, [9, 9, 9, 9, 9, 9, 1, 3]), rewards_run(1, [0] * 6 + [5, None])]) == [2.0, 5.0]


def test_run_that_ended_before_the_last_quarter_has_no_final_reward():
    runs = [rewards_run(0, [1.0] * 8), rewards_run(1, [1.0] * 6, max_steps=8)]
    assert finals(runs) == [1.0] and "final reward" not in runs[1].results


def test_runs_that_all_end_early_are_compared_up_to_there():
    runs = [rewards_run(seed, [1.0] * 6 + [2.0] * 2, max_steps=100) for seed in (0, 1)]
    assert finals(runs) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([0.80, 0.81, 0.82], [0.70, 0.71, 0.72], "exceeds"),
        ([0.80, 0.81, 0.82], [0.79, 0.80, 0.81], "within"),
        ([0.80, 0.90], [0.70, 0.75], "within"),
        ([0.80, 0.80], [0.80, 0.80], "within"),
        ([0.80, 0.80], [0.70, 0.70], "exceeds"),
        ([0.80], [0.10, 0.11], "unknown"),
        ([], [0.1, 0.2], "unknown"),
    ],
)
def test_verdict_is_students_test(a, b, verdict):
    result = compare_groups(a, b)
    assert result["verdict"] == verdict
    if verdict != "unknown":
        n, m = len(a), len(b)
        mean_a, mean_b = sum(a) / n, sum(b) / m
        squares = sum((x - mean_a) ** 2 for x in a) + sum((x - mean_b) ** 2 for x in b)
        noise = STUDENT_95[n + m - 2] * math.sqrt(squares / (n + m - 2) * (1 / n + 1 / m))
        assert result["noise"] == pytest.approx(noise, rel=1e-3, abs=1e-12)


def test_sentences_name_groups_difference_and_noise():
    finals = {"x": [0.80, 0.81], "y": [0.2, 0.21], "z": [0.8]}
    runs = [rewards_run(seed, [value], scheme=s) for s, values in finals.items() for seed, value in enumerate(values)]
    found = describe_differences(make_groups(runs))
    assert found["exceeds"] == [
        "QaRL, tbpo, x ends at 0.805, QaRL, tbpo, y at 0.205: the difference of 0.6 exceeds the seed noise of 0.0304."
    ]
    assert found["within"] == []
    assert found["unknown"][0] == (
        "QaRL, tbpo, z ends at 0.8, QaRL, tbpo, y at 0.205: the seed noise of this difference of 0.595 cannot be judged, "
        "with one seed of QaRL, tbpo, z."
    )
