"""Norms, rotary embeddings and convolutions of an engine on a CPU; hybrid families in the zoo have engines."""

import pytest
import torch
from torch import nn

from trl_qarl.bitwise import cpu, portable


pytest.importorskip("vllm.ir")

from vllm import ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

from trl_qarl.vllm_plugin.cpu_layers import register_convolutions, register_norms, register_rotations
from trl_qarl.wire.protocol import NORMS


pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not current_platform.is_cpu(), reason="layers on CPUs")]
needs_kernels = pytest.mark.skipif(cpu.reason_not_to_call() is not None, reason=str(cpu.reason_not_to_call()))
EPSILON = 1e-6


@pytest.fixture
def priority():
    register_norms()
    with ir.ops.rms_norm.set_priority([NORMS, "native"]), ir.ops.fused_add_rms_norm.set_priority([NORMS, "native"]):
        yield


@needs_kernels
@pytest.mark.parametrize("scale", [1e-5, 1.0, 3e4], ids="scale={}".format)
@pytest.mark.parametrize("size", [64, 576, 4096])
def test_the_learner_norms_as_the_engine_with_residuals(priority, size, scale):
    torch.manual_seed(0)
    x, stream = (scale * torch.randn(300, size)).bfloat16(), torch.randn(300, size).bfloat16()
    weight, total = torch.rand(size).bfloat16(), x.float() + stream.float()
    normed, rounded = ir.ops.fused_add_rms_norm.maybe_inplace(x.clone(), stream.clone(), weight, EPSILON)
    assert torch.equal(rounded, total.bfloat16())
    ours = cpu.rms_norm(total, weight, EPSILON)
    assert torch.equal(ours, normed)
    assert torch.equal(torch.cat([cpu.rms_norm(row, weight, EPSILON) for row in total.split(1)]), ours)
    exact = (total.double() * (total.double().square().mean(-1, keepdim=True) + EPSILON).rsqrt()) * weight.double()
    torch.testing.assert_close(ours.double(), exact, rtol=2**-7, atol=1e-9)


@needs_kernels
def test_a_kernel_that_truncates_is_not_used(monkeypatch):
    """As on processors without AVX512-BF16."""

    def add_and_truncate(x, residual, weight, epsilon):
        total = x.float() + residual.float()
        residual.copy_((total.view(torch.int32) & -(2**16)).view(torch.float32))

    monkeypatch.setattr(torch.ops._C, "fused_add_rms_norm", add_and_truncate)
    assert not cpu.has_norms.__wrapped__()


@needs_kernels
def test_norms_of_queries_are_those_of_a_slice(priority):
    torch.manual_seed(0)
    queries, weight = torch.randn(7, 4, 96).bfloat16()[..., :64], torch.rand(64).bfloat16()
    theirs = ir.ops.rms_norm(queries, weight, EPSILON)
    assert torch.equal(cpu.rms_norm(queries, weight, EPSILON), theirs)
    assert torch.equal(cpu.rms_norm(queries[3, 2], weight, EPSILON), theirs[3, 2])


@pytest.mark.parametrize(("size", "dtype"), [(64, torch.float32), (40, torch.bfloat16)], ids=str)
def test_other_norms_are_computed_by_torch_on_both_sides(priority, size, dtype):
    x, weight = torch.randn(5, size).to(dtype), torch.rand(size).to(dtype)
    theirs = ir.ops.rms_norm(x, weight, EPSILON)
    assert torch.equal(cpu.rms_norm(x, weight, EPSILON), theirs)
    assert torch.equal(portable.rms_norm(x, weight, EPSILON), theirs)


def test_heads_with_a_dimension_of_their_own_are_rotated():
    """As latent attention gives them: the last features of each head of the queries, and one head of the keys."""
    register_rotations()
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(32, 32, 64, 1e4, False, torch.float32)
    positions, queries, keys = torch.arange(5), torch.rand(5, 4, 96)[..., 64:], torch.rand(5, 1, 80)[..., 48:]
    wanted = rotary.forward_native(positions, queries.flatten(1), keys.flatten(1))
    for given, heads, rows in zip((queries, keys), rotary.forward_cpu(positions, queries, keys), wanted, strict=True):
        assert heads.shape == given.shape
        torch.testing.assert_close(heads.flatten(1), rows)


@pytest.mark.parametrize(
    ("dtype", "width", "is_marked", "is_packed"),
    [
        ("float32", 4, False, False),
        ("bfloat16", 3, False, False),
        ("bfloat16", 4, True, False),
        ("bfloat16", 4, False, True),
    ],
)
def test_weights_that_the_kernel_cannot_take_stay_as_loaded(monkeypatch, dtype, width, is_marked, is_packed):
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    register_convolutions()
    ours = utils.dispatch_cpu_unquantized_gemm
    register_convolutions()
    assert utils.dispatch_cpu_unquantized_gemm is ours
    layer = nn.Module()
    if is_marked:
        layer.is_read_as_loaded = True
    loaded = torch.randn(64, 1, width).to(getattr(torch, dtype))
    layer.weight = nn.Parameter(loaded.clone(), requires_grad=False)
    UnquantizedLinearMethod().process_weights_after_loading(layer)
    changed = layer.weight.shape != loaded.shape or not torch.equal(layer.weight, loaded)
    assert changed == (is_packed and torch.cpu._is_avx512_bf16_supported())
