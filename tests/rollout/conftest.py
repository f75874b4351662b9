import pytest


@pytest.fixture(scope="module", autouse=True)
def servers_compile_nothing():
    """vLLM's sampler is compiled in each process that has one, for seconds; what it computes stays the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        yield
