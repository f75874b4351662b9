from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from testing_utils import make_mixture, relative_error
from testing_utils.layers import naive_experts, route
from trl_qarl.bitwise.low_bit import low_bit_linear
from trl_qarl.quantization import experts
from trl_qarl.quantization.experts import QuantizedExperts, gated, grouped_experts, is_grouping_faster
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


EXPERTS = 8


def make_layer(arch):
    module = make_mixture(arch).get_submodule("model.layers.1.mlp.experts")
    return QuantizedExperts.from_experts(module, get_scheme("w4a16"))


@pytest.fixture
def layer():
    return make_layer("qwen3_moe")


def gradients(y, layer, *inputs):
    torch.manual_seed(2)
    parameters = layer.parameters(recurse=False)
    return torch.autograd.grad(y, (*inputs, *parameters), torch.randn(y.shape).to(y.dtype))


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_value_and_every_gradient_equal_the_float64_loop(arch):
    layer, (x, ids, weights) = make_layer(arch), route()
    operands = map(layer._stacked_operand, layer.quantized_weights.values())
    y = grouped_experts(x, ids, weights, EXPERTS, *operands, layer._activation)
    expected, leaves = naive_experts(layer, x, ids, weights)
    assert relative_error(y, expected) < 1e-6
    torch.manual_seed(2)
    wanted = torch.autograd.grad(expected, leaves, torch.randn(y.shape).double())
    for actual, reference in zip(gradients(y, layer, x, weights), wanted, strict=True):
        assert relative_error(actual, reference) < 1e-6


def test_a_layer_equals_one_product_per_expert(layer, monkeypatch):
    """Under autocast, with operands that CUDA's kernel takes, whatever it leaves for an idle expert."""
    x, ids, weights = route()

    def checked(a, b, offs):
        product = torch._grouped_mm(a, b, offs=offs)
        assert a.dtype is b.dtype is torch.bfloat16 and offs.dtype is torch.int32
        torch._grouped_mm(*(t.to("meta") for t in (a, b)), offs=offs.to("meta"))
        if product.dim() == 3:
            product[-1] = torch.nan
        return product

    with torch.autocast("cpu", torch.bfloat16):
        one_by_one = layer(x, ids, weights)
        monkeypatch.setattr(experts, "is_grouping_faster", lambda *arguments: True)
        monkeypatch.setattr(experts.F, "grouped_mm", checked)
        together = layer(x, ids, weights)
    assert layer.kernel_name == "INT4 expanded to bfloat16 + aten::_grouped_mm"
    expected, actual = (gradients(y, layer, x, weights) for y in (one_by_one, together))
    # Both round what goes through the activation, and the output, to 8 bits; one may multiply in float32.
    assert relative_error(together, one_by_one.double()) < 1e-2
    assert all(relative_error(a, b.double()) < 1e-2 for a, b in zip(actual, expected, strict=True))
    for grad in actual[2:]:
        assert grad.dtype is torch.float32 and not grad[-1].any(), "an expert without tokens"


def test_engine_numerics_and_frozen_experts(layer, monkeypatch):
    x, ids, weights = route()
    monkeypatch.setattr(experts, "is_grouping_faster", lambda *arguments: True)
    y = layer(x, ids, weights)
    layer.product = low_bit_linear
    layer(x, ids, weights)
    assert "grouped" not in layer.kernel_name, "bits are those of one product per expert"
    layer.product = experts.low_bit_linear
    layer.freeze()
    frozen = layer(x, ids, weights)
    assert torch.equal(frozen, y) and "grouped" in layer.kernel_name
    assert torch.autograd.grad(frozen.sum(), x)[0].any()
    assert not layer(x, torch.full_like(ids, EXPERTS), weights).any()


def test_experts_that_fsdp_has_gathered_take_their_gradient(layer):
    x, ids, weights = route()
    plain = [(w.low_bit_weight(), w.parameter, None) for w in layer.quantized_weights.values()]
    gathered = []
    for low_bit, master, _ in plain:
        whole = LowBitTensor(low_bit.qdata, low_bit.scale, low_bit.scheme, torch.float32, master.shape)
        gathered.append((parameter := torch.nn.Parameter(whole), parameter, None))
    for operands in (plain, gathered):
        grouped_experts(x, ids, weights, EXPERTS, *operands, gated(F.silu)).sum().backward()
    for (_, master, _), (_, parameter, _) in zip(plain, gathered, strict=True):
        assert torch.equal(master.grad, parameter.grad) and master.grad.any()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scheme": get_scheme("w8a8")},
        {"device": "cpu"},
        {"dtype": torch.float32},
        {"capability": (7, 5)},
        {"sizes": (128, 36)},
        {"num_rows": 7},
    ],
    ids=str,
)
def test_where_experts_are_multiplied_one_by_one(monkeypatch, changes):
    given = {"num_rows": 8, "num_experts": 8, "sizes": (128, 64), "scheme": get_scheme("w4a16")} | changes
    x = SimpleNamespace(device=torch.device(given.pop("device", "cuda")), dtype=given.pop("dtype", torch.bfloat16))
    capability = given.pop("capability", (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert is_grouping_faster(x, **given) == (not changes)
