"""A backend that shards masters is one class: here each master is an attribute of an empty parameter."""

import pytest
import torch
from torch import nn

from testing_utils.layers import bits
from trl_qarl.checkpoint.layout import iter_checkpoint_tensors
from trl_qarl.quantization import storage
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.storage import Storage, is_sharded, num_elements, whole, writes_to
from trl_qarl.quantization.swap import prepare_model


class Elsewhere(Storage):
    is_whole = False

    def has(self, tensor):
        return hasattr(tensor, "elsewhere")

    def shape(self, tensor):
        return tensor.elsewhere.shape

    def local(self, tensor):
        return tensor.elsewhere

    def value(self, tensor):
        return tensor.elsewhere


def make():
    torch.manual_seed(0)
    return nn.ModuleDict({"q_proj": nn.Linear(256, 32), "norm": nn.LayerNorm(32), "k_proj": nn.Linear(64, 16)})


def moved(model):
    """`model` with every parameter elsewhere."""
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            empty = nn.Parameter(torch.empty(0))
            empty.elsewhere = parameter.detach()
            setattr(module, name, empty)
    return model


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(storage, "BACKENDS", [*storage.BACKENDS, Elsewhere()])


@pytest.mark.parametrize("scheme", ["w4a16", "nvfp4a16", "fp8"])
def test_another_backend_publishes_what_whole_masters_do(backend, scheme):
    ours, theirs = moved(make()), make()
    reports = [prepare_model(model, scheme, scale_dtype=torch.bfloat16) for model in (ours, theirs)]
    assert str(reports[0]) == str(reports[1]) and reports[0].master_bytes == reports[1].master_bytes > 0
    assert (is_sharded(ours), is_sharded(theirs)) == (True, False)
    assert num_elements(ours.parameters()) == num_elements(theirs.parameters()) > 0
    published, expected = (bits(iter_checkpoint_tensors(model, torch.bfloat16)) for model in (ours, theirs))
    assert [*published.items()] == [*expected.items()] and len(published) > 4


def test_a_write_to_the_part_makes_new_codes(backend):
    model = moved(make())
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    weight = dict(Inventory.of(model).weights())["q_proj"]
    before, written = weight.low_bit_weight(), writes_to(weight.parameter)
    assert weight.low_bit_weight() is before
    with torch.no_grad():
        weight.parameter.elsewhere.neg_()
    assert writes_to(weight.parameter) != written
    assert not torch.equal(weight.low_bit_weight(), before)
    assert torch.equal(weight.low_bit_weight(), weight.quantize(whole(weight.parameter)))
