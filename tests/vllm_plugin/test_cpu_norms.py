"""Norms of an engine on a CPU, and the learner's, by vLLM's kernels."""

import pytest
import torch

from trl_qarl.bitwise import cpu, portable


pytest.importorskip("vllm.ir")

from vllm import ir

from trl_qarl.vllm_plugin.cpu_norms import register_norms
from trl_qarl.wire.protocol import NORMS


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(cpu.reason_not_to_call() is not None, reason=str(cpu.reason_not_to_call())),
]
EPSILON = 1e-6


@pytest.fixture(autouse=True)
def priority():
    register_norms()
    with ir.ops.rms_norm.set_priority([NORMS, "native"]), ir.ops.fused_add_rms_norm.set_priority([NORMS, "native"]):
        yield


@pytest.mark.parametrize("scale", [1e-5, 1.0, 3e4], ids="scale={}".format)
@pytest.mark.parametrize("size", [64, 576, 4096])
def test_the_learner_norms_as_the_engine_with_residuals(size, scale):
    torch.manual_seed(0)
    x, stream, weight = (
        (scale * torch.randn(300, size)).bfloat16(),
        torch.randn(300, size).bfloat16(),
        torch.rand(size),
    )
    weight, total = weight.bfloat16(), x.float() + stream.float()
    normed, rounded = ir.ops.fused_add_rms_norm.maybe_inplace(x.clone(), stream.clone(), weight, EPSILON)
    assert torch.equal(rounded, total.bfloat16())
    ours = cpu.rms_norm(total, weight, EPSILON)
    assert torch.equal(ours, normed)
    assert torch.equal(torch.cat([cpu.rms_norm(row, weight, EPSILON) for row in total.split(1)]), ours)
    exact = (total.double() * (total.double().square().mean(-1, keepdim=True) + EPSILON).rsqrt()) * weight.double()
    torch.testing.assert_close(ours.double(), exact, rtol=2**-7, atol=1e-9)


def test_a_kernel_that_truncates_is_not_used(monkeypatch):
    """As on processors without AVX512-BF16."""

    def add_and_truncate(x, residual, weight, epsilon):
        total = x.float() + residual.float()
        residual.copy_((total.view(torch.int32) & -(2**16)).view(torch.float32))

    monkeypatch.setattr(torch.ops._C, "fused_add_rms_norm", add_and_truncate)
    assert not cpu.has_norms.__wrapped__()


def test_norms_of_queries_are_those_of_a_slice():
    torch.manual_seed(0)
    queries, weight = torch.randn(7, 4, 96).bfloat16()[..., :64], torch.rand(64).bfloat16()
    theirs = ir.ops.rms_norm(queries, weight, EPSILON)
    assert torch.equal(cpu.rms_norm(queries, weight, EPSILON), theirs)
    assert torch.equal(cpu.rms_norm(queries[3, 2], weight, EPSILON), theirs[3, 2])


@pytest.mark.parametrize(("size", "dtype"), [(64, torch.float32), (40, torch.bfloat16)], ids=str)
def test_other_norms_are_computed_by_torch_on_both_sides(size, dtype):
    x, weight = torch.randn(5, size).to(dtype), torch.rand(size).to(dtype)
    theirs = ir.ops.rms_norm(x, weight, EPSILON)
    assert torch.equal(cpu.rms_norm(x, weight, EPSILON), theirs)
    assert torch.equal(portable.rms_norm(x, weight, EPSILON), theirs)
