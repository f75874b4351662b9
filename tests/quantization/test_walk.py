"""One walk over a model's weights, layer by layer."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_config
from trl_qarl.quantization.names import base_state_dict
from trl_qarl.quantization.swap import freeze_model, prepare_model, quantized_layers
from trl_qarl.quantization.walk import iter_layers, iter_quantized_weights, layer_of


@pytest.fixture(params=["qwen2", "gemma"])
def model(request):
    model = AutoModelForCausalLM.from_config(make_tiny_config(request.param))
    prepare_model(model, {"re:.*mlp.*": "w4a16", "_default": "w8a8"}, exclude_modules="o_proj")
    return model


def test_every_tensor_is_part_of_one_layer_in_the_order_of_the_checkpoint(model):
    layers = list(iter_layers(model))
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
    assert dict(iter_quantized_weights(model)) == weights


def test_masters_and_low_bit_weights_are_not_in_high_precision(model):
    masters = {f"{name}.weight" for name in quantized_layers(model)}
    rest = base_state_dict(model).keys() - masters
    for _ in range(2):
        assert {name for layer in iter_layers(model) for name in layer.in_high_precision} == rest
        freeze_model(model)


def test_an_adapter_is_not_walked_over_and_its_layers_go_by_their_own_names(model):
    peft = pytest.importorskip("peft")
    expected = [(layer.name, [*layer.tensors], [*layer.linears]) for layer in iter_layers(model)]
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    adapted = peft.get_peft_model(plain, config)
    assert [(layer.name, [*layer.tensors], [*layer.linears]) for layer in iter_layers(adapted)] == expected


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up_proj.weight_packed", "model.layers.3"),
        ("0.weight", "0"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("weight", "weight"),
    ],
)
def test_a_layer_is_the_name_up_to_its_first_number(name, layer):
    assert layer_of(name) == layer
