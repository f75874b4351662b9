"""Engine numerics with vLLM's kernels, and with those in torch that take their place."""

import pytest

from testing_utils.learners import VLLM
from trl_qarl.bitwise import cpu as kernels
from trl_qarl.bitwise import low_bit


@pytest.fixture
def torch_kernels(monkeypatch):
    """No vLLM's kernels, as where it is not installed."""
    monkeypatch.setattr(kernels, "reason_against", lambda: "it is not installed")
    monkeypatch.setattr(low_bit, "reason_not_to_call", lambda: "it is not installed")


@pytest.fixture(params=[pytest.param("vllm", marks=VLLM), "torch"])
def arithmetic(request):
    if request.param == "torch":
        request.getfixturevalue("torch_kernels")
