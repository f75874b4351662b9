"""The trainer's requests to a server that fails in every way a server can."""

import threading
import time
from types import SimpleNamespace

import pytest
import requests

from testing_utils.failing_server import make_server
from testing_utils.pictures import draw
from trl_qarl.engines import client as client_module
from trl_qarl.engines import http_session
from trl_qarl.engines.client import QaRLClient
from trl_qarl.engines.http_session import CheckedSession, ServerLost, check_finished, error_text
from trl_qarl.engines.server_process import free_port
from trl_qarl.wire.protocol import PublishError


@pytest.fixture
def server():
    server = make_server()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def make_client(url):
    client = QaRLClient.__new__(QaRLClient)
    client.session, client.base_url, client.model = CheckedSession(), url, "model"
    return client


REQUESTS = {
    "/weight_info": lambda client: client.weight_version(),
    "/qarl/state": lambda client: client._get(f"{client.base_url}/qarl/state"),
    "/get_world_size": lambda client: client.get_world_size(),
    "/server_info": lambda client: client.get_server_info(),
    "/v1/completions": lambda client: client.generate([[1, 2]]),
    "/inference/v1/generate": lambda client: client.generate([[1]], [[draw(1)]]),
    "/init_weight_transfer_engine": lambda client: client._post(f"{client.base_url}/init_weight_transfer_engine"),
    "/pause": lambda client: client.control("/pause?mode=abort"),
    "/collective_rpc": lambda client: client.call_workers("qarl_begin"),
    "/update_weights": lambda client: client.control("/update_weights", {"update_info": {"file": "x"}}),
    "/finish_weight_update": lambda client: client.control("/finish_weight_update"),
    "/reset_prefix_cache": lambda client: client.control("/reset_prefix_cache"),
}
CONTROL = ("/pause", "/collective_rpc", "/update_weights", "/finish_weight_update", "/reset_prefix_cache")


@pytest.mark.vllm
@pytest.mark.parametrize("status", [404, 302])
def test_a_server_that_stays_away_is_named_with_the_reason(server, status):
    server.failure = status
    with pytest.raises(ConnectionError, match=f"No vLLM server answers at {server.url} .*status {status}"):
        QaRLClient(server.url)
    client = make_client(server.url)
    client._held = client.instance = None
    with pytest.raises(ServerLost, match=f"No vLLM server at {server.url} after 0 s: .*status {status}"):
        client.reconnect(0.0)


@pytest.mark.parametrize("failure", ["refuse", "hang", "reset", "garbage", 500, 400, 404, 409, 503])
@pytest.mark.parametrize("path", REQUESTS)
def test_every_failed_request_is_a_lost_server_or_publication(server, monkeypatch, path, failure):
    """Both are recovered from; any other error would end the training, and a request without an end would hold it."""
    monkeypatch.setattr(http_session, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(http_session, "GENERATION_SECONDS", 0.6)
    url = f"http://127.0.0.1:{free_port()}" if failure == "refuse" else server.url
    client, server.failure = make_client(url), failure
    if failure == "garbage" and path in {"/server_info", *CONTROL} - {"/collective_rpc"}:
        pytest.skip("the client does not read the answer")
    # A session that belongs to somebody else is no refusal.
    is_refused = path in CONTROL and isinstance(failure, int) and failure != 409
    start = time.monotonic()
    with pytest.raises(PublishError if is_refused else (ServerLost, RuntimeError), match=path) as caught:
        REQUESTS[path](client)
    assert isinstance(caught.value, (ServerLost, PublishError))
    assert time.monotonic() - start < 5
    if failure == 500:
        assert "status 500: EngineCore encountered" in str(caught.value)
    if failure == "hang":
        is_generating = path in ("/v1/completions", "/inference/v1/generate")
        assert f"within {0.6 if is_generating else 0.3} s" in str(caught.value)
        assert ("shorter completions" in str(caught.value)) is is_generating


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b'{"error": "no"}', "no"),
        (b'["no"]', '["no"]'),
        (b"<p>no</p>\n", "<p>no</p>"),
    ],
)
def test_the_error_in_an_answer_is_read_whatever_the_answer_is(content, text):
    response = requests.Response()
    response._content = content
    assert error_text(response) == text


