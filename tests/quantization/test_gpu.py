"""Products, training and rollouts on CUDA. None of this runs in CI, which has no GPU: `pytest -m gpu`."""

import pytest
import torch
from torch import nn

from testing_utils import logged, make_mixture, make_vllm_trainer, product_reference, relative_error
from testing_utils.trainings import QUANTIZED
from trl_qarl.quantization import experts
from trl_qarl.quantization.experts import QuantizedExperts
from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.schemes import get_scheme


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", QUANTIZED)
def test_value_and_every_gradient_equal_the_float64_reference(name, dtype, rows):
    torch.manual_seed(0)
    linear = nn.Linear(256, 96, device="cuda", dtype=dtype)
    layer = QuantizedLinear.from_linear(linear, get_scheme(name), torch.bfloat16)
    x = torch.randn(rows, 256, device="cuda", dtype=dtype, requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    # bf16 rounds results and operands to 2**-9 each; float32 products may run in TF32, which rounds to 2**-11.
    tolerance = 5e-3 if dtype is torch.bfloat16 else 1e-3
    computed = (y, x.grad, layer.weight.grad, layer.bias.grad)
    for actual, expected in zip(computed, product_reference(layer, x, grad), strict=True):
        assert relative_error(actual, expected) < tolerance


@pytest.mark.parametrize("name", QUANTIZED)
def test_low_bit_weights_are_those_of_the_cpu(name):
    torch.manual_seed(0)
    weight, scheme = torch.randn(96, 256), get_scheme(name)
    layers = [nn.Linear(256, 96, bias=False, device=device) for device in ("cpu", "cuda")]
    for layer in layers:
        layer.weight.data.copy_(weight)
    ours, theirs = (QuantizedLinear.from_linear(layer, scheme, torch.bfloat16).low_bit_weight() for layer in layers)
    assert torch.equal(ours.qdata.view(torch.uint8), theirs.qdata.cpu().view(torch.uint8))
    assert torch.equal(ours.scale, theirs.scale.cpu())


@pytest.mark.parametrize("name", ["w4a16", "w8a16"])
def test_grouped_experts_compute_what_they_do_one_by_one(name, monkeypatch):
    module = make_mixture().get_submodule("model.layers.1.mlp.experts").cuda()
    layer = QuantizedExperts.from_experts(module, get_scheme(name), torch.bfloat16)
    # Of 8 experts the last has no token, and one slot has no expert.
    ids = torch.stack([torch.randperm(7)[:2] for _ in range(200)]).cuda()
    ids[3, 1] = 8
    x, weights = torch.randn(200, 128, device="cuda", requires_grad=True), torch.rand(200, 2, device="cuda")
    masters = layer.gate_up_proj, layer.down_proj

    def value_and_gradients():
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x, ids, weights)
        return y, *torch.autograd.grad(y.float().square().sum(), (x, *masters))

    actual = value_and_gradients()
    assert layer.kernel_name.endswith("aten::_grouped_mm")
    assert not actual[2][-1].any() and not actual[3][-1].any()
    monkeypatch.setattr(experts, "is_grouping_faster", lambda *arguments: False)
    expected = value_and_gradients()
    assert layer.kernel_name.endswith("aten::linear")
    assert all(relative_error(a, b.double()) < 1e-2 for a, b in zip(actual, expected, strict=True))


# w4a8 needs Hopper.
@pytest.mark.vllm
@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8", "w4a8"])
def test_colocated_rollouts_follow_the_learner(tmp_path, scheme):
    if scheme == "w4a8" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    trainer = make_vllm_trainer(
        tmp_path, scheme=scheme, vllm_mode="colocate", use_cpu=False, bf16=True, vllm_gpu_memory_utilization=0.2
    )
    trainer.train()
    # A bf16 log-prob near 5.5, that of a random model of 260 tokens, is rounded by up to 0.016.
    assert max(logged(trainer, "mismatch/abs_logp_mean")) < 0.03
    assert logged(trainer, "rollout/weight_version") == [0, 2]
