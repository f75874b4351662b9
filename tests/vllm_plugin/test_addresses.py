"""Tensors that a reload has put elsewhere, in a model that a CUDA graph would have captured."""

import functools
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn


addresses_module = pytest.importorskip("trl_qarl.vllm_plugin.addresses", reason="needs vLLM")
Addresses = addresses_module.Addresses
pytestmark = pytest.mark.vllm


@dataclass(frozen=True)
class Strides:
    """Tensors that a kernel keeps next to a layer's parameters."""

    values: tuple[torch.Tensor, ...]


class Kernel:
    def __init__(self, factor):
        self.strides = Strides((torch.arange(4) * factor, torch.full((1,), factor).expand(3)))
        scale = torch.ones(2) * factor
        self.multiply = lambda x: x * scale
        self.named = {"offset": functools.partial(torch.add, torch.zeros(2) + factor)}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("table", torch.zeros(2))
        self.kv_cache = torch.zeros(7)
        self.reload(1)

    def reload(self, factor):
        self.quant_method = SimpleNamespace(kernel=Kernel(factor), weights=[self.weight])


@pytest.fixture
def model():
    return nn.Sequential(Layer(), nn.Linear(2, 2))


def test_whatever_a_layer_refers_to_is_found_under_one_name(model):
    assert sorted(dict(addresses_module.reachable_tensors(model))) == [
        "0.quant_method.kernel.multiply.scale",
        "0.quant_method.kernel.named['offset'].args[0]",
        "0.quant_method.kernel.strides.values[0]",
        "0.quant_method.kernel.strides.values[1]",
        "0.quant_method.weights[0]",
        "0.table",
        "0.weight",
        "1.bias",
        "1.weight",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda layer: setattr(layer, "table", torch.zeros(3)),
            r"0\.table: float32\[2\] on cpu before, float32\[3\] on cpu now",
        ),
        (lambda layer: setattr(layer, "table", torch.zeros(2).double()), r"float32\[2\] on cpu before, float64\[2\]"),
        (lambda layer: vars(layer).pop("quant_method"), r"0\.quant_method\.kernel\..*: nothing refers to it any more"),
    ],
    ids=["shape", "dtype", "gone"],
)
def test_an_uncopied_tensor_names_layer_and_kernel(model, change, message):
    import vllm

    addresses = Addresses(model)
    change(model[0])
    problems = addresses.restore()
    assert problems
    pattern = rf"{message}.*CUDA graphs keep reading.*layer Layer, vLLM {vllm.__version__}.*enforce_eager=True"
    assert re.search(pattern, problems[0]), problems


def test_a_recreated_view_is_not_missed(model):
    model[0].rows = model[0].weight[1:]
    addresses = Addresses(model)
    del model[0].rows
    assert addresses.restore() == []


def test_a_tensor_that_took_the_place_of_two_is_copied_to_both(model):
    layer = model[0]
    layer.first, layer.second = torch.zeros(2), torch.zeros(2)
    captured = [layer.first.detach(), layer.second.detach()]
    addresses = Addresses(model)
    layer.first = layer.second = torch.ones(2)
    assert addresses.restore() == []
    assert [seen.tolist() for seen in captured] == [[1, 1], [1, 1]]
    assert layer.second.data_ptr() in [seen.data_ptr() for seen in captured]
