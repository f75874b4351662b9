import copy
import pickle
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear

from testing_utils.trainings import QUANTIZED
from trl_qarl.quantization import gemm, tensors
from trl_qarl.quantization.formats.int4_packed import kernel_operands
from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


def make(name="w4a16", dtype=torch.float32, bias=True, **kwargs):
    torch.manual_seed(0)
    return QuantizedLinear.from_linear(nn.Linear(256, 96, bias=bias, dtype=dtype), get_scheme(name), **kwargs)


@pytest.mark.parametrize("shape", [(4, 256), (0, 3, 256)])
@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_and_no_rows_give_finite_values_and_gradients(name, shape):
    layer = make(name)
    with torch.no_grad():
        layer.weight.zero_()
    x = torch.zeros(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 96) and torch.equal(y, layer.bias.expand_as(y))
    assert x.grad.shape == shape and torch.isfinite(x.grad).all()
    assert not layer.weight.grad.any() and (layer.bias.grad == shape[0]).all()


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_frozen_tensors_get_no_gradient_and_the_others_do(frozen):
    layer = make()
    tensors = {"weight": layer.weight, "bias": layer.bias, "input": torch.randn(8, 256, requires_grad=True)}
    tensors[frozen].requires_grad_(False)
    layer(tensors["input"]).sum().backward()
    assert [name for name, tensor in tensors.items() if tensor.grad is None] == [frozen]


def test_from_linear_keeps_parameters_hooks_and_state_dict_keys():
    linear, calls = nn.Linear(256, 96), []
    handle = linear.register_forward_hook(lambda *args: calls.append(1))
    weight, bias, keys = linear.weight, linear.bias, list(linear.state_dict())
    layer = QuantizedLinear.from_linear(linear.eval(), get_scheme("w4a16"))
    layer(torch.randn(2, 256))
    assert calls == [1] and not layer.training
    handle.remove()
    assert layer is not linear and layer.weight is weight and layer.bias is bias
    assert list(layer.state_dict()) == keys
    # Who holds the old module sees what becomes of the new one.
    layer.weight = nn.Parameter(torch.zeros(96, 256))
    assert linear.weight is layer.weight and type(linear) is nn.Linear
    restored = layer.restored()
    assert type(restored) is nn.Linear and restored.weight is layer.weight and restored.bias is bias
    assert vars(restored).keys() == vars(nn.Linear(2, 2)).keys()
    for each in (layer, restored):
        each(torch.randn(2, 256))
    assert calls == [1]


def test_quantizing_happens_once_per_optimizer_step(monkeypatch):
    layer, quantize = make(), Mock(wraps=tensors.quantize_weight)
    monkeypatch.setattr(tensors, "quantize_weight", quantize)
    optim = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(4):
            layer(torch.randn(8, 256)).sum().backward()
        with torch.no_grad():
            layer(torch.randn(8, 256))
        optim.step()
        optim.zero_grad()
    assert quantize.call_count == 3


def test_an_empty_step_keeps_the_low_bit_object():
    layer = make()
    optim = torch.optim.AdamW(layer.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    layer(torch.randn(8, 256)).sum().backward()
    low_bit = layer.low_bit_weight()
    optim.step()
    assert layer.low_bit_weight() is low_bit and layer.quantized_weights["weight"].num_flipped_codes == 0


def test_load_state_dict_invalidates_the_cache():
    layer, other = make(), make()
    with torch.no_grad():
        other.weight.mul_(3).add_(1)
    x = torch.randn(8, 256)
    layer(x)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))
    layer.load_state_dict({k: v * 2 for k, v in other.state_dict().items()}, assign=True)
    assert not torch.equal(layer(x), other(x))


# Freed memory is given out again: within fifty tries a new tensor lies where an old one was.
REUSES = 50


def held(layer):
    """The low-bit weight of the last forward."""
    [(low_bit, _)] = layer.quantized_weights["weight"]._kept.values()
    return low_bit


