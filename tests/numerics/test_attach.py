"""Engine numerics are put into a model, copied with it and taken out of it."""

import copy
import pickle

import pytest
import torch

from learners import make_adapted, make_model, make_sequences
from trl_qarl import convert_model, restore_model
from trl_qarl.numerics.attach import (
    attach_engine_numerics,
    detach_engine_numerics,
    engine_numerics,
    has_engine_numerics,
)
from trl_qarl.quantization.tensors import LowBitTensor


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@torch.no_grad()
def test_a_converted_model_computes_with_its_own_arithmetic_again(tmp_path, scheme):
    model = make_model(tmp_path, scheme=scheme)
    expected, ids = copy.deepcopy(model), torch.arange(4, 40)[None]
    attach_engine_numerics(model)
    assert not torch.equal(model(ids).logits.float(), expected(ids).logits)
    for change in (convert_model, restore_model):
        with pytest.raises(ValueError, match=r"detach_engine_numerics\(model\)` first"):
            change(model)
    assert has_engine_numerics(model) and model(ids).logits.dtype is torch.bfloat16
    detach_engine_numerics(model)
    assert convert_model(model) == convert_model(expected)
    assert torch.equal(model(ids).logits, expected(ids).logits)


def test_a_changed_master_is_packed_again(tmp_path):
    model = make_model(tmp_path, "llama")
    ids = torch.tensor([make_sequences()[1]])
    with engine_numerics(model), torch.no_grad():
        before = model(ids).logits
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
        after = model(ids).logits
    assert not torch.equal(before, after)


@torch.no_grad()
def test_detaching_restores_the_model(tmp_path):
    model = make_model(tmp_path, "qwen2", "w4a16")
    ids = torch.tensor([make_sequences()[1]])
    before, state, text = model(ids).logits, dict(vars(model.model.layers[0].self_attn)), repr(model)
    attach_engine_numerics(model)
    assert has_engine_numerics(model)
    assert not torch.equal(model(ids).logits, before)
    with pytest.raises(ValueError, match="attached"):
        attach_engine_numerics(model)
    detach_engine_numerics(model)
    assert not has_engine_numerics(model)
    assert torch.equal(model(ids).logits, before)
    assert vars(model.model.layers[0].self_attn).keys() == state.keys()
    assert repr(model).replace("kernel=None", "") != "" and type(model.lm_head) is torch.nn.Linear and text


@pytest.mark.parametrize("kind", ["all weights", "adapter", "merged"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_with_engine_numerics_has_its_own(tmp_path, kind, copied):
    if kind == "all weights":
        model = make_model(tmp_path, "qwen2", "w4a16")
    else:
        model = make_adapted(tmp_path, is_merged=kind == "merged")
    ids = torch.tensor([make_sequences()[1]])
    before = model(ids).logits
    attach_engine_numerics(model)
    expected = model(ids).logits
    other = copied(model)
    assert has_engine_numerics(other) and torch.equal(other(ids).logits, expected)
    with torch.no_grad():
        for parameter in other.parameters():
            if not isinstance(parameter, LowBitTensor):
                parameter.mul_(1.5)
    assert torch.equal(model(ids).logits, expected) and not torch.equal(other(ids).logits, expected)
    detach_engine_numerics(model)
    assert torch.equal(model(ids).logits, before) and has_engine_numerics(other)
    changed = other(ids).logits
    detach_engine_numerics(other)
    assert not has_engine_numerics(other) and not torch.equal(other(ids).logits.float(), changed.float())
