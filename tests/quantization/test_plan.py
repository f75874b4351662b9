import json
from dataclasses import dataclass

import pytest
from torchao.core.config import AOBaseConfig
from torchao.quantization import FqnToConfig, quantize_
from torchao.quantization.transform_module import register_quantize_module_handler

from testing_utils.layers import ATTENTION, MLP, tiny
from trl_qarl import get_scheme, prepare_model
from trl_qarl.quantization.plan import QuantPlan, check_fused, get_plan
from trl_qarl.quantization.swap import quantized_layers


NAMES = [f"model.layers.{i}.{name}" for i in range(3) for name in ATTENTION + MLP] + ["lm_head"]
HEAD = {"lm_head": "output head"}
DOWN = "model.layers.1.mlp.down_proj"


@dataclass
class Mark(AOBaseConfig):
    name: str


@register_quantize_module_handler(Mark)
def mark(module, config):
    module.mark = config.name
    return module


def assigned(plan, skipped=HEAD):
    return {name: scheme.name for name, scheme in plan.assign(NAMES, skipped)[0].items()}


def test_name_of_a_scheme_is_a_plan_of_one():
    plan = get_plan("w4a16", 64)
    assert plan.is_uniform and plan.name == "w4a16" and plan.schemes == (get_scheme("w4a16", 64),)
    assert set(assigned(plan).values()) == {"w4a16"} and len(assigned(plan)) == 21
    assert get_plan(plan) is plan
    with pytest.raises(ValueError, match="group_size=32"):
        get_plan(plan, 32)
    assert not get_plan("bf16").is_quantized and get_plan("bf16").name == "bf16"


def test_layers_are_chosen_as_torchao_does():
    """A name comes before expressions, of which the first counts."""
    mapping = {"re:.*mlp.*_proj": "w4a16", "re:.*attn.*_proj": "w8a8", "re:.*down_proj": "fp8", DOWN: None}
    ours, theirs = tiny(), tiny()
    report = prepare_model(ours, mapping)
    quantize_(theirs, FqnToConfig({p: None if name is None else Mark(name) for p, name in mapping.items()}), None)
    expected = {name: module.mark for name, module in theirs.named_modules() if hasattr(module, "mark")}
    assert {name: scheme.name for name, scheme in report.schemes.items()} == expected and len(expected) == 13
    assert report.plan.name == "w4a16-w8a8-fp8" and report.skipped[DOWN] == f"bf16 by '{DOWN}'"


def test_layers_that_nothing_matches_stay_in_high_precision():
    schemes, reasons = get_plan({"re:.*mlp.*": "w4a16"}).assign(NAMES, HEAD)
    assert len(schemes) == 9 and set(reasons.values()) == {"matches no pattern"} and "lm_head" not in reasons
    with pytest.raises(ValueError, match="'re:mlp'"):
        get_plan({"re:mlp": "w4a16"}).assign(NAMES, HEAD)


@pytest.mark.parametrize(
    ("scheme", "arguments", "message"),
    [
        (None, {}, "scheme=None is neither"),
        ({}, {}, "quantizes nothing"),
        ({"_default": "w5a16"}, {}, "'_default': Unknown scheme 'w5a16'"),
        ({"re:(": "w4a16"}, {}, "is not a valid regular expression"),
        ({"": "w4a16"}, {}, "is not a pattern"),
        ({"_default": {"group_size": 32}}, {}, "is neither a scheme's name"),
        ({"_default": {"scheme": "w4a16", "size": 32}}, {}, "is neither a scheme's name"),
        ({"_default": {"scheme": "w4a16", "group_size": 48}}, {}, r"group_size=48 .*\[32, 64, 128\]"),
        ({"re:.*mlp.*": "w4a8", "_default": "w8a8"}, {"group_size": 64}, "group_size=64 .*128"),
        ({"_default": {"scheme": "w8a8", "group_size": 32}}, {}, "has no groups"),
        ({"_default": "w8a8"}, {"group_size": 32}, "no scheme of the plan has groups"),
    ],
)
def test_plans_that_make_no_sense_are_refused(scheme, arguments, message):
    with pytest.raises(ValueError, match=message):
        get_plan(scheme, **arguments)


def test_group_size_is_for_schemes_with_groups_that_say_none():
    mapping = {"re:.*mlp.*": {"scheme": "w4a16", "group_size": 32}, "re:.*o_proj": "w3a16", "_default": "w8a8"}
    assert [scheme.group_size for scheme in get_plan(mapping, 64).schemes] == [32, 64, None]


@pytest.mark.parametrize(
    "plan",
    [
        get_plan("w4a16", 32),
        get_plan({"re:.*mlp.*": "w4a16", DOWN: None, "_default": {"scheme": "w2a16", "group_size": 64}}),
    ],
)
def test_what_is_written_is_read_again(plan):
    assert get_plan(json.loads(json.dumps(plan.option_value)), plan.group_size) == plan


@pytest.mark.parametrize("pattern", ["lm_head", "re:lm_.*"])
def test_a_scheme_for_layers_that_are_never_quantized_is_refused(pattern):
    with pytest.raises(ValueError, match="'w8a8'"):
        get_plan({pattern: "w8a8", "_default": "w4a16"}).assign(NAMES, HEAD)
    assert assigned(get_plan({pattern: None, "_default": "w4a16"})) == assigned(get_plan("w4a16"))


@pytest.mark.parametrize(
    ("pattern", "scheme", "message"),
    [
        ("re:.*[qk]_proj", "w8a8", "q_proj is w8a8, .*k_proj is w8a8, .*v_proj is w4a16 in groups of 128"),
        ("re:.*gate_proj", None, "gate_proj is bf16, .*up_proj is w4a16 in groups of 128"),
        ("re:.*up_proj", {"scheme": "w4a16", "group_size": 32}, ".*up_proj is w4a16 in groups of 32"),
    ],
)
def test_layers_that_vllm_fuses_share_a_scheme(pattern, scheme, message):
    with pytest.raises(ValueError, match=f"{message}: vLLM holds"):
        prepare_model(tiny(), {pattern: scheme, "_default": "w4a16"})


def test_fused_layers_may_differ_between_layers_and_may_be_fewer():
    schemes = {"a.0.q_proj": get_scheme("w4a16"), "a.0.k_proj": get_scheme("w4a16"), "a.1.q_proj": get_scheme("w8a8")}
    check_fused(schemes, [*schemes, "a.2.gate_proj", "a.2.up_proj"])


def test_plan_of_layers_is_one_scheme_or_one_each():
    w4, w8 = get_scheme("w4a16"), get_scheme("w8a8")
    assert QuantPlan.of_layers({"a": w4, "b": w4}) == get_plan("w4a16")
    assert QuantPlan.of_layers({"a": w4, "b": w8}).option_value == {
        "a": {"scheme": "w4a16", "group_size": 128},
        "b": "w8a8",
    }


def test_prepared_model_follows_the_plan_and_its_report_says_how():
    plan = {"re:.*mlp.*": "w4a16", "re:.*self_attn.*": "w8a8"}
    model = tiny(intermediate_size=192)
    text = str(prepare_model(model, plan, exclude_modules="layers.0.mlp.down_proj"))
    assert {layer.scheme.name for name, layer in quantized_layers(model).items() if "mlp" in name} == {"w4a16"}
    assert text.startswith(
        "scheme w4a16-w8a8: 13 linear layers quantized (8 w8a8 per output channel, 4 w4a16 group 128, 1 w4a16 group 64)"
    )
    assert "group_size=128 does not divide every layer" in text and "1 (exclude_modules)" in text
