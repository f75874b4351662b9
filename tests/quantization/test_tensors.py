"""The low-bit weight as a tensor: what it computes, what it survives, what it refuses."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from testing_utils.trainings import QUANTIZED
from trl_qarl.quantization.formats.int4_packed import kernel_operands
from trl_qarl.quantization.gemm import low_bit_linear
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.tensors import LowBitTensor, straight_through_linear


def make(name="w4a16", dtype=torch.float32, scale_dtype=torch.bfloat16):
    torch.manual_seed(0)
    return LowBitTensor.from_hp(torch.randn(96, 256, dtype=dtype), get_scheme(name), scale_dtype)


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", QUANTIZED)
def test_linear_is_our_product_with_gradients_to_input_and_bias(name, dtype, rows):
    weight, bias = make(name), torch.randn(96, dtype=dtype, requires_grad=True)
    x = torch.randn(rows, 256, dtype=dtype, requires_grad=True)
    y = F.linear(x, weight, bias)
    with torch.no_grad():
        assert torch.equal(y, low_bit_linear(x, weight, bias)[0]) and torch.equal(F.linear(x, weight, bias), y)
    grad = torch.randn_like(y)
    y.backward(grad)
    dense = weight.gemm_weight().dequantize(torch.float64)
    tolerance = 5e-3 if dtype is torch.bfloat16 else 1e-6
    for actual, expected in ((x.grad, grad.double() @ dense), (bias.grad, grad.double().sum(0))):
        assert (actual.double() - expected).norm() <= tolerance * expected.norm()


def test_what_the_engine_multiplies_by_is_computed_once():
    for name in QUANTIZED:
        weight = make(name)
        assert (weight.gemm_weight() is weight) == (name != "w4a8")
        assert weight.gemm_weight() is weight.gemm_weight()


def test_a_weight_that_asks_for_a_gradient_is_refused():
    weight = make().requires_grad_()
    with pytest.raises(RuntimeError, match="takes no gradient.*prepare_model"):
        F.linear(torch.randn(4, 256), weight)
    with torch.no_grad():
        F.linear(torch.randn(4, 256), weight)


@pytest.mark.parametrize(
    "operation",
    [
        lambda weight: weight + 1,
        lambda weight: weight.t(),
        lambda weight: weight.mul_(2),
        lambda weight: weight.view(-1),
        lambda weight: weight.to(torch.int8),
        lambda weight: weight.copy_(make("w8a16")),
        lambda weight: torch.zeros(96, 256).copy_(weight),
        lambda weight: F.linear(weight, torch.randn(4, 256)),
        lambda weight: F.linear(weight, weight),
    ],
)
def test_what_has_no_meaning_raises(operation):
    with pytest.raises((NotImplementedError, RuntimeError, TypeError, ValueError)):
        operation(make())


@pytest.mark.parametrize("name", QUANTIZED)
def test_saved_pickled_copied_and_detached_it_is_the_same(name):
    weight = make(name, torch.bfloat16)
    with torch.no_grad():
        x = torch.randn(4, 256, dtype=torch.bfloat16)
        y = F.linear(x, weight)
    file = io.BytesIO()
    torch.save({"weight": weight}, file)
    assert file.tell() < sum(part.nbytes for part in weight.parts()) + 5000, "operands of kernels are not saved"
    file.seek(0)
    for other in (
        torch.load(file, weights_only=True)["weight"],
        # PyTorch cannot unpickle FP8 outside of `torch.load`, plain tensors neither.
        weight if name in ("fp8", "nvfp4a16") else pickle.loads(pickle.dumps(weight)),
        copy.deepcopy(weight),
        weight.detach(),
        weight.clone(),
        nn.Parameter(weight, requires_grad=False),
    ):
        assert isinstance(other, LowBitTensor) and torch.equal(other, weight)
        with torch.no_grad():
            assert torch.equal(F.linear(x, other), y)


def test_another_dtype_changes_what_it_shows_and_no_code():
    weight = make("w4a16")
    other = weight.to(torch.float16)
    assert other.dtype is torch.float16 and other.dequantize().dtype is torch.float16
    assert torch.equal(other.qdata, weight.qdata) and torch.equal(other.scale, weight.scale)
    assert weight.to("cpu") is weight and weight.to("meta").qdata.device.type == "meta"


def test_copy_takes_codes_scales_and_no_old_operands():
    weight, x = make(dtype=torch.bfloat16), torch.randn(4, 256, dtype=torch.bfloat16)
    other = LowBitTensor.from_hp(torch.randn(96, 256, dtype=torch.bfloat16), get_scheme("w4a16"), torch.bfloat16)
    with torch.no_grad():
        F.linear(x, weight)
        assert kernel_operands in weight._kept
        assert weight.copy_(other) is weight and torch.equal(weight, other)
        assert torch.equal(F.linear(x, weight), F.linear(x, other))


@pytest.mark.parametrize("name", QUANTIZED)
def test_equal_means_the_same_codes_and_scales(name):
    weight, other = make(name), make(name)
    assert torch.equal(weight, other) and weight.equal(other) and torch.equal(nn.Parameter(weight, False), other)
    for place in range(len(weight.parts())):
        changed = make(name)
        changed.parts()[place].view(torch.uint8)[3] ^= 1
        assert not torch.equal(weight, changed)
    dense = weight.dequantize()
    assert torch.equal(weight, dense) and torch.equal(dense, weight)
    dense[5, 7] += 1e-3
    assert not torch.equal(weight, dense) and not torch.equal(dense, weight)
    assert not torch.equal(weight, weight.to(torch.bfloat16))
    assert not torch.equal(weight, make("w8a16" if name == "w8a8" else "w8a8"))


def test_gathered_experts_keep_nothing():
    whole = make("w4a8", scale_dtype=torch.float32)
    gathered = LowBitTensor(whole.qdata, whole.scale, whole.scheme, whole.dtype, torch.Size((3, 32, 256)))
    experts, x = nn.Parameter(gathered), torch.randn(4, 256)
    blocks = experts.row_blocks(3)
    second = LowBitTensor(whole.qdata[32:64], whole.scale[32:64], whole.scheme, whole.dtype)
    master = nn.Parameter(torch.zeros(32, 256))
    ours = straight_through_linear(x, blocks[1], None, experts.unbind()[1])
    theirs = straight_through_linear(x, second, None, master)
    (ours.sum() + theirs.sum()).backward()
    assert torch.equal(ours, theirs) and torch.equal(experts.grad[1], master.grad) and master.grad.any()
    assert experts.grad.shape == (3, 32, 256) and not experts.grad[[0, 2]].any()
    # What kernels make of codes would stay when FSDP2 frees them.
    assert not any(block._kept for block in (experts, *blocks))
    assert LowBitTensor(whole.qdata[:0], whole.scale[:0], whole.scheme, whole.dtype).row_blocks(0) == ()