def test_functional_call_with_fresh_weights_is_never_stale():
    layer, x = make(bias=False), torch.eye(256)
    addresses = []
    for _ in range(REUSES):
        weight = torch.randn(96, 256)
        addresses.append(weight.data_ptr())
        y = torch.func.functional_call(layer, {"weight": weight}, (x,))
        low_bit = LowBitTensor.from_hp(weight, layer.scheme, layer.scale_dtype)
        assert torch.equal(y, low_bit.dequantize(torch.float32).t())
        del weight, low_bit
    assert len(set(addresses)) < REUSES, "no address was used twice: the test shows nothing"


def test_another_tensor_on_the_same_memory_is_never_stale():
    layer, storage = make(bias=False), torch.randn(97, 256)
    for weight in (storage[:96], storage[1:], storage[:96].mul(1), storage.view(-1)[: 96 * 256].view(256, 96).t()):
        alias = weight.data
        alias.mul_(1)  # one write is counted for each alias
        torch.func.functional_call(layer, {"weight": alias}, (torch.randn(1, 256),))
        assert torch.equal(held(layer), LowBitTensor.from_hp(alias, layer.scheme, layer.scale_dtype))
        alias.neg_()
        again = alias.data
        again.mul_(1)
        torch.func.functional_call(layer, {"weight": again}, (torch.randn(1, 256),))
        assert torch.equal(held(layer), LowBitTensor.from_hp(again, layer.scheme, layer.scale_dtype))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_compiled_layer_is_never_stale():
    layer, x = make(), torch.randn(4, 256)
    compiled = torch.compile(layer, backend="eager")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        y = compiled(x)
        assert torch.equal(y, layer(x))
        y.square().sum().backward()
        optimizer.step()
    layer.weight.data = torch.randn(96, 256)
    assert torch.equal(compiled(x), layer(x))


def test_weight_made_in_inference_mode_says_what_to_do():
    layer = make()
    with torch.inference_mode():
        layer.weight = nn.Parameter(torch.randn(96, 256))
    with pytest.raises(ValueError, match=r"inference_mode\(\)`.*Make or load the model outside of it"):
        layer(torch.randn(2, 256))
    with torch.inference_mode():
        linear = nn.Linear(256, 96)
    with pytest.raises(ValueError, match="inference_mode"):
        QuantizedLinear.from_linear(linear, get_scheme("w4a16"))


def test_write_through_data_needs_invalidate():
    layer = make()
    x = torch.randn(8, 256)
    before = layer(x)
    layer.weight.data.mul_(-1)
    assert torch.equal(layer(x), before), "PyTorch counts writes through .data now: `invalidate` may be dropped"
    layer.invalidate()
    assert not torch.equal(layer(x), before)


def test_cache_is_neither_in_the_state_dict_nor_in_a_pickle():
    layer, x = make(), torch.randn(2, 256)
    layer(x)
    assert held(layer) is not None
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not copied.quantized_weights["weight"]._kept and torch.equal(copied(x), layer(x))
    assert layer.state_dict().keys() == {"weight", "bias"}


