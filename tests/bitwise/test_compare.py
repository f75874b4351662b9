"""A release of vLLM is judged by what its layers compute on this CPU, not by its number; what differs is named."""

import pytest

from trl_qarl.bitwise import cpu as kernels


pytest.importorskip("vllm.v1.attention.backends.cpu_attn", exc_type=ImportError)

from vllm.model_executor.layers import utils
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(kernels.reason_not_to_call() is not None, reason=str(kernels.reason_not_to_call())),
]


@pytest.fixture
def judge(monkeypatch):
    """The judgement afresh, of a release whose number nobody knows."""
    monkeypatch.setattr(kernels, "vllm_version", lambda: "9.9.9")
    return kernels.reason_against.__wrapped__


def test_the_installed_release_is_accepted_whatever_it_is_called(judge):
    assert judge() is None


def test_an_unquantized_product_of_other_bits_is_named(judge, monkeypatch):
    multiply = kernels.PackedLinear.__call__
    monkeypatch.setattr(
        kernels.PackedLinear, "__call__", lambda self, x, bias: multiply(self, x, bias) * (1.01 if len(x) == 1 else 1)
    )
    assert "its product of unquantized weights differs from the learner's in" in judge()


@pytest.mark.skipif(not kernels.has_norms(), reason="without AVX512-BF16 vLLM's norms truncate and are not used")
def test_a_norm_of_other_bits_is_named(judge, monkeypatch):
    norm = kernels.rms_norm
    monkeypatch.setattr(kernels, "rms_norm", lambda x, *rest: norm(x, *rest) * (1.01 if x.dtype.itemsize == 4 else 1))
    assert "its norm differs from the learner's in" in judge()


def test_an_attention_of_other_bits_is_named(judge, monkeypatch):
    forward = CPUAttentionBackendImpl.forward

    def attend_otherwise(self, layer, query, *arguments):
        return forward(self, layer, query * 1.02, *arguments)

    monkeypatch.setattr(CPUAttentionBackendImpl, "forward", attend_otherwise)
    assert "its attention differs from the learner's in" in judge()


@pytest.mark.parametrize(
    ("place", "name", "reason"),
    [
        (utils, "dispatch_cpu_unquantized_gemm", "product of unquantized weights cannot be compared (AttributeError"),
        (CPUAttentionBackendImpl, "do_kv_cache_update", "attention cannot be compared (AttributeError"),
    ],
)
def test_what_a_release_has_moved_is_named(judge, monkeypatch, place, name, reason):
    monkeypatch.delattr(place, name)
    assert reason in judge()
