import math

import pytest
import torch
from torch import nn

from trl_qarl.quantize import dequantize_weight
from trl_qarl.swap import prepare_model, quantized_layers
from trl_qarl.telemetry import code_flip_rate, mismatch_metrics, mismatch_sums, sqnr


def naive(old, sampling, mask):
    differences = [
        o - s
        for o_row, s_row, m_row in zip(old.tolist(), sampling.tolist(), mask.tolist(), strict=True)
        for o, s, m in zip(o_row, s_row, m_row, strict=True)
        if m and not math.isnan(s)
    ]
    n = len(differences)
    return {
        "mismatch/abs_logp_mean": sum(abs(d) for d in differences) / n,
        "mismatch/abs_logp_max": max(abs(d) for d in differences),
        "mismatch/k1": sum(-d for d in differences) / n,
        "mismatch/k3": sum(math.exp(d) - 1 - d for d in differences) / n,
    }


def case(seed):
    torch.manual_seed(seed)
    old, sampling = torch.randn(4, 6).double(), torch.randn(4, 6).double()
    mask = (torch.rand(4, 6) > 0.3).long()
    sampling[mask == 0] = float("nan")
    mask[0, 0], sampling[0, 0] = 1, float("nan")
    return old, sampling, mask


@pytest.mark.parametrize("seed", range(5))
def test_mismatch_metrics_equal_a_naive_loop(seed):
    old, sampling, mask = case(seed)
    metrics = mismatch_metrics(*mismatch_sums(old, sampling, mask), torch.tensor([1.0, 1.0, 2.0, 0.5]))
    for name, value in naive(old, sampling, mask).items():
        assert metrics[name] == pytest.approx(value, rel=1e-12)
    assert metrics["mismatch/unknown_tokens"] == (mask.bool() & sampling.isnan()).sum()
    assert metrics["mismatch/effective_sample_size"] == pytest.approx(4.5**2 / 6.25 / 4)
    assert (metrics["mismatch/weight_min"], metrics["mismatch/weight_max"]) == (0.5, 2.0)


def test_sums_over_a_split_batch_add_up():
    old, sampling, mask = case(0)
    whole, maximum = mismatch_sums(old, sampling, mask)
    parts = [mismatch_sums(old[i : i + 2], sampling[i : i + 2], mask[i : i + 2]) for i in (0, 2)]
    torch.testing.assert_close(sum(sums for sums, _ in parts), whole)
    assert max(m for _, m in parts) == maximum


def test_equal_log_probs_give_zero_mismatch():
    old, _, mask = case(0)
    metrics = mismatch_metrics(*mismatch_sums(old, old, mask), torch.ones(4))
    for name in ("abs_logp_mean", "abs_logp_max", "k1", "k3"):
        assert metrics[f"mismatch/{name}"] == 0
    assert metrics["mismatch/effective_sample_size"] == 1


def test_no_known_token_gives_no_mismatch_rather_than_nan():
    nothing = torch.zeros(2, 3)
    assert mismatch_metrics(*mismatch_sums(nothing, nothing, nothing), torch.ones(2)) == {"mismatch/unknown_tokens": 0}


def test_code_flip_rate_counts_the_last_update():
    net = nn.Sequential(nn.Linear(128, 32), nn.Linear(32, 32))
    prepare_model(net, "w8a8")
    layers = quantized_layers(net).values()
    assert math.isnan(code_flip_rate(layers))
    codes = net[0].low_bit_weight().qdata.clone()
    with torch.no_grad():
        net[0].weight[0] *= -1
    flipped = (net[0].low_bit_weight().qdata != codes).sum().item()
    with torch.no_grad():
        net[1].weight.add_(0)
    assert code_flip_rate(layers) == pytest.approx(flipped / (128 * 32 + 32 * 32)) and flipped > 100


def test_sqnr_in_decibel():
    net = nn.Sequential(nn.Linear(128, 32), nn.Linear(32, 32))
    prepare_model(net, "w4a16")
    layers = quantized_layers(net)
    signal = sum(layer.weight.detach().double().square().sum() for layer in layers.values())
    noise = sum(
        (layer.weight.detach().double() - dequantize_weight(layer.low_bit_weight(), torch.float64)).square().sum()
        for layer in layers.values()
    )
    assert sqnr(layers) == pytest.approx(10 * math.log10(signal / noise), rel=1e-5)
