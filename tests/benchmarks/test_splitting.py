"""Outlier channels that are split: what stays, bit for bit, and what is refused."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_model
from trainings import SIGNED
from trl_qarl import get_scheme, prepare_model
from trl_qarl.quantization.swap import quantized_layers
from trl_qarl.quantization.tensors import LowBitTensor


split_outlier_channels = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/splitting.py"))[
    "split_outlier_channels"
]


@pytest.fixture
def model(tmp_path):
    return AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, "llama"), dtype=torch.float32)


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("has_ties", [False, True])
def test_codes_of_the_halves_sum_to_those_of_the_whole_at_its_scale(model, bits, has_ties):
    scheme = get_scheme(SIGNED[bits], 32)
    largest = 2 ** (bits - 1)
    before = {}
    for name, layer in model.named_modules():
        if name.endswith("down_proj"):
            if has_ties:
                # Multiples of half a step, with both signs of the largest.
                halves = torch.randint(-2 * largest, 2 * largest + 1, layer.weight.shape).float() / 2
                halves[:, ::32], halves[:, 1::32] = -largest, largest
                layer.weight.data = 0.37 * halves
            before[name] = layer.weight.detach().clone()
    size = model.config.intermediate_size
    count = split_outlier_channels(model, scheme, 0.1)
    assert count % 32 == 0 and model.config.intermediate_size == size + count
    for name, whole in before.items():
        low_bit = LowBitTensor.from_hp(whole, scheme, torch.float32)
        step = low_bit.scale.repeat_interleave(32, 1)
        weight = model.get_submodule(name).weight.detach()
        channels = whole.abs().amax(0).topk(count).indices
        step = torch.cat([step, step[:, channels]], 1)
        codes = (weight / step).round().clamp(-largest, largest - 1)
        summed = codes[:, :size].index_add(1, channels, codes[:, size:])
        assert torch.equal(summed, (low_bit.dequantize(torch.float32) / step[:, :size]).round())
        # No half of a split weight is near a tie.
        assert ((weight / step)[:, size:] - codes[:, size:]).abs().max() < 0.49995


def test_a_split_model_says_the_same_and_quantizes_repeated_rows_alike(model):
    ids = torch.randint(2, 30, (2, 8), generator=torch.Generator().manual_seed(0))
    before = model(ids).logits
    size = model.config.intermediate_size
    up = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    down = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    count = split_outlier_channels(model, get_scheme(SIGNED[3], 32), 0.05)
    assert count == 32
    torch.testing.assert_close(model(ids).logits, before, atol=1e-5, rtol=1e-5)
    channels = down.abs().amax(0).topk(count).indices
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, torch.cat([up, up[channels]]))
    prepare_model(model, get_scheme(SIGNED[3], 32))
    layers = quantized_layers(model)
    rows = layers["model.layers.0.mlp.up_proj"].low_bit_weight().dequantize(torch.float32)
    assert torch.equal(rows[size:], rows[channels])
    model(ids)


@pytest.mark.parametrize(
    ("name", "group_size", "share", "message"),
    [
        (SIGNED[4], 32, 0.0, "share=0.0 is not in"),
        (SIGNED[4], 32, 1.5, "share=1.5 is not in"),
        ("w8a8", None, 0.1, "Scheme 'w8a8' has no groups"),
        ("mxfp4a16", 32, 0.1, "Scheme 'mxfp4a16' has no groups"),
        ("w4a16-asym", 32, 0.1, "Scheme 'w4a16-asym' has no groups of integer codes without zero points"),
    ],
)
def test_what_cannot_be_split_is_refused(model, name, group_size, share, message):
    with pytest.raises(ValueError, match=message):
        split_outlier_channels(model, get_scheme(name, group_size), share)


def test_models_without_such_mlps_are_refused(model):
    scheme = get_scheme(SIGNED[4], 32)
    prepare_model(model, scheme)
    with pytest.raises(ValueError, match="has 0 MLPs"):
        split_outlier_channels(model, scheme, 0.1)
    other = nn.Module()
    other.config, other.mlp = model.config, nn.Module()
    for part, shape in {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}.items():
        setattr(other.mlp, part, nn.Linear(*shape))
    with pytest.raises(ValueError, match=r"1 MLPs .* with \[64\] channels beside"):
        split_outlier_channels(other, scheme, 0.1)
