"""Every kernel of every scheme against the dequantized product in float64, over shapes and numbers of rows."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_qarl.quantization import gemm
from trl_qarl.quantization.formats import int4_packed, int8
from trl_qarl.quantization.gemm import low_bit_linear
from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.quantize import dequantize_activation, quantize_activation
from trl_qarl.quantization.schemes import SCHEMES, get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


# Both sides of every threshold and block.
ROWS = [1, 2, 15, 16, 17, 32, 33, 64, 257]
OUT_FEATURES = [1, 5, 16, 33, 96]
IN_FEATURES = {
    "w4a16": [32, 64, 96, 160, 384],
    "w8a16": [4, 8, 12, 16, 20, 36, 48, 100, 132, 240],
    "mxfp4a16": [32, 96, 384],
    "nvfp4a16": [16, 48, 384],
    "w8a8": [1, 2, 3, 8, 15, 16, 31, 64, 100, 241],
    "fp8": [1, 3, 8, 15, 16, 31, 64, 100, 241],
    "w4a8": [128, 256, 384],
    "w4a8-int8": [32, 96, 384],
}
WEIGHTS = {name: "INT4" for name in IN_FEATURES if name.startswith("w4")}
WEIGHTS |= {"w8a16": "INT8", "mxfp4a16": "MXFP4", "nvfp4a16": "NVFP4", "fp8": "E4M3", "w4a8": "E4M3"}
PACKED = dict.fromkeys(("w4a16", "w4a8-int8"), "aten::_weight_int4pack_mm_for_cpu")
PACKED["w8a16"] = "aten::_weight_int8pack_mm"


def kernels_of(name, is_native):
    """Names of the kernels that run on a processor with instructions for bfloat16 and VNNI, or on one without."""
    if name == "w8a8":
        return {"float32 product of INT8 codes (exact)"} | ({"aten::_int_mm"} if is_native else set())
    dtypes = ("float32", "bfloat16") if is_native else ("float32",)
    expanded = {f"{WEIGHTS[name]} expanded to {dtype} + aten::linear" for dtype in dtypes}
    return expanded | ({PACKED[name]} if name in PACKED else set())


# Per term of a sum: bf16 rounds the weight, the sum and the sum with the bias (2**-9 each), and the operands of the
# backward products; where activations have codes, the sum times their scale too. float32 2**-24 times the square root
# of a few hundred terms.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 2**-20}


def make_layer(name, out_features, in_features, dtype):
    torch.manual_seed(0)
    return QuantizedLinear.from_linear(nn.Linear(in_features, out_features, dtype=dtype), get_scheme(name))


def assert_near(actual, a, b, tolerance, bias=0.0):
    """`actual` is `a @ b + bias` up to `tolerance` of the sum of the absolute terms."""
    magnitude = a.abs() @ b.abs() + abs(bias)
    assert ((actual.double() - (a @ b + bias)).abs() <= tolerance * magnitude).all()


@pytest.mark.parametrize("has_native_instructions", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", IN_FEATURES)
def test_kernels_compute_the_dequantized_product(monkeypatch, name, has_native_instructions):
    monkeypatch.setattr(gemm, "_has_vnni", lambda: has_native_instructions)
    monkeypatch.setattr(gemm, "has_fast_bf16", lambda: has_native_instructions)
    kernels_run = set()
    for dtype, tolerance in TOLERANCE.items():
        for in_features in IN_FEATURES[name]:
            for out_features in OUT_FEATURES:
                layer = make_layer(name, out_features, in_features, dtype)
                weight = layer.low_bit_weight().gemm_weight().dequantize(torch.float64)
                for rows in ROWS:
                    x = torch.randn(rows, in_features, dtype=dtype, requires_grad=True)
                    y = layer(x)
                    kernels_run.add(layer.kernel_name)
                    grad = torch.randn_like(y)
                    gradients = torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)
                    seen = x.detach().double()
                    if layer.scheme.activation is not None:
                        seen = dequantize_activation(*quantize_activation(x.detach(), layer.scheme), torch.float64)
                    grad, bias = grad.double(), layer.bias.detach().double()
                    # One rounding more, and what the four of them add to each other.
                    is_scaled = layer.scheme.activation is not None
                    assert_near(y, seen, weight.t(), tolerance * (1.5 if is_scaled else 1), bias)
                    assert_near(gradients[0], grad, weight, tolerance)
                    assert_near(gradients[1], grad.t(), seen, tolerance)
                    assert_near(gradients[2], grad.t(), torch.ones(rows, dtype=torch.float64), tolerance)
    assert kernels_run == kernels_of(name, has_native_instructions)


def test_the_grid_covers_every_product():
    covered = {(SCHEMES[name].container, SCHEMES[name].activation) for name in IN_FEATURES}
    assert covered == {(s.container, s.activation) for s in SCHEMES.values() if s.is_quantized}


@pytest.mark.parametrize("name", ["w4a16", "w8a16"])
@pytest.mark.parametrize("offset", [1, 8, 15])
def test_activations_may_begin_at_any_address(name, offset):
    layer = make_layer(name, 48, 64, torch.bfloat16)
    aligned = torch.randn(3, 64, dtype=torch.bfloat16)
    x = torch.empty(3 * 64 + offset, dtype=torch.bfloat16)[offset:].view(3, 64).copy_(aligned)
    assert x.data_ptr() % 32 != 0
    with torch.no_grad():
        assert torch.equal(layer(x), layer(aligned))
    assert "pack_mm" in layer.kernel_name


def test_int8_weights_at_an_unaligned_address_are_expanded():
    scheme = get_scheme("w8a16")
    aligned = LowBitTensor.from_hp(torch.randn(48, 64), scheme, torch.bfloat16)
    qdata = torch.empty(48 * 64 + 1, dtype=torch.int8)[1:].view(48, 64).copy_(aligned.qdata)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    y, _, name = low_bit_linear(x, LowBitTensor(qdata, aligned.scale, scheme, torch.float32), None)
    assert "expanded" in name
    assert_near(y, x.double(), aligned.dequantize(torch.float64).t(), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("has_native_instructions", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["w4a16", "mxfp4a16", "nvfp4a16", "w8a16", "fp8", "w4a8-int8"])
def test_the_row_invariant_product_is_row_invariant(monkeypatch, name, dtype, has_native_instructions):
    monkeypatch.setattr(gemm, "has_fast_bf16", lambda: has_native_instructions)
    scheme = get_scheme(name)
    shapes = [(48, 64), (33, 96), (256, 2048), (100, 160)] + [(16, 100)] * (name == "w8a16")
    for out_features, in_features in shapes:
        torch.manual_seed(0)
        low_bit = LowBitTensor.from_hp(torch.randn(out_features, in_features), scheme, dtype)
        bias, x = torch.randn(out_features, dtype=dtype), torch.randn(200, in_features, dtype=dtype)
        results, names = {}, set()
        for rows in (1, 2, 16, 17, 33, 48, 49, 64, 200):
            y, _, kernel = low_bit_linear(x[-rows:], low_bit, bias, row_invariant=True)
            results[rows] = y
            names.add(kernel)
        assert len(names) == 1, "one kernel for any number of rows"
        for rows, y in results.items():
            assert torch.equal(y, results[200][-rows:]), (out_features, in_features, rows, kernel)


@pytest.mark.parametrize("name", ["w4a16", "fp8", "w8a8", "w4a8"])
def test_decoding_expands_a_weight_once_and_training_drops_it(monkeypatch, name):
    monkeypatch.setattr(gemm, "_has_vnni", lambda: False)
    layer = make_layer(name, 48, 128, torch.float32)
    low_bit, calls, x = layer.low_bit_weight().gemm_weight(), [], torch.randn(gemm.COPY_MAX_ROWS, 128)
    unpack = type(low_bit.format).unpack
    monkeypatch.setattr(type(low_bit.format), "unpack", lambda *args: calls.append(args) or unpack(*args))
    with torch.no_grad():
        first, _, second = layer(x), layer(x[:1]), layer(x)
        assert torch.equal(first, second) and len(calls) == 1
        # A pass of many rows, as in scoring, uses the copy.
        layer(torch.cat([x, x]))
        assert len(calls) == 1
    layer(x).sum().backward()
    assert low_bit._kept == {}
    with torch.no_grad():
        layer(torch.cat([x, x]))
        assert low_bit._kept == {}
        memory = SimpleNamespace(available=2**20, total=2**24)
        monkeypatch.setattr(gemm.psutil, "virtual_memory", lambda: memory)
        assert torch.equal(layer(x), first) and low_bit._kept == {}


DOCUMENTED = re.findall(
    r"^\| (`w.*?`|`[mn][xv]fp4.*?`|`fp8`.*?) \| (.*?) \| (any|up to \d+|from \d+) \| .*? \| `(.*?)` \|$",
    (Path(__file__).parents[2] / "docs" / "schemes.md").read_text(),
    re.MULTILINE,
)


def test_the_documented_products_cover_every_scheme_and_kernel():
    assert {scheme for schemes, *_ in DOCUMENTED for scheme in re.findall(r"`([\w-]+)`", schemes)} == {*IN_FEATURES}
    kernels = {
        gemm.EXPANDED.format(weight=weight, dtype="bfloat16") for weight in ("INT4", "INT8", "E4M3", "MXFP4", "NVFP4")
    }
    kernels |= {int4_packed.KERNEL, int8.KERNEL, gemm.INT8_KERNEL, gemm.INT8_IN_FLOAT32}
    assert {name for *_, name in DOCUMENTED} == kernels | {gemm.FP8_KERNEL}


@pytest.mark.parametrize(("schemes", "device", "rows", "kernel"), DOCUMENTED)
def test_the_documented_products_are_what_runs(monkeypatch, schemes, device, rows, kernel):
    on_cuda = device.startswith("CUDA")
    if on_cuda and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    monkeypatch.setattr(gemm, "_has_vnni", lambda: "without VNNI" not in device)
    monkeypatch.setattr(gemm, "has_fast_bf16", lambda: True)
    bound = int(rows.split()[-1]) if rows != "any" else 1
    for name in re.findall(r"`([\w-]+)`", schemes):
        layer = make_layer(name, 96, 256, torch.bfloat16).to("cuda" if on_cuda else "cpu")
        for count in {"any": (1, 300), "up": (1, bound), "from": (bound, 300)}[rows.split()[0]]:
            layer(torch.randn(count, 256, dtype=torch.bfloat16, device=layer.weight.device))
            assert layer.kernel_name == kernel
        if rows != "any":
            layer(torch.randn(bound + 1 if rows.startswith("up") else bound - 1, 256, dtype=torch.bfloat16))
            assert layer.kernel_name != kernel
