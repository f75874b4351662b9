import itertools

import pytest

from trl_qarl.objectives.registry import OBJECTIVES
from trl_qarl.study.names import COLORS, choose_colors, name_parts, setting_color


def config(kind, objective):
    return {
        "quantize_learner": kind != "rollout-only",
        "objective": objective,
        "scheme": "bf16" if kind == "bf16" else "w4a16",
    }


@pytest.mark.parametrize(
    ("kind", "objective", "name", "color"),
    [
        ("QaRL", "tbpo", "QaRL, TBPO", "blue"),
        ("rollout-only", "tbpo", "rollout-only, TBPO", "orange"),
        ("bf16", "grpo", "bf16, GRPO", "ink"),
        ("bf16", "grpo-tis", "bf16, GRPO-TIS", "ink"),
        ("QaRL", "positive-only", "QaRL, positive-only", None),
        ("QaRL", "mis-gspo", "QaRL, MIS-GSPO", None),
    ],
)
def test_a_setting_has_one_name_and_one_colour(kind, objective, name, color):
    assert ", ".join(name_parts(config(kind, objective))) == name
    assert setting_color(config(kind, objective)) == color or color is None


def test_an_adapter_and_where_it_is_are_part_of_the_name():
    names = [", ".join(name_parts(config("QaRL", "tbpo") | {"lora_mode": mode})) for mode in ("adapter", "merged")]
    assert names == ["QaRL, TBPO, LoRA", "QaRL, TBPO, merged LoRA"]


def test_settings_of_the_study_differ_in_colour():
    kinds = ("QaRL", "rollout-only", "bf16")
    colors = [setting_color(config(*pair)) for pair in itertools.product(kinds, ("tbpo", "grpo-tis"))]
    assert len(set(colors)) == 6


def test_every_objective_has_a_colour_and_a_report_no_two_equal_lines():
    configs = [config(*pair) for pair in itertools.product(("QaRL", "rollout-only", "bf16"), OBJECTIVES)]
    chosen = choose_colors(configs[:20])
    assert {color for color, _ in chosen} <= set(COLORS) and len(set(chosen)) == 20


def test_a_colour_does_not_depend_on_what_else_is_in_the_report():
    alone = choose_colors([config("rollout-only", "tbpo")])
    among = choose_colors([config("QaRL", "tbpo"), config("QaRL", "tbpo"), config("rollout-only", "tbpo")])
    assert alone[0] == among[2] == ("orange", "-") and among[0] == ("blue", "-") and among[1] != among[0]
