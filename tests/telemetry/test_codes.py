import math

import pytest
import torch
from torch import nn

from testing_utils import make_mixture
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.swap import prepare_model, quantized_layers
from trl_qarl.telemetry.codes import code_flip_rate, sampled_masters, sqnr, update_to_step


def test_code_flip_rate_counts_the_last_update():
    net = nn.Sequential(nn.Linear(128, 32), nn.Linear(32, 32))
    prepare_model(net, "w8a8")
    weights = [weight for _, weight in Inventory.of(net).weights()]
    assert math.isnan(code_flip_rate(weights))
    codes = net[0].low_bit_weight().qdata.clone()
    with torch.no_grad():
        net[0].weight[0] *= -1
    flipped = (net[0].low_bit_weight().qdata != codes).sum().item()
    with torch.no_grad():
        net[1].weight.add_(0)
    assert code_flip_rate(weights) == pytest.approx(flipped / (128 * 32 + 32 * 32)) and flipped > 100


def test_sqnr_of_each_family_of_layers():
    net = nn.ModuleDict(
        {f"layer{i}": nn.ModuleDict({"up": nn.Linear(128, 8), "down": nn.Linear(128, 8)}) for i in "ab"}
    )
    prepare_model(net, "w4a16")
    ratios = sqnr(Inventory.of(net).weights())
    assert set(ratios) == {"quant/sqnr", "quant/sqnr/up", "quant/sqnr/down"}
    ups = {name: layer for name, layer in Inventory.of(net).weights() if name.endswith("up")}
    assert len(ups) == 2 and sqnr(ups.items())["quant/sqnr"] == ratios["quant/sqnr/up"] != ratios["quant/sqnr/down"]


def test_sqnr_of_experts_is_that_of_all_of_them():
    model = make_mixture()
    prepare_model(model, "w4a16")
    signal = noise = 0.0
    for layer in model.model.layers:
        master = layer.mlp.experts.down_proj.detach().double()
        low_bit = layer.mlp.experts.quantized_weights["down_proj"].low_bit_weight().dequantize(torch.float32)
        signal += master.square().sum()
        noise += (master - low_bit.view_as(master)).square().sum()
    ratios = sqnr(Inventory.of(model).weights())
    assert ratios["quant/sqnr/down_proj"] == pytest.approx(10 * math.log10(signal / noise), rel=1e-5)
    assert ratios["quant/sqnr"] != ratios["quant/sqnr/gate_up_proj"] != ratios["quant/sqnr/down_proj"]


@pytest.mark.parametrize("scheme", ["w4a16", "w4a8", "w8a8", "w8a16", "fp8"])
def test_updates_are_measured_in_steps_of_the_grid(scheme):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 40), nn.Linear(128, 24))
    prepare_model(net, scheme)
    layers = quantized_layers(net)
    before = sampled_masters(Inventory.of(net).weights())
    assert [len(rows) for rows in before.values()] == [20, 24]
    old = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    with torch.no_grad():
        for layer in layers.values():
            layer.weight.add_(1e-4 * torch.randn_like(layer.weight))
    moved = []
    for name, layer in layers.items():
        scale = layer.low_bit_weight().scale.double().abs()
        step = scale.repeat_interleave(layer.in_features // scale.shape[1], 1)
        if scheme == "fp8":
            # Normal numbers have three bits after the point, below 2^-6 the distance stays.
            codes = layer.low_bit_weight().dequantize(torch.float32).double().abs() / step
            step = step * 2.0 ** (codes.log2().floor().clamp(min=-6) - 3)
        steps = (layer.weight.detach().double() - old[name].double()).abs() / step
        moved += steps[:: 2 if layer.out_features == 40 else 1].flatten().tolist()
    expected = sum(moved) / len(moved)
    assert update_to_step(before, Inventory.of(net).weights()) == pytest.approx(expected, rel=1e-3)


def test_update_of_nothing_is_zero_steps_and_no_layers_are_nan():
    net = nn.Sequential(nn.Linear(128, 32))
    prepare_model(net, "w4a16")
    assert update_to_step(sampled_masters(Inventory.of(net).weights()), Inventory.of(net).weights()) == 0
    assert math.isnan(update_to_step({}, []))
