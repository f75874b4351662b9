import pytest


@pytest.fixture(scope="module", autouse=True)
def servers_compile_nothing():
    """vLLM's sampler is compiled in each process that has one, for seconds; what it computes stays the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        yield


@pytest.fixture
def make_played_trainer(tmp_path, monkeypatch):
    """Makes trainers whose servers are objects."""
    from testing_utils.played_server import play_servers

    return play_servers(tmp_path, monkeypatch)
