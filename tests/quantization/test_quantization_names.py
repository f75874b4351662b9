import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_config
from trl_qarl.quantization.names import base_model, base_modules, base_state_dict, is_adapted


peft = pytest.importorskip("peft")


def tiny(**overrides):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_tiny_config("qwen2", **overrides))


@pytest.mark.parametrize("target_modules", ["all-linear", ["o_proj"]])
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapted_model_has_the_names_of_the_model_alone(tied, target_modules):
    plain = tiny(tie_word_embeddings=tied)
    adapted = peft.get_peft_model(tiny(tie_word_embeddings=tied), peft.LoraConfig(target_modules=target_modules))
    for model in (adapted, adapted.get_base_model()):
        assert [(name, type(m)) for name, m in base_modules(model)] == [(n, type(m)) for n, m in plain.named_modules()]
        theirs, ours = plain.state_dict(), base_state_dict(model)
        assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert is_adapted(model) and base_model(model) is adapted.get_base_model()
    assert not is_adapted(plain) and base_model(plain) is plain


def test_a_module_that_occurs_twice_is_named_once():
    layer = torch.nn.Linear(2, 2)
    assert [name for name, _ in base_modules(torch.nn.Sequential(layer, layer))] == ["", "0"]
