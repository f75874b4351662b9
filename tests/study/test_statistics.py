import math

import pytest

from recorded_runs import CONFIG, rewards_run
from trl_qarl.study.runs import Run
from trl_qarl.study.sentences import describe_differences
from trl_qarl.study.statistics import STUDENT_95, compare_groups, make_groups, merge_histograms, summarize


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
    groups = make_groups([Run(str(index), {**CONFIG, **config}, {1: {}}) for index, config in enumerate(configs)])
    assert [(group.label, [run.name for run in group.runs]) for group in groups] == [
        ("QaRL, TBPO, w4a16, versions.torch=2.13.0", ["0", "1"]),
        ("QaRL, TBPO, fp8", ["2"]),
        ("QaRL, TBPO, w4a16, versions.torch=2.14.0", ["3"]),
    ]


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ({"quantize_learner": True, "objective": "tbpo", "scheme": "w4a16"}, "QaRL, TBPO"),
        ({"quantize_learner": False, "objective": "grpo", "scheme": "w8a8"}, "rollout-only, GRPO"),
        ({"quantize_learner": True, "objective": "grpo-tis", "scheme": "bf16"}, "bf16, GRPO-TIS"),
        ({"scheme": "w4a16"}, "w4a16"),
        ({"scheme": "bf16"}, "bf16"),
        ({}, "runs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_label_follows_from_learner_scheme_and_objective(config, label):
    (group,) = make_groups([Run("run", {**config, "seed": 0, "model": "org/model"}, {1: {}})])
    assert group.label == label


def test_groups_that_their_names_do_not_tell_apart_differ_in_their_labels():
    configs = ({"scheme": "bf16"}, {"scheme": "bf16", "quantize_learner": False})
    groups = make_groups([Run("run", {**CONFIG, **config}, {1: {}}) for config in configs])
    assert [group.label for group in groups] == [f"bf16, TBPO, quantize_learner={value}" for value in (True, False)]


def test_different_models_are_named_and_not_compared():
    groups = make_groups([rewards_run(seed, [seed], model=model) for model in ("a", "b") for seed in (0, 1)])
    assert [group.label for group in groups] == ["QaRL, TBPO, a", "QaRL, TBPO, b"]
    assert not any(describe_differences(groups).values())


def test_runs_of_one_seed_count_once():
    groups = make_groups([rewards_run(0, [0.0]), rewards_run(0, [1.0]), rewards_run(1, [2.0])])
    (summary,) = summarize(groups)
    assert summary["by_seed"] == {0: 0.5, 1: 2.0} and "count as one seed" in groups[0].runs[0].notes[0]


def test_final_reward_is_the_mean_of_the_last_quarter():
    (summary,) = summarize(
        make_groups([rewards_run(0, [9, 9, 9, 9, 9, 9, 1, 3]), rewards_run(1, [0] * 6 + [5, None])])
    )
    assert summary["by_seed"] == {0: 2.0, 1: 5.0}
    assert (summary["mean"], summary["min"], summary["max"]) == (3.5, 2.0, 5.0)
    assert summary["sd"] == pytest.approx(math.sqrt(2 * 1.5**2))


def test_run_that_ended_before_the_last_quarter_has_no_final_reward():
    runs = [rewards_run(0, [1.0] * 8), rewards_run(1, [1.0] * 8)]
    del runs[1].rows[7], runs[1].rows[8]
    (summary,) = summarize(make_groups(runs))
    assert list(summary["by_run"].values()) == [1.0, None] and summary["sd"] is None


def test_runs_that_all_end_early_are_compared_up_to_there():
    runs = [rewards_run(seed, [1.0] * 6 + [2.0] * 2) for seed in (0, 1)]
    for run in runs:
        run.config["max_steps"] = 100
    (summary,) = summarize(make_groups(runs))
    assert summary["mean"] == 2.0


def naive_student_quantile(freedom):
    """Two-sided 95 % quantile: the density integrated by Simpson's rule, the bound found by bisection."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def mass(bound, parts=4000):
        heights = [(1 + (bound * i / parts) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(parts + 1)]
        return (
            2
            * scale
            * bound
            / parts
            / 3
            * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
        )

    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if mass(middle) < 0.95 else (low, middle)
    return low


def test_quantiles_are_students():
    assert [naive_student_quantile(freedom) for freedom in range(1, 21)] == pytest.approx(STUDENT_95, abs=6e-4)


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
    runs = [
        rewards_run(seed, [value], scheme=s) for s, values in (("x", a), ("y", b)) for seed, value in enumerate(values)
    ]
    runs += [rewards_run(0, [None], scheme="x")] * (not a)
    result = compare_groups(*summarize(make_groups(runs)))
    assert result["verdict"] == verdict
    if verdict != "unknown":
        n, m = len(a), len(b)
        mean_a, mean_b = sum(a) / n, sum(b) / m
        squares = sum((x - mean_a) ** 2 for x in a) + sum((x - mean_b) ** 2 for x in b)
        noise = naive_student_quantile(n + m - 2) * math.sqrt(squares / (n + m - 2) * (1 / n + 1 / m))
        assert result["noise"] == pytest.approx(noise, rel=1e-3, abs=1e-12)


def test_histograms_with_equal_edges_add_up():
    rows = [{"edges": [0, 1, 2], "counts": [1, 2]}, {"edges": [0, 1, 2], "counts": [3, 4]}]
    assert merge_histograms(rows) == ([0, 1, 2], [4.0, 6.0])


def test_histograms_with_other_edges_are_redistributed():
    rows = [
        {"edges": [0, 1, 2], "counts": [4, 0]},
        {"edges": [0.5, 2.5], "counts": [8]},
        {"edges": [7, 8], "counts": [0]},
    ]
    edges, counts = merge_histograms(rows, max_bins=5)
    assert edges == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5])
    assert counts == pytest.approx([2, 4, 2, 2, 2])
