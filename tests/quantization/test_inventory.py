"""The layers of a model, found once, and the walk over its weights."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from testing_utils.layers import tiny
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.names import base_model, base_modules, base_state_dict, is_adapted, layer_of
from trl_qarl.quantization.precisions import set_precision
from trl_qarl.quantization.swap import QaRLWeightConfig, freeze_model, prepare_model, quantized_layers, restore_model


@pytest.fixture(params=["qwen2", "gemma"])
def model(request):
    model = tiny(request.param)
    prepare_model(model, {"re:.*mlp.*": "w4a16", "_default": "w8a8"}, exclude_modules="o_proj")
    return model


def test_every_tensor_is_part_of_one_layer_in_the_order_of_the_checkpoint(model):
    layers = list(Inventory.of(model).walk())
    names = [name for layer in layers for name in layer.tensors]
    assert names == list(base_state_dict(model)) and len({layer.name for layer in layers}) == len(layers)
    assert [layer.name for layer in layers] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    ]
    first = layers[1]
    quantized = {name.removesuffix(".weight") for name in first.quantized}
    assert set(first.linears) - quantized == {"model.layers.0.self_attn.o_proj"}
    assert layers[-1].linears == {"lm_head": model.lm_head} and not layers[-1].quantized
    weights = {name: layer.quantized_weights["weight"] for name, layer in quantized_layers(model).items()}
    assert dict(Inventory.of(model).weights()) == weights


def test_masters_and_low_bit_weights_are_not_in_high_precision(model):
    masters = {f"{name}.weight" for name in quantized_layers(model)}
    rest = base_state_dict(model).keys() - masters
    for _ in range(2):
        assert {name for layer in Inventory.of(model).walk() for name in layer.in_high_precision} == rest
        freeze_model(model)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("0.weight", "0"), ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3"), ("weight", "weight")],
)
def test_a_layer_is_the_name_up_to_its_first_number(name, layer):
    assert layer_of(name) == layer


def test_a_module_that_was_replaced_is_noticed(model):
    first = Inventory.of(model)
    assert Inventory.of(model) is first
    restore_model(model)
    assert not Inventory.of(model).layers and first.layers
    quantize_(model, QaRLWeightConfig("w8a16"), filter_fn=lambda module, name: name.endswith("up_proj"))
    names = [f"model.layers.{layer}.mlp.up_proj" for layer in range(2)]
    assert [*Inventory.of(model).layers] == names
    model.set_submodule(names[0], nn.Identity())
    assert [*Inventory.of(model).layers] == names[1:]


def test_a_copy_of_a_model_has_an_inventory_of_its_own(model):
    theirs = Inventory.of(copy.deepcopy(model))
    assert theirs.layers.keys() == Inventory.of(model).layers.keys()
    assert theirs.model is not model and not set(theirs.layers.values()) & set(Inventory.of(model).layers.values())


def test_schemes_are_read_when_they_are_asked_for(model):
    inventory = Inventory.of(model)
    before = inventory.formats
    set_precision(inventory.layers, {name: layer.scheme for name, layer in inventory.layers.items()}, 3)
    changed = [name for name in before if inventory.formats[name] != before[name]]
    assert changed == [name for name, (scheme, _) in before.items() if scheme.name == "w4a16"]


@pytest.mark.parametrize("target_modules", ["all-linear", ["o_proj"]])
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapted_model_has_the_names_of_the_model_alone(tied, target_modules):
    peft = pytest.importorskip("peft")
    plain = tiny("qwen2", tie_word_embeddings=tied)
    adapted = peft.get_peft_model(
        tiny("qwen2", tie_word_embeddings=tied), peft.LoraConfig(target_modules=target_modules)
    )
    layers, expected = (
        [(layer.name, [*layer.tensors], [*layer.linears]) for layer in Inventory.of(model).walk()]
        for model in (adapted, plain)
    )
    assert layers == expected
    for model in (adapted, adapted.get_base_model()):
        assert [(name, type(m)) for name, m in base_modules(model)] == [(n, type(m)) for n, m in plain.named_modules()]
        theirs, ours = plain.state_dict(), base_state_dict(model)
        assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert is_adapted(model) and base_model(model) is adapted.get_base_model()
    assert not is_adapted(plain) and base_model(plain) is plain


def test_a_module_that_occurs_twice_is_named_once():
    layer = nn.Linear(2, 2)
    assert [name for name, _ in base_modules(nn.Sequential(layer, layer))] == ["", "0"]
