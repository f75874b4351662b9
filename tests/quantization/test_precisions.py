"""Masters at several precisions: grids that nest, the order of precisions, and what is refused."""

import math
import re

import pytest
import torch

from testing_utils.trainings import SIGNED
from trl_qarl.quantization.plan import get_plan
from trl_qarl.quantization.precisions import (
    at_bits,
    parse_precisions,
    plan_at_bits,
    precision_at,
    problems_of_precisions,
    set_precision,
)
from trl_qarl.quantization.schemes import SCHEMES, get_scheme
from trl_qarl.quantization.swap import prepare_model, quantized_layers
from trl_qarl.quantization.tensors import LowBitTensor
from trl_qarl.telemetry.codes import code_flip_rate


FOUR = SIGNED[4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_fewer_bits_are_powers_of_two(dtype):
    master = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    four = LowBitTensor.from_hp(master, get_scheme(FOUR, 32), dtype)
    for bits in (3, 2):
        coarse = LowBitTensor.from_hp(master, at_bits(four.scheme, bits), dtype)
        assert torch.equal(coarse.scale, four.scale * 2 ** (4 - bits))
        assert coarse.scheme.group_size == 32 and coarse.scheme.container == four.scheme.container
        codes = coarse.dequantize(torch.float64).view(64, 8, 32) / four.scale.double().unsqueeze(-1)
        # Each value of fewer bits is one that 4 bits have.
        assert set(codes.unique().tolist()) == set(range(-8, 8, 2 ** (4 - bits)))


def test_a_scheme_without_more_bits_or_a_nesting_grid_stays():
    assert at_bits(get_scheme(FOUR), 4) == get_scheme(FOUR)
    two = at_bits(get_scheme(FOUR), 2)
    assert at_bits(two, 3) == two
    for name in (n for n, s in SCHEMES.items() if not s.nests):
        assert at_bits(get_scheme(name), 2) == get_scheme(name)
    plan = plan_at_bits(get_plan({"re:.*mlp.*": FOUR, "_default": "w8a8"}, 32), 3)
    assert [(s.grid.num_bits, s.group_size) for s in plan.schemes] == [(3, 32), (8, None)]


def test_codes_of_another_grid_have_not_flipped():
    model = torch.nn.Sequential(torch.nn.Linear(64, 8, bias=False))
    schemes = prepare_model(model, get_scheme(FOUR, 32)).schemes
    (weight,) = model[0].quantized_weights.values()
    weight.low_bit_weight()
    set_precision(quantized_layers(model), schemes, 3)
    assert math.isnan(code_flip_rate([weight]))
    with torch.no_grad():
        model[0].weight.mul_(1.0)
    assert code_flip_rate([weight]) == 0.0


def test_layers_quantize_at_the_set_precision():
    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 64))
    report = prepare_model(model, {"0": FOUR, "1": "w8a16"}, scale_dtype=torch.bfloat16)
    layers = quantized_layers(model)
    before = {name: layer.low_bit_weight() for name, layer in layers.items()}
    assert set_precision(layers, report.schemes, 3) and not set_precision(layers, report.schemes, 3)
    low_bit = layers["0"].low_bit_weight()
    expected = LowBitTensor.from_hp(model[0].weight.detach(), at_bits(before["0"].scheme, 3), torch.bfloat16)
    assert torch.equal(low_bit, expected) and not torch.equal(low_bit.qdata, before["0"].qdata)
    assert layers["1"].low_bit_weight() is before["1"]
    assert set_precision(layers, report.schemes, None)
    assert torch.equal(layers["0"].low_bit_weight(), before["0"])


@pytest.mark.parametrize(
    ("precisions", "updates_per_batch", "expected"),
    [
        *((written, 4, {0: 4, 4: 3, 8: 4, 12: 3, 20: 3}) for written in ((4, 3), "[4, 3]")),
        *((written, 8, {0: 4, 59: 4, 60: 3, 1000: 3}) for written in ({"60": 3, "0": 4}, '{"0": 4, "60": 3}')),
    ],
    ids=str,
)
def test_a_list_cycles_and_a_mapping_schedules(precisions, updates_per_batch, expected):
    parsed = parse_precisions(precisions)
    assert {update: precision_at(parsed, update, updates_per_batch) for update in expected} == expected


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("4, 3", "is not JSON"),
        ("4", "neither a list of bits"),
        ([], "neither a list of bits"),
        ([True], "neither a list of bits"),
        ({60: 3}, "from update 0 on"),
        ({0: 4, -1: 3}, "from update 0 on"),
        ({0: 4, 60.9: 3}, "numbers of updates"),
        ({0: 4, 9: {}}, "neither a list of bits"),
    ],
)
def test_what_is_no_precision_is_refused(written, message):
    with pytest.raises(ValueError, match=message):
        parse_precisions(written)


@pytest.mark.parametrize(
    ("precisions", "scheme", "max_steps", "message"),
    [
        *(([4, 3], name, -1, "no scheme of fewer bits nests in it. Choose one of") for name in ("w4a8", "w4a8-int8")),
        ([8, 4], FOUR, -1, "has 8 bits, which no layer.*container.*Choose from \\[2, 3, 4\\]"),
        ({0: 4, 60: 3}, FOUR, 60, "max_steps=60"),
    ],
)
def test_precisions_that_cannot_be_are_named(precisions, scheme, max_steps, message):
    (problem,) = problems_of_precisions(precisions, get_plan(scheme), max_steps)
    assert re.search(message, problem)
