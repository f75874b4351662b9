from itertools import cycle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from testing_utils.layers import LAYERS, bits, tiny
from testing_utils.trainings import assert_equal
from trl_qarl.checkpoint.export import export_checkpoint
from trl_qarl.checkpoint.layout import iter_checkpoint_tensors, quantization_config
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.quantization.swap import (
    convert_model,
    disable_quantized_forward,
    prepare_model,
    quantized_forward,
    quantized_layers,
    restore_model,
)
from trl_qarl.quantization.tensors import LowBitTensor


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("tied", [True, False])
def test_only_attention_and_mlp_are_converted(arch, tied):
    model = tiny(arch, tie_word_embeddings=tied)
    before = {name: id(p) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    report = prepare_model(model, "w4a16")
    assert list(report.converted) == LAYERS and report.skipped == {"lm_head": "output head"}
    assert [name for name, m in model.named_modules() if isinstance(m, QuantizedLinear)] == LAYERS
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
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


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (lambda: nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)), "no nn.Linear"),
        (prepared, "restore_model"),
        (gptq, "quantized already.*gptq"),
        (lambda: nn.Linear(128, 128), r"model is itself a Linear.*nn.Sequential\(layer\)"),
    ],
    ids=["no linear layer", "prepared already", "quantized by another tool", "itself a layer"],
)
def test_models_that_cannot_be_prepared_are_refused(make_model, message):
    with pytest.raises(ValueError, match=message):
        prepare_model(make_model(), "w8a8")


def test_a_restored_model_is_the_untouched_one():
    model, tokens = tiny(), torch.randint(4, 200, (2, 8))
    with torch.no_grad():
        untouched = model(tokens).logits
        prepare_model(model, "w4a16")
        quantized = model(tokens).logits
        disable_quantized_forward(model)
        assert torch.equal(model(tokens).logits, untouched) and not torch.equal(quantized, untouched)
        with pytest.raises(RuntimeError, match="in the middle"), quantized_forward(model):
            assert torch.equal(model(tokens).logits, quantized)
            raise RuntimeError("in the middle")
        assert torch.equal(model(tokens).logits, untouched)
        restore_model(model)
        prepare_model(model, "w4a16")
        assert torch.equal(model(tokens).logits, quantized)
        assert restore_model(model) == len(LAYERS)
        assert torch.equal(model(tokens).logits, untouched)


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
    ("scheme", "dtype"),
    zip((name for name, s in SCHEMES.items() if s.is_quantized), cycle([torch.float32, torch.bfloat16]), strict=False),
)
def test_a_converted_model_equals_the_prepared_one(tmp_path, scheme, dtype):
    model, tokens = tiny("qwen2").to(dtype), torch.randint(4, 200, (2, 24))
    prepare_model(model, scheme)
    with torch.no_grad():
        expected = [model(tokens).logits, model(tokens[:, :3]).logits]
    published, config = bits(iter_checkpoint_tensors(model, dtype)), quantization_config(Inventory.of(model))
    export_checkpoint(model, tmp_path / "prepared")
    convert_model(model)
    assert not quantized_layers(model) and type(model.lm_head.weight) is nn.Parameter
    converted = [
        name for name, module in model.named_modules() if isinstance(getattr(module, "weight", None), LowBitTensor)
    ]
    assert converted == LAYERS and all(type(model.get_submodule(name)) is nn.Linear for name in LAYERS)
    for given, logits in zip((tokens, tokens[:, :3]), expected, strict=True):
        assert torch.equal(model(given).logits, logits)
        with torch.inference_mode():
            assert torch.equal(model(given).logits, logits)
    assert bits(iter_checkpoint_tensors(model, dtype)) == published
    assert quantization_config(Inventory.of(model)) == config
    export_checkpoint(model, tmp_path / "converted")
    steps = ("prepared", "converted")
    assert_equal(*(AutoModelForCausalLM.from_pretrained(tmp_path / step).state_dict() for step in steps))


def test_conversion_without_preparation_or_twice_is_refused():
    model = tiny()
    with pytest.raises(ValueError, match="no prepared layer.*prepare_model"):
        convert_model(model)
    prepare_model(model, "w4a16")
    convert_model(model)
    with pytest.raises(ValueError, match="converted already"):
        prepare_model(model, "w4a16")
