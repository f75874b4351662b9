from itertools import cycle

import pytest
import torch
from torch import nn

from testing_utils.layers import LAYERS, bits, logits, tiny
from testing_utils.trainings import QUANTIZED
from trl_qarl.checkpoint.layout import iter_checkpoint_tensors, quantization_config
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.swap import (
    convert_model,
    disable_quantized_forward,
    prepare_model,
    quantized_forward,
    quantized_layers,
    restore_model,
)
from trl_qarl.quantization.tensors import LowBitTensor


@pytest.mark.parametrize(("arch", "tied"), [("llama", False), ("qwen2", True), ("qwen3", False), ("gemma", True)])
def test_only_attention_and_mlp_are_converted(arch, tied):
    model = tiny(arch, tie_word_embeddings=tied)
    before, keys = {name: id(p) for name, p in model.named_parameters()}, list(model.state_dict())
    report = prepare_model(model, "w4a16")
    assert list(report.converted) == LAYERS and report.skipped == {"lm_head": "output head"}
    assert [name for name, m in model.named_modules() if isinstance(m, QuantizedLinear)] == LAYERS
    assert {name: id(p) for name, p in model.named_parameters()} == before and list(model.state_dict()) == keys
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_an_indivisible_layer_is_named_and_none_converted():
    model = nn.Sequential(nn.Linear(128, 100), nn.Linear(100, 64))
    with pytest.raises(ValueError, match=r"Layer '1': in_features=100"):
        prepare_model(model, "w4a16")
    assert not quantized_layers(model)
    assert list(prepare_model(model, "w4a16", exclude_modules=["1"]).converted) == ["0"]


def gptq():
    model = tiny()
    model.config.quantization_config = {"quant_method": "gptq"}
    return model


def prepared():
    prepare_model(model := tiny(), "w4a16")
    return model


def converted():
    convert_model(model := prepared())
    return model


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (lambda: nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)), "no nn.Linear"),
        (prepared, "restore_model"),
        (converted, "converted already"),
        (gptq, "quantized already.*gptq"),
        (lambda: nn.Linear(128, 128), r"model is itself a Linear.*nn.Sequential\(layer\)"),
    ],
    ids=["no linear layer", "prepared", "converted", "quantized by another tool", "itself a layer"],
)
def test_models_that_cannot_be_prepared_are_refused(make_model, message):
    with pytest.raises(ValueError, match=message):
        prepare_model(make_model(), "w8a8")


def test_a_restored_model_is_the_untouched_one():
    model = tiny()
    untouched = logits(model)
    prepare_model(model, "w4a16")
    quantized = logits(model)
    disable_quantized_forward(model)
    assert torch.equal(logits(model), untouched) and not torch.equal(quantized, untouched)
    with pytest.raises(RuntimeError, match="in the middle"), quantized_forward(model):
        assert torch.equal(logits(model), quantized)
        raise RuntimeError("in the middle")
    assert torch.equal(logits(model), untouched)
    assert restore_model(model) == len(LAYERS)
    assert torch.equal(logits(model), untouched)
    prepare_model(model, "w4a16")
    assert torch.equal(logits(model), quantized)


class Shared(nn.Module):
    """One layer under three names, two of them in one parent."""

    def __init__(self):
        super().__init__()
        self.a = self.b = nn.Linear(128, 128)
        self.inner = nn.Sequential(self.a)

    def forward(self, x):
        return self.inner(self.b(self.a(x)))


def test_a_layer_under_several_names_stays_one_layer():
    model, x = Shared(), torch.randn(2, 128)
    before, weight = model(x), model.a.weight
    prepare_model(model, "w4a16")
    assert type(model.a) is QuantizedLinear and model.a is model.b is model.inner[0]
    assert model.a.weight is weight and list(model.state_dict()) == list(Shared().state_dict())
    y = model(x)
    assert restore_model(model) == 1 and model.a is model.b is model.inner[0]
    assert torch.equal(model(x), before) and not torch.equal(y, before)
    prepare_model(model, "w4a16")
    assert convert_model(model) == 1 and model.a is model.b is model.inner[0]
    assert torch.equal(model(x), y)


@pytest.mark.parametrize(
    ("scheme", "dtype"), [*zip(QUANTIZED, cycle([torch.float32, torch.bfloat16]), strict=False)], ids=str
)
def test_a_converted_model_equals_the_prepared_one(scheme, dtype):
    model, tokens = tiny("qwen2").to(dtype), torch.randint(4, 200, (2, 24))
    prepare_model(model, scheme)
    expected = logits(model, tokens), logits(model, tokens[:, :3])
    published, config = bits(iter_checkpoint_tensors(model, dtype)), quantization_config(Inventory.of(model))
    convert_model(model)
    assert not quantized_layers(model) and type(model.lm_head.weight) is nn.Parameter
    weights = {name: module.weight for name, module in model.named_modules() if type(module) is nn.Linear}
    assert [name for name, weight in weights.items() if isinstance(weight, LowBitTensor)] == LAYERS
    for given, theirs in zip((tokens, tokens[:, :3]), expected, strict=True):
        assert torch.equal(logits(model, given), theirs)
        with torch.inference_mode():
            assert torch.equal(model(given).logits, theirs)
    # Of which an export consists.
    assert bits(iter_checkpoint_tensors(model, dtype)) == published
    assert quantization_config(Inventory.of(model)) == config


def test_conversion_without_preparation_is_refused():
    with pytest.raises(ValueError, match="no prepared layer.*prepare_model"):
        convert_model(tiny())
