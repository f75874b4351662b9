"""Every kernel of every scheme against the dequantized product in float64, over shapes and numbers of rows."""

import pytest
import torch
from torch import nn

from trl_qarl.quantization import gemm
from trl_qarl.quantization.gemm import int4_kernel_operands, low_bit_linear, uses_int4_kernel
from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.quantize import (
    LowBitWeight,
    dequantize_weight,
    product_weight,
    quantize_activation,
    quantize_weight,
)
from trl_qarl.quantization.schemes import SCHEMES, get_scheme


# Both sides of every threshold and block.
ROWS = [1, 2, 15, 16, 17, 32, 33, 64, 257]
OUT_FEATURES = [1, 5, 16, 33, 96]
IN_FEATURES = {
    "w4a16": [32, 64, 96, 160, 384],
    "w8a16": [4, 8, 12, 16, 20, 36, 48, 100, 132, 240],
    "w8a8": [1, 2, 3, 8, 15, 16, 31, 64, 100, 241],
    "fp8": [1, 3, 8, 15, 16, 31, 64, 100, 241],
    "w4a8": [128, 256, 384],
}
EXPANDED = {"float32": "expanded to float32 + aten::linear", "bfloat16": "expanded to bfloat16 + aten::linear"}
EXACT = "float32 product of INT8 codes (exact)"
FP8 = "emulated FP8: float32 product of E4M3 codes"
KERNELS = {
    ("w4a16", True): {"aten::_weight_int4pack_mm_for_cpu", *(f"INT4 {name}" for name in EXPANDED.values())},
    ("w4a16", False): {"aten::_weight_int4pack_mm_for_cpu", f"INT4 {EXPANDED['float32']}"},
    ("w8a16", True): {"aten::_weight_int8pack_mm", *(f"INT8 {name}" for name in EXPANDED.values())},
    ("w8a16", False): {"aten::_weight_int8pack_mm", f"INT8 {EXPANDED['float32']}"},
    ("w8a8", True): {"aten::_int_mm", EXACT},
    ("w8a8", False): {"aten::_int_mm", EXACT},
    ("fp8", True): {FP8},
    ("fp8", False): {FP8},
    ("w4a8", True): {FP8},
    ("w4a8", False): {FP8},
}
# Per term of a sum: bf16 rounds the weight, the sum and the sum with the bias (2**-9 each), and the operands of the backward
# products; float32 2**-24 times the square root of a few hundred terms.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 2**-20}


def make_layer(name, out_features, in_features, dtype):
    torch.manual_seed(0)
    return QuantizedLinear.from_linear(nn.Linear(in_features, out_features, dtype=dtype), get_scheme(name))


def assert_near(actual, a, b, tolerance, bias=0.0):
    """`actual` is `a @ b + bias` up to `tolerance` of the sum of the absolute terms."""
    magnitude = a.abs() @ b.abs() + abs(bias)
    assert ((actual.double() - (a @ b + bias)).abs() <= tolerance * magnitude).all()


@pytest.mark.parametrize("has_native_instructions", [True, False])
@pytest.mark.parametrize("name", IN_FEATURES)
def test_every_kernel_computes_the_dequantized_product_and_its_gradients(monkeypatch, name, has_native_instructions):
    monkeypatch.setattr(gemm, "_has_vnni", lambda: has_native_instructions)
    monkeypatch.setattr(gemm, "has_fast_bf16", lambda: has_native_instructions)
    kernels_run = set()
    for dtype, tolerance in TOLERANCE.items():
        for in_features in IN_FEATURES[name]:
            for out_features in OUT_FEATURES:
                layer = make_layer(name, out_features, in_features, dtype)
                weight = dequantize_weight(product_weight(layer.low_bit_weight(), layer.scheme), torch.float64)
                for rows in ROWS:
                    x = torch.randn(rows, in_features, dtype=dtype, requires_grad=True)
                    y = layer(x)
                    kernels_run.add(layer.kernel)
                    grad = torch.randn_like(y)
                    gradients = torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)
                    seen = x.detach().double()
                    if layer.scheme.activation_type is not None:
                        codes = LowBitWeight(*quantize_activation(x.detach(), layer.scheme))
                        seen = dequantize_weight(codes, torch.float64)
                    grad, bias = grad.double(), layer.bias.detach().double()
                    assert_near(y, seen, weight.t(), tolerance, bias)
                    assert_near(gradients[0], grad, weight, tolerance)
                    assert_near(gradients[1], grad.t(), seen, tolerance)
                    assert_near(gradients[2], grad.t(), torch.ones(rows, dtype=torch.float64), tolerance)
    assert kernels_run == KERNELS[name, has_native_instructions]


def test_the_grid_covers_every_scheme():
    assert set(IN_FEATURES) == {name for name, scheme in SCHEMES.items() if scheme.is_quantized}


@pytest.mark.parametrize("name", ["w4a16", "w8a16"])
@pytest.mark.parametrize("offset", [1, 8, 15])
def test_activations_may_begin_at_any_address(name, offset):
    layer = make_layer(name, 48, 64, torch.bfloat16)
    aligned = torch.randn(3, 64, dtype=torch.bfloat16)
    x = torch.empty(3 * 64 + offset, dtype=torch.bfloat16)[offset:].view(3, 64).copy_(aligned)
    assert x.data_ptr() % 32 != 0
    with torch.no_grad():
        assert torch.equal(layer(x), layer(aligned))
    assert "pack_mm" in layer.kernel


def test_int8_weights_at_an_unaligned_address_are_expanded():
    scheme = get_scheme("w8a16")
    aligned = quantize_weight(torch.randn(48, 64), scheme, torch.bfloat16)
    qdata = torch.empty(48 * 64 + 1, dtype=torch.int8)[1:].view(48, 64).copy_(aligned.qdata)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    y, _, name = low_bit_linear(x, LowBitWeight(qdata, aligned.scale), None, scheme)
    assert "expanded" in name
    assert_near(y, x.double(), dequantize_weight(aligned, torch.float64).t(), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("has_native_instructions", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["w4a16", "w8a16"])
def test_a_row_invariant_product_gives_a_row_the_same_bits_whatever_comes_with_it(
    monkeypatch, name, dtype, has_native_instructions
):
    monkeypatch.setattr(gemm, "has_fast_bf16", lambda: has_native_instructions)
    scheme = get_scheme(name)
    shapes = [(48, 64), (33, 96), (256, 2048), (100, 160)] + [(16, 100)] * (name == "w8a16")
    for out_features, in_features in shapes:
        torch.manual_seed(0)
        low_bit = quantize_weight(torch.randn(out_features, in_features), scheme, dtype)
        bias, x = torch.randn(out_features, dtype=dtype), torch.randn(200, in_features, dtype=dtype)
        results, names = {}, set()
        for rows in (1, 2, 16, 17, 33, 48, 49, 64, 200):
            operands = None
            if uses_int4_kernel(x[:rows], low_bit, scheme, row_invariant=True):
                operands = int4_kernel_operands(low_bit)
            y, _, kernel = low_bit_linear(x[-rows:], low_bit, bias, scheme, operands, row_invariant=True)
            results[rows] = y
            names.add(kernel)
        assert len(names) == 1, "one kernel for any number of rows"
        for rows, y in results.items():
            assert torch.equal(y, results[200][-rows:]), (out_features, in_features, rows, kernel)
