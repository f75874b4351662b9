import math

import pytest

from trl_qarl.telemetry.advisor import STALLED_FLIP_RATE, STALLED_UPDATES, advise, assess, mismatch_bands


CONFIG = {"scheme": "w4a16", "quantize_learner": True, "loss_type": "tbpo", "learning_rate": 1e-6}


def rows(number=12, **metrics):
    """Rows of equal values, or of those that a function gives for a step."""
    return [
        {"step": step, **{name: value(step) if callable(value) else value for name, value in metrics.items()}}
        for step in range(1, number + 1)
    ]


def judge(rule, metrics, number=12, **config):
    found = {finding.rule: finding for finding in assess(rows(number, **metrics), CONFIG | config)}
    return found.get(rule)


def test_rules_are_silent_without_their_metrics():
    assert assess([], CONFIG) == []
    assert assess(rows(loss=0.1, **{"mismatch/abs_logp_mean": None, "entropy": math.nan}), CONFIG) == []


@pytest.mark.parametrize(
    ("value", "config", "level"),
    [
        (0.059, {}, "fine"),
        (0.061, {}, "watch"),
        (0.31, {}, "bad"),
        (0.059, {"scheme": "bf16"}, "fine"),
        # Rounding that 8-bit activations amplify.
        (0.27, {"scheme": "w8a8"}, "fine"),
        (0.27, {"scheme": "fp8"}, "fine"),
        (0.27, {"scheme": "w8a16"}, "watch"),
        (0.31, {"scheme": "w8a8"}, "watch"),
        (0.61, {"scheme": "fp8"}, "bad"),
        (0.0, {"numerics": "engine"}, "fine"),
        (1e-6, {"numerics": "engine"}, "bad"),
    ],
)
def test_mismatch_is_held_against_the_bands_of_its_scheme(value, config, level):
    finding = judge("mismatch", {"mismatch/abs_logp_mean": value}, **config)
    assert (finding.level, bool(finding.advice)) == (level, level != "fine")


def test_a_learner_in_high_precision_is_told_to_quantize():
    metrics = {"mismatch/abs_logp_mean": 1.0}
    assert "`quantize_learner=True`" in judge("mismatch", metrics, quantize_learner=False).advice
    assert "`quantize_learner=True`" not in judge("mismatch", metrics).advice
    assert "`tbpo`" in judge("mismatch", metrics, loss_type="grpo").advice
    assert "`tbpo`" not in judge("mismatch", metrics, loss_type="tbpo").advice


def test_one_layer_with_low_bit_activations_widens_the_bands():
    weight_only, mixed = {"re:.*mlp.*": "w4a16", "_default": "w8a16"}, {"re:.*mlp.*": "w4a16", "_default": "w8a8"}
    assert mismatch_bands({"scheme": weight_only}) == mismatch_bands({"scheme": "w4a16"})
    assert mismatch_bands({"scheme": mixed}) == mismatch_bands({"scheme": "w8a8"}) != (0.06, 0.3)


@pytest.mark.parametrize(
    ("share", "level", "word"),
    [
        (0.0, "watch", "Narrow"),
        (0.09, "watch", "Narrow"),
        (0.11, "fine", ""),
        (0.39, "fine", ""),
        (0.41, "watch", "fewer updates"),
    ]
    + [(0.71, "bad", "fewer updates")],
)
def test_dropped_share_has_an_aim(share, level, word):
    metrics = {"tbpo/dropped/total": share, "tbpo/ratio/min": 0.99, "tbpo/ratio/max": 1.01}
    finding = judge("dropped", metrics, number=16)
    assert finding.level == level and word in finding.advice and bool(word) == bool(finding.advice)
    # Too little is said of a few updates.
    assert (judge("dropped", metrics, number=15) is None) == (word == "Narrow")


def test_updates_on_fresh_batches_alone_have_nothing_to_drop():
    assert judge("dropped", {"tbpo/dropped/total": 0.0, "tbpo/ratio/min": 1.0, "tbpo/ratio/max": 1.0}, 20) is None


def test_no_flip_in_fifty_updates_is_a_stalled_policy():
    def flips(number, value=0.0, first=math.nan):
        metrics = {"quant/code_flip_rate": lambda step: first if step == 1 else value, "quant/update_to_step": 3e-7}
        return judge("flips", metrics, number)

    assert flips(STALLED_UPDATES).level == "watch" and not flips(STALLED_UPDATES).advice
    stalled = flips(STALLED_UPDATES + 1)
    assert stalled.level == "bad" and "no code changes" in stalled.advice
    assert "3.0e-07 quantization steps" in stalled.advice and "(1e-06 here)" in stalled.advice
    assert flips(STALLED_UPDATES + 1, STALLED_FLIP_RATE).level == "fine"
    assert flips(STALLED_UPDATES + 2, first=1.0).level == "bad" and flips(STALLED_UPDATES, first=1.0).level == "fine"