def test_completions_that_were_cut_short_are_a_lost_server():
    """As `/pause?mode=abort` leaves them, with status 200."""
    answer = {"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}, {"finish_reason": "length"}]}
    with pytest.raises(ServerLost, match="^URL cut 1 of 3 completions short"):
        check_finished("URL", answer)
    for other in ({"choices": answer["choices"][::2]}, {"choices": None}, {"choices": [7]}, [1], None):
        assert check_finished("URL", other) is other


@pytest.mark.parametrize("logprobs", [0, None])
def test_a_placeholder_in_a_completion_of_text_is_drawn_again(logprobs):
    """Four completions of two prompts, of which the second and the third have one, the latter twice."""
    bodies, drawn = [], iter([[4], [5, 7], [7], [6], [5, 8], [7, 1], [9]])

    def choice(tokens):
        scores = {"tokens": [f"token_id:{t}" for t in tokens], "token_logprobs": [-0.5] * len(tokens)}
        scores["top_logprobs"] = [{}] * len(tokens)
        return {"token_ids": tokens, "prompt_token_ids": [1], "logprobs": None if logprobs is None else scores}

    def post(url, json):
        bodies.append(json)
        choices = [choice(next(drawn)) for _ in range(len(json["prompt"]) * json["n"])]
        return SimpleNamespace(json=lambda: {"choices": choices})

    client = make_client("http://server")
    client.session, client.placeholders = SimpleNamespace(post=post), frozenset([7])
    answer = client.generate([[1], [2]], None, 2, logprobs=logprobs, generation_kwargs={"seed": 3})
    assert answer["completion_ids"] == [[4], [5, 8], [9], [6]] and len(answer["prompt_ids"]) == 2
    tokens = [[[token] for token in row] for row in answer["completion_ids"]]
    assert answer["logprob_token_ids"] == (None if logprobs is None else tokens)
    asked = [(body["prompt"], body["n"], body["seed"]) for body in bodies]
    assert asked == [([[1], [2]], 2, 3), ([[1], [2]], 1, None), ([[2]], 1, None)]


@pytest.mark.vllm
def test_connecting_to_a_server_that_never_answers_ends(server, monkeypatch):
    monkeypatch.setattr(client_module, "_HEALTH_SECONDS", 0.2)
    server.failure, start = "hang", time.monotonic()
    with pytest.raises(ConnectionError, match="No vLLM server answers at .*within 0.2 s.*Start one with `start it`"):
        QaRLClient(server.url, connection_timeout=0.5, start_command="start it")
    assert time.monotonic() - start < 5


@pytest.mark.vllm
@pytest.mark.timeout(30)
@pytest.mark.parametrize("failure", ["drip", "drip later"])
def test_a_handshake_that_arrives_byte_by_byte_ends(server, monkeypatch, failure):
    """Whoever has taken the server's port has proved nothing yet."""
    monkeypatch.setattr(client_module, "_HANDSHAKE_SECONDS", 0.5)
    server.failure, start = failure, time.monotonic()
    with pytest.raises(ConnectionError, match="did not end its answer within 0.5 s.*ss -ltnp"):
        QaRLClient(server.url, connection_timeout=0.5, token="7" * 64)
    assert time.monotonic() - start < 10


def test_a_session_that_breaks_off_at_once_is_a_lost_server(server):
    client, server.failure = make_client(server.url), "break off"
    client._held, client._token = None, "7" * 64
    with pytest.raises(ServerLost, match="/qarl/session"):
        client.open_session()


def test_a_server_of_this_machine_is_reached_past_the_proxies(server, monkeypatch):
    proxy = f"http://127.0.0.1:{free_port()}"
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert make_client(server.url).weight_version() == "7"
    assert make_client(server.url).is_healthy()
    # Another machine's is asked through them, and this one answers to no one.
    with pytest.raises(ServerLost, match=proxy.removeprefix("http://").partition(":")[2]):
        make_client("http://example.invalid").weight_version()
