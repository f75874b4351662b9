"""Weights to a server over HTTP and HTTPS: the real gate and client, with a stand-in for the engine behind."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from testing_utils.trainings import assert_equal
from testing_utils.web_servers import WebServer, write_certificate
from trl_qarl.rollout.channels import FileChannel, HTTPChannel, NCCLChannel, choose_channel, sends_changes
from trl_qarl.rollout.http_session import CheckedSession, ServerLost
from trl_qarl.rollout.server import ServerEngine
from trl_qarl.vllm_plugin.gate import PublicationGate
from trl_qarl.wire.protocol import FILE_BACKEND, NCCL_BACKEND, UPLOAD_PATH, PublishError
from trl_qarl.wire.transfer_dir import make_transfer_dir


SECRET = "7" * 64
TENSORS = [("a.weight", torch.arange(100_000, dtype=torch.int32)), ("b.weight", torch.ones(7, dtype=torch.bfloat16))]


class Between:
    """A proxy between trainer and server: notes the size of each piece, refuses large bodies, and has hiccups."""

    def __init__(self, app):
        self.app, self.pieces, self.limit, self.hiccups = app, [], 10**9, []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == UPLOAD_PATH:
            size = int(dict(scope["headers"])[b"content-length"])
            self.pieces.append(size)
            status = 413 if size > self.limit else self.hiccups.pop(0) if self.hiccups else None
            if status is not None:
                await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
                return await send({"type": "http.response.body", "body": b"<html/>"})
        await self.app(scope, receive, send)


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Starts a server with the gate in a thread."""
    from faults.stand_in import Engine

    monkeypatch.setenv("TRL_QARL_TRANSFER_DIR", str(tmp_path / "transfer"))
    make_transfer_dir(tmp_path / "transfer")
    started = []

    def start(**options):
        transfer = json.dumps({"backend": FILE_BACKEND})
        engine = Engine(["--model", "m", "--dtype", "float32", "--weight-transfer-config", transfer])
        between = Between(PublicationGate(engine, SECRET))
        started.append(WebServer(between, **options))
        return SimpleNamespace(url=started[-1].url, engine=engine, between=between)

    yield start
    for server in started:
        server.stop()


def connect(server, **options):
    pytest.importorskip("vllm")
    from trl_qarl.rollout.client import QaRLClient

    return QaRLClient(server.url, connection_timeout=20, request_timeout=5, token=SECRET, **options)


def publish(channel, tensors=TENSORS):
    engine = ServerEngine(channel.client, channel)
    engine.begin()
    engine.send(tensors)
    engine.finish({name: "x" for name, _ in tensors}, "1")


def arrived(server, tmp_path, monkeypatch, transport):
    """The tensors that the engine reads of an update."""
    seen, update = {}, server.engine.update_weights

    def look(body):
        seen.update(load_file(tmp_path / "transfer" / body["update_info"]["file"]))
        return update(body)

    monkeypatch.setattr(server.engine, "update_weights", look)
    publish(transport)
    return seen


def test_weights_reach_a_server_over_tls(serve, tmp_path, monkeypatch):
    certificate, key = write_certificate(tmp_path)
    server = serve(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    # Of an environment that names certificates for everything else.
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(key))
    client = connect(server, ca_certs=certificate)
    transport, reason = choose_channel(client, "http")
    assert type(transport) is HTTPChannel and reason == "asked for"
    transport._piece_bytes = 2**16
    assert_equal(arrived(server, tmp_path, monkeypatch, transport), dict(TENSORS))
    assert server.between.pieces[:6] == [2**16] * 6 and len(server.between.pieces) == 7
    assert not client.has_lost_session()
    # Nothing stays in the directory but the mark.
    assert [path.name for path in (tmp_path / "transfer").iterdir()] == [client.transfer_mark]
    client.close_session()