def test_a_row_of_ten_updates_counts_as_ten():
    tens = [{"step": 10 * step, "quant/code_flip_rate": 0.0} for step in range(1, 7)]
    levels = [assess(tens[:number], CONFIG)[0].level for number in (5, 6)]
    assert levels == ["watch", "bad"]


@pytest.mark.parametrize(
    ("rule", "metric", "levels"),
    [
        ("effective", "mismatch/effective_sample_size", {0.91: "fine", 0.89: "watch", 0.76: "watch", 0.74: "bad"}),
        ("text", "rollout/repetition_share", {0.04: "fine", 0.06: "watch", 0.21: "bad"}),
        ("text", "rollout/garbled_share", {0.04: "fine", 0.06: "watch", 0.21: "bad"}),
        ("zero_spread", "frac_reward_zero_std", {0.49: "fine", 0.51: "watch", 0.91: "bad"}),
    ],
)
def test_a_share_has_its_levels(rule, metric, levels):
    others = {"rollout/repetition_share": 0.0, "rollout/garbled_share": 0.0}
    assert {share: judge(rule, others | {metric: share}).level for share in levels} == levels


@pytest.mark.parametrize(
    ("end", "level", "word"),
    [(0.05, "watch", "copies"), (0.11, "fine", ""), (1.9, "fine", ""), (2.1, "watch", "falls apart")]
    + [(4.1, "bad", "falls apart")],
)
def test_entropy_is_held_against_its_start(end, level, word):
    finding = judge("entropy", {"entropy": lambda step: 1.0 if step <= 6 else end})
    assert finding.level == level and word in finding.advice


@pytest.mark.parametrize(("slope", "level"), [(0.01, "fine"), (0.0, "watch"), (-0.01, "bad")])
def test_reward_is_compared_with_its_noise(slope, level):
    metrics = {"reward": lambda step: 0.5 + slope * step + 0.004 * (step % 2), "eval_reward": lambda step: step / 10}
    finding = judge("learning", metrics, number=40)
    assert finding.level == level and bool(finding.advice) == (level == "bad")
    assert "eval 0.1 → 4" in finding.value
    assert judge("learning", metrics, number=7) is None


def test_a_change_of_precision_is_no_fault():
    def half(step, first, second):
        return first if step <= 20 else second

    # Fewer bits earn less, and speak with more entropy.
    schedule = {
        "quant/bits": lambda step: {1: 4, 21: 3}.get(step),
        "reward": lambda step: half(step, 0.8, 0.2) + step / 100,
        "entropy": lambda step: half(step, 0.1, 1.0),
    }
    logged = [{name: value for name, value in row.items() if value is not None} for row in rows(40, **schedule)]
    levels = {finding.rule: finding for finding in assess(logged, CONFIG | {"precisions": {"0": 4, "20": 3}})}
    assert levels["learning"].level == levels["entropy"].level == "fine"
    assert levels["learning"].value.endswith("at 3 bits")
    without = [{name: value for name, value in row.items() if name != "quant/bits"} for row in logged]
    assert {finding.rule: finding.level for finding in assess(without, CONFIG)} == {
        "learning": "bad",
        "entropy": "bad",
    }


def test_of_precisions_in_turn_the_worst_counts():
    turn = {"quant/bits": lambda step: 4 - step % 2, "entropy": lambda step: 0.1 if step % 2 else 0.1 * step}
    found = judge("entropy", turn, 40, precisions=[4, 3])
    assert found.level == "bad" and found.value.endswith("at 4 bits")
    # Means over both are compared with each other.
    assert judge("entropy", turn | {"quant/bits": 3.5, "entropy": 0.1}, 40).level == "fine"


def test_recent_values_count_and_not_those_long_ago():
    metrics = {"mismatch/abs_logp_mean": lambda step: 1.0 if step <= 30 else 0.01}
    assert judge("mismatch", metrics, number=40).level == "fine"
    assert judge("mismatch", metrics, number=32).level == "bad"


def test_advice_is_given_once_per_episode():
    def at(value):
        return assess(rows(**{"mismatch/abs_logp_mean": value}), CONFIG)

    said, ongoing = [], frozenset()
    # The rule is silent where the metric is missing, which ends no episode.
    for value in (0.01, 0.1, 0.5, None, 0.1, 0.01, 0.01, 0.1):
        new, ongoing = advise(at(value), ongoing)
        said.append([finding.rule for finding in new])
    assert said == [[], ["mismatch"], [], [], [], [], [], ["mismatch"]]
