import copy
import itertools
import re

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from testing_utils import MIXTURES, make_mixture, relative_error
from testing_utils.layers import naive_experts, route, tiny
from trl_qarl.quantization.experts import QuantizedExperts, problem_of_experts
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.swap import convert_model, freeze_model, prepare_model, quantized_layers, restore_model


SCHEMES = ["w4a16", "w8a16", "w8a8", "fp8"]
EXPERTS = 8


@pytest.fixture(scope="module")
def mixtures():
    return {arch: make_mixture(arch) for arch in MIXTURES}


def experts_of(model):
    return [module for module in model.modules() if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts")]


def quantized(model, name="w4a16", **arguments):
    return QuantizedExperts.from_experts(copy.deepcopy(experts_of(model)[-1]), get_scheme(name), **arguments)


@pytest.mark.parametrize(
    ("arch", "name"),
    [*itertools.product(["qwen3_moe", "gpt_oss"], SCHEMES), ("mixtral", "w4a16"), ("gpt_oss", "mxfp4a16")],
)
def test_value_and_every_gradient_equal_the_float64_loop(mixtures, arch, name):
    layer = quantized(mixtures[arch], name)
    x, ids, weights = route()
    y = layer(x, ids, weights)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected, leaves = naive_experts(layer, x, ids, weights)
    expected.backward(grad.double())
    # An activation that lies half way between two codes is rounded otherwise by the last bit of float32: one step of
    # it.
    tolerance = 1e-6 if layer.scheme.activation is None else 2e-3
    assert relative_error(y, expected) < tolerance
    parameters = [*layer.parameters(recurse=False)]
    for actual, leaf in zip((x, weights, *parameters), leaves, strict=True):
        assert relative_error(actual.grad, leaf.grad) < tolerance and torch.isfinite(actual.grad).all()
    assert not any(parameter.grad[-1].any() for parameter in parameters), "an expert without tokens"
    assert not weights.grad[3, 1], "a slot without an expert"


def test_experts_run_under_autocast_as_linear_layers_do(mixtures):
    layer = quantized(mixtures["qwen3_moe"], scale_dtype=torch.bfloat16)
    x, ids, weights = route()
    y = layer(x.bfloat16(), ids, weights)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = layer(x, ids, weights)
        layer.use_quantized_forward = False
        dense = layer(x, ids, weights)
    assert under_autocast.dtype == dense.dtype == torch.bfloat16 and torch.equal(under_autocast, y)
    under_autocast.float().sum().backward()
    assert layer.down_proj.grad.dtype == torch.float32


@pytest.mark.parametrize("arch", ["mixtral", "gpt_oss"])
def test_without_quantized_forward_they_equal_transformers(mixtures, arch):
    model = mixtures[arch]
    layer, plain = quantized(model), experts_of(model)[-1]
    layer.use_quantized_forward = False
    x, ids, weights = route()
    ids[3, 1] = (ids[3, 0] + 1) % EXPERTS
    y, expected = layer(x, ids, weights), plain(x, ids, weights)
    assert relative_error(y, expected.double()) < 1e-6
    got = torch.autograd.grad(y.sum(), (x, weights, *layer.parameters(recurse=False)))
    wanted = torch.autograd.grad(expected.sum(), (x, weights, *plain.parameters(recurse=False)))
    assert all(relative_error(a, b.double()) < 1e-6 for a, b in zip(got, wanted, strict=True))


def loss_and_gradients(model, ids, **arguments):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids, **arguments).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_checkpointing_changes_no_bit_of_a_mixture():
    model = make_mixture()
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    ids = torch.randint(3, 260, (2, 24))
    loss, gradients = loss_and_gradients(model, ids)
    trained = {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.gate.weight", "lm_head.weight"}
    assert trained <= gradients.keys() and all(gradients[name].any() for name in trained)
    # `generate` puts another name there, and users may.
    for implementation in ("eager", *ALL_EXPERTS_FUNCTIONS.valid_keys()):
        model.config._experts_implementation = implementation
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(ids, labels=ids).loss, loss)
    model.train()
    model.gradient_checkpointing_enable()
    again, same = loss_and_gradients(model, ids)
    assert torch.equal(again, loss) and all(torch.equal(same[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("arch", MIXTURES)
def test_named_layouts_are_quantized_without_routers(mixtures, arch):
    model = copy.deepcopy(mixtures[arch])
    report = prepare_model(model, "w4a16")
    is_dense_first = hasattr(model.config, "first_k_dense_replace")
    found = [name for name, layer in quantized_layers(model).items() if isinstance(layer, QuantizedExperts)]
    assert found == [*report.num_experts] == [f"model.layers.{i}.mlp.experts" for i in range(is_dense_first, 2)]
    assert f"and {EXPERTS * len(found)} experts in {len(found)} layers quantized" in str(report)
    assert {report.converted[name] for name in found} == {64}
    assert not any(re.search(r"\.gate$|shared_expert_gate$|lm_head$", name) for name in report.converted)
    state = mixtures[arch].state_dict()
    assert state.keys() == model.state_dict().keys()
    loss_and_gradients(model, torch.randint(3, 260, (1, 8)))
    # It shares what it was made from, and gives it back.
    assert restore_model(model) == len(report.converted)
    assert type(model.get_submodule(found[0])) is type(mixtures[arch].get_submodule(found[0]))
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arch", "scheme", "change"), [("qwen2_moe", "w4a16", freeze_model), ("qwen3_moe", "w8a8", convert_model)]
)
def test_frozen_experts_compute_what_they_did_and_hold_no_master(mixtures, arch, scheme, change):
    model, ids = copy.deepcopy(mixtures[arch]), torch.randint(3, 260, (2, 24))
    report = prepare_model(model, scheme)
    masters = sum(weight.parameter.nbytes for _, weight in Inventory.of(model).weights())
    expected = model(ids).logits
    assert change(model) == (masters if change is freeze_model else len(report.converted))
    assert change is convert_model or (report.master_bytes, freeze_model(model)) == (masters, 0)
    assert [*quantized_layers(model)] == [*(report.converted if change is freeze_model else report.num_experts)]
    logits = model(ids).logits
    assert torch.equal(logits, expected)
    logits.sum().backward()
    assert model.model.layers[0].mlp.gate.weight.grad.any(), "gradients pass through frozen experts"
    with pytest.raises(ValueError, match="Frozen experts have no masters"):
        restore_model(model)


def test_flips_are_counted_and_unchanged_experts_kept():
    model = make_mixture()
    prepare_model(model, "w4a16")
    weight = dict(Inventory.of(model).weights())["model.layers.0.mlp.experts.down_proj"]
    before = weight.low_bit_weight()
    assert weight.low_bit_weight() is before
    with torch.no_grad():
        weight.parameter[3] = weight.parameter[3].flip(0)
    after = weight.low_bit_weight()
    assert after is not before and weight.num_flipped_codes > 0
    changed = [not torch.equal(a, b) for a, b in zip(before.row_blocks(8), after.row_blocks(8), strict=True)]
    assert changed == [expert == 3 for expert in range(8)]


def test_experts_need_one_group_size_for_both_products():
    model = make_mixture(moe_intermediate_size=96)
    report = prepare_model(model, "w4a16")
    assert {report.converted[name] for name in report.num_experts} == {32}
    weights = {name: weight.low_bit_weight() for name, weight in Inventory.of(model).weights()}
    assert {weight.group_size for name, weight in weights.items() if "experts" in name} == {32}
    with pytest.raises(ValueError, match="in_features=48"):
        prepare_model(make_mixture(moe_intermediate_size=48), "w4a16")
    with pytest.raises(ValueError, match="'mxfp4a16'"):
        prepare_model(make_mixture(), "mxfp4a16")


def test_gpt_oss_in_mxfp4_has_other_layers_in_high_precision():
    model = make_mixture("gpt_oss")
    report = prepare_model(model, "mxfp4a16")
    assert report.converted.keys() == report.num_experts.keys() and len(report.num_experts) == 2
    assert report.skipped["model.layers.1.self_attn.q_proj"] == "in high precision in releases"
    restore_model(model)
    assert prepare_model(model, {"re:.*experts": "mxfp4a16"}).converted.keys() == report.converted.keys()
    restore_model(model)
    with pytest.raises(ValueError, match="'model.layers.0.self_attn.q_proj' is 'w4a16'.*'re:.*experts'"):
        prepare_model(model, {"re:.*experts": "mxfp4a16", "_default": "w4a16"})


def test_llama4s_experts_take_their_rows_of_all_tokens():
    model = tiny("llama4_text", num_local_experts=EXPERTS, intermediate_size=64, intermediate_size_mlp=64)
    layer = QuantizedExperts.from_experts(model.model.layers[0].feed_forward.experts, get_scheme("w8a16"))
    dense = copy.deepcopy(layer.restored())
    for name, weight in layer.quantized_weights.items():
        values = weight.low_bit_weight().dequantize().unflatten(0, (EXPERTS, -1)).mT
        setattr(dense, name, torch.nn.Parameter(values.contiguous()))
    x, ids, _ = route()
    rows = torch.zeros(EXPERTS, len(x), x.shape[1])
    rows[ids[:, 0], torch.arange(len(x))] = x.detach()
    ours, theirs = (rows.flatten(0, 1).clone().requires_grad_() for _ in range(2))
    y = layer(ours)
    torch.testing.assert_close(y, dense(theirs))
    grad = torch.randn_like(y)
    y.backward(grad)
    dense(theirs).backward(grad)
    chosen = ours.any(1)
    torch.testing.assert_close(ours.grad[chosen], theirs.grad[chosen])
    for name in layer.quantized_weights:
        torch.testing.assert_close(getattr(layer, name).grad, getattr(dense, name).grad)


SINGLE = "model.layers.0.mlp.experts.3.gate_proj"


@pytest.mark.parametrize("pattern", [SINGLE, "down_proj", "re:.*gate_proj", "model.layers.0.mlp.experts.down_proj"])
def test_patterns_that_split_the_experts_of_a_layer_are_refused(pattern):
    model = make_mixture()
    message = "not all parts"
    if pattern != "down_proj":
        with pytest.raises(ValueError, match=message):
            prepare_model(model, {pattern: "w8a8", "_default": "w4a16"})
    with pytest.raises(ValueError, match=message):
        prepare_model(model, "w4a16", exclude_modules=pattern.removeprefix("re:"))


def test_patterns_name_experts_as_a_whole():
    model = make_mixture()
    report = prepare_model(model, {"re:.*_proj": "w8a8"})
    assert {scheme.name for scheme in report.schemes.values()} == {"w8a8"} and len(report.num_experts) == 2
    restore_model(model)
    report = prepare_model(model, {"re:.*experts": "w4a16", "_default": "w8a8"})
    assert [report.schemes[name].name for name in report.num_experts] == ["w4a16", "w4a16"]
    restore_model(model)
    report = prepare_model(model, "w4a16", exclude_modules="experts")
    assert not report.num_experts and report.skipped["model.layers.0.mlp.experts"] == "exclude_modules"
    restore_model(model)
    with pytest.raises(ValueError, match="Experts of different layers have"):
        prepare_model(model, {"model.layers.0.mlp.experts": "w4a16", "_default": "w8a8"})


def test_other_layouts_are_left_alone_by_name_and_reason():
    ranks = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    with torch.device("meta"):
        model = tiny("longcat_flash", num_layers=1, n_routed_experts=4, **dict.fromkeys(ranks, 32))
    [reason] = [why for name, why in prepare_model(model, "w8a8").skipped.items() if name.endswith("experts")]
    assert re.match("LongcatFlashExperts: .*interface", reason)


def test_experts_of_an_unknown_form_are_refused(mixtures):
    experts = copy.deepcopy(experts_of(mixtures["qwen3_moe"])[0])
    assert problem_of_experts(experts) is None
    for change, reason in (({"has_bias": True}, "biases"), ({"has_gate": False}, "not up_proj and down_proj")):
        changed = copy.deepcopy(experts)
        vars(changed).update(change)
        with pytest.raises(TypeError, match=reason):
            QuantizedExperts.from_experts(changed, get_scheme("w4a16"))
    experts.num_experts = 7
    assert "do not fit 7 experts" in problem_of_experts(experts)
    own = type("Own", (type(experts),), {"_apply_gate": lambda self, gate_up: gate_up})
    assert "its own activation" in problem_of_experts(own(mixtures["qwen3_moe"].config))