@pytest.mark.parametrize(
    ("dates", "named", "message"),
    [
        ({}, False, "self.signed certificate"),
        ({"days": -1}, True, "expired"),
        ({"days": 9, "since": 1}, True, "not yet valid"),
    ],
)
def test_a_certificate_that_is_unknown_or_of_another_time_is_refused_at_once(serve, tmp_path, dates, named, message):
    certificate, key = write_certificate(tmp_path, **dates)
    server = serve(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    session = CheckedSession(5, 5, certificate if named else None)
    with pytest.raises(ValueError, match=f"{message}.*vllm_ssl_ca_certs"):
        session.get(f"{server.url}/health")


def test_hiccups_and_proxies_that_refuse_large_bodies_cost_time_only(serve, tmp_path, monkeypatch):
    server = serve()
    client = connect(server)
    transport = HTTPChannel(client)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.between.limit, server.between.hiccups = 100_000, [503, 502, 504]
    assert_equal(arrived(server, tmp_path, monkeypatch, transport), dict(TENSORS))
    assert server.between.pieces[0] > 400_000
    assert transport._piece_bytes <= 100_000
    # No piece of any size, and hiccups that do not end.
    server.between.limit = 1000
    with pytest.raises(PublishError, match="status 413"):
        publish(transport)
    server.between.limit, server.between.hiccups = 10**9, [503] * 99
    with pytest.raises(ServerLost, match="status 503"):
        publish(transport)
    server.between.hiccups = [500]
    with pytest.raises(PublishError, match="status 500"):
        publish(transport)
    server.between.hiccups = [200]
    with pytest.raises(PublishError, match="did not answer with the number of bytes"):
        publish(transport)
    client.close_session()


def test_an_answer_that_never_advances_is_an_error():
    answer = SimpleNamespace(json=lambda: {"received": 5})
    session = SimpleNamespace(post=lambda url, data, headers: answer)
    transport = HTTPChannel(SimpleNamespace(base_url="http://a", session=session, has_lost_session=lambda: False))
    with pytest.raises(PublishError, match="pieces of weights had no effect"):
        transport._upload(memoryview(bytes(100)))


class Described:
    """A client as far as the choice of a transport needs it."""

    def __init__(self, url, backend=FILE_BACKEND, transfer_dir="/nowhere", transfer_mark="trl-qarl-here"):
        self.base_url, self.backend = url, backend
        self.transfer_dir, self.transfer_mark = transfer_dir, transfer_mark

    def call_workers(self, method):
        return [{"backend": self.backend}]


def test_the_transport_is_that_of_the_servers_place(tmp_path):
    (tmp_path / "trl-qarl-here").touch()
    here = Described("http://10.0.0.7:8000", transfer_dir=str(tmp_path))
    assert type(choose_channel(here)[0]) is FileChannel
    assert type(choose_channel(Described("http://10.0.0.7:8000", NCCL_BACKEND))[0]) is NCCLChannel
    for url in ("https://10.0.0.7:8000", "http://127.0.0.1:8000", "http://localhost:8000"):
        transport, reason = choose_channel(Described(url))
        assert type(transport) is HTTPChannel and reason == "this host does not see the server's transfer directory"
    assert type(choose_channel(here, "http", allow_plain_http=True)[0]) is HTTPChannel


def test_changes_alone_are_sent_over_http_unless_said_otherwise():
    http, file, nccl = HTTPChannel(None), FileChannel(None), NCCLChannel(None)
    assert [sends_changes(transport, None) for transport in (http, file, nccl)] == [True, False, False]
    assert [sends_changes(transport, True) for transport in (http, file)] == [True, True]
    assert not sends_changes(http, False)
    with pytest.raises(ValueError, match="vllm_delta_sync=True"):
        sends_changes(nccl, True)


@pytest.mark.parametrize(
    ("url", "backend", "wanted", "message"),
    [
        ("http://10.0.0.7:8000", FILE_BACKEND, "auto", "vllm_allow_plain_http=True"),
        ("http://10.0.0.7:8000", FILE_BACKEND, "http", "vllm_allow_plain_http=True"),
        ("https://a", FILE_BACKEND, "nccl", "'nccl'"),
        ("https://a", NCCL_BACKEND, "http", "'http'"),
    ],
)
def test_clear_text_that_was_not_asked_for_and_what_the_server_does_not_have_are_refused(
    url, backend, wanted, message
):
    with pytest.raises(ValueError, match=message):
        choose_channel(Described(url, backend), wanted)
