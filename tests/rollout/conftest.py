import pytest

from testing_utils import start_engines_quickly


@pytest.fixture(scope="module", autouse=True)
def servers_compile_nothing():
    """vLLM's sampler is compiled in each process that has one, for seconds; what it computes stays the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        yield


@pytest.fixture(scope="module")
def quick_engines():
    """Engines in this process start in a third of the time."""
    pytest.importorskip("vllm")
    with pytest.MonkeyPatch.context() as patch:
        start_engines_quickly(patch)
        yield