def test_int4_kernel_copy_lives_through_a_rollout_only():
    layer = make(dtype=torch.bfloat16)
    with torch.inference_mode():
        layer(torch.randn(4, 256, dtype=torch.bfloat16))
        assert kernel_operands in held(layer)._kept
        layer(torch.randn(400, 256, dtype=torch.bfloat16))
        assert kernel_operands in held(layer)._kept, "scoring a prompt does not end the rollout"
    layer(torch.randn(400, 256, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None
    assert kernel_operands not in held(layer)._kept


@pytest.mark.parametrize("in_features", [64, 1024, 1536])
def test_int8_product_in_float32_blocks_is_exact(monkeypatch, in_features):
    monkeypatch.setattr(gemm, "_has_vnni", lambda: False)
    x = torch.randint(-128, 128, (300, in_features), dtype=torch.int8)
    w = torch.randint(-128, 128, (32, in_features), dtype=torch.int8)
    x[0], w[0] = -128, -128
    product, name = gemm._int8_matmul(x, w)
    assert "float32" in name
    assert torch.equal(product.long(), x.long() @ w.long().t())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2**-20), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)]
)
def test_fp8_kernel_rounds_to_the_dtype_asked_for_only(monkeypatch, dtype, tolerance):
    # The branch for CUDA; ATen's CPU `_scaled_mm` takes the same arguments.
    monkeypatch.setattr(gemm, "_has_fp8_kernel", lambda x, w: True)
    x, w = torch.randn(5, 64).to(torch.float8_e4m3fn), torch.randn(32, 64).to(torch.float8_e4m3fn)
    x_scale, w_scale = torch.rand(5, 1) + 0.5, torch.rand(32, 1) + 0.5
    product, name = gemm.low_bit_matmul(x, w, x_scale, w_scale, dtype)
    assert product.dtype is dtype and "_scaled_mm" in name
    expected = (x.double() @ w.double().t()) * x_scale * w_scale.t()
    magnitude = (x.double().abs() @ w.double().abs().t()) * x_scale * w_scale.t()
    assert ((product.double() - expected).abs() <= tolerance * magnitude).all()


@pytest.mark.parametrize("rows", [4, 300])
@pytest.mark.parametrize("has_native_instructions", [True, False])
@pytest.mark.parametrize("name", QUANTIZED)
def test_autocast_gives_the_same_bits_as_bf16_input(monkeypatch, name, has_native_instructions, rows):
    monkeypatch.setattr(gemm, "_has_vnni", lambda: has_native_instructions)
    monkeypatch.setattr(gemm, "has_fast_bf16", lambda: has_native_instructions)
    layer = make(name, scale_dtype=torch.bfloat16)
    x = torch.randn(rows, 256).bfloat16()
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x.float()), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_a_forward_that_writes_out_the_product_is_quantized(bias):
    written = FalconLinear(256, 96, bias=bias)
    plain = nn.Linear(256, 96, bias=bias)
    plain.load_state_dict(written.state_dict())
    layer, expected = (QuantizedLinear.from_linear(each, get_scheme("w4a16")) for each in (written, plain))
    x = torch.randn(4, 256)
    assert torch.equal(layer(x), expected(x))
    restored = layer.restored()
    assert type(restored) is FalconLinear and vars(restored).keys() == vars(written).keys()
    assert torch.equal(restored(x), written(x))
    # Its own forward has no product of low-bit weights.
    y, converted = layer(x), layer.convert()
    assert type(converted) is nn.Linear and torch.equal(converted(x), y)


class Custom(nn.Linear):
    pass


class Doubled(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + 2 * self.bias


class Activated(FalconLinear):
    def forward(self, x):
        return super().forward(x).relu()


def hooked():
    """A layer as accelerate leaves it that moves it between devices."""
    linear = nn.Linear(256, 96)
    linear.forward = linear.forward
    return linear


@pytest.mark.parametrize(
    ("make_linear", "scheme", "error", "message"),
    [
        (lambda: Custom(256, 96), "w4a16", TypeError, "Custom"),
        (lambda: Doubled(256, 96), "w4a16", TypeError, "Doubled"),
        (lambda: Activated(256, 96), "w4a16", TypeError, "Activated"),
        (lambda: nn.Linear(256, 96), "bf16", ValueError, "'bf16'"),
        (lambda: nn.Linear(0, 96), "w4a16", ValueError, r"no weights to quantize: shape \(96, 0\)"),
        (hooked, "w4a16", ValueError, "device_map=None"),
    ],
    ids=["subclass", "twice the bias", "activation", "nothing to quantize", "no weights", "hook"],
)
def test_what_cannot_be_a_quantized_layer_is_refused(make_linear, scheme, error, message):
    with pytest.raises(error, match=message):
        QuantizedLinear.from_linear(make_linear(), get_scheme(scheme))
