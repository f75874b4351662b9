"""The secret between trainer and server: who is let in, and what becomes of a server that does not know it."""

import gc
import json
import os
import secrets
import sys
import time
from types import SimpleNamespace

import pytest
import requests

from testing_utils.web_servers import WebServer, wait_until
from trl_qarl.engines.server_process import ServerProcess, free_port
from trl_qarl.vllm_plugin.gate import PublicationGate
from trl_qarl.wire import handshake
from trl_qarl.wire.handshake import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    is_proof,
    make_token_file,
    proof,
    read_token_file,
    server_token,
    take_token,
)
from trl_qarl.wire.protocol import SESSION_PATH, STATE_PATH, TRANSFER_DIR_VARIABLE
from trl_qarl.wire.transfer_dir import make_transfer_dir


def test_a_proof_is_of_one_secret_and_one_message():
    token = secrets.token_hex(32)
    given = proof(token, "trainer", ["a", "b"], "process 7")
    assert is_proof(given, token, "trainer", ["a", "b"], "process 7")
    assert not is_proof(given, secrets.token_hex(32), "trainer", ["a", "b"], "process 7")
    # The server's proof is no trainer's, and no two messages are one.
    assert not is_proof(given, token, "server", ["a", "b"], "process 7")
    assert not is_proof(given, token, "trainer", ["a"], "b", "process 7")
    for nonsense in (None, "", "é", "\ud800", 7, [given]):
        assert not is_proof(nonsense, token, "trainer", ["a", "b"], "process 7")


def test_a_token_file_is_its_owners_alone_and_kept(tmp_path):
    path, umask = tmp_path / "token", os.umask(0)
    try:
        make_token_file(path)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600
    token = read_token_file(path)
    make_token_file(path)
    assert read_token_file(path) == token != secrets.token_hex(32)


def test_what_is_no_token_and_what_others_may_know_is_refused(tmp_path):
    path = tmp_path / "token"
    make_token_file(path)
    for mode in (0o644, 0o640, 0o602, 0o620):
        path.chmod(mode)
        with pytest.raises(ValueError, match=f"mode {mode:04o}.*chmod 600"):
            read_token_file(path)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="cannot be read.*No such file"):
        read_token_file(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="not a regular file"):
        read_token_file(tmp_path / "pipe")
    for content in (b"", b"hunter2\n", b"0" * 65, b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="64 hexadecimal digits|cannot be read"):
            read_token_file(path)


def test_a_server_needs_a_secret_and_hides_it_from_children(monkeypatch, tmp_path):
    monkeypatch.setattr(handshake, "_taken", None)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="without the secret.*trl-qarl vllm-serve"):
        PublicationGate(None)
    make_token_file(tmp_path / "token")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    assert PublicationGate(None)._token == read_token_file(tmp_path / "token")
    monkeypatch.setenv(TOKEN_VARIABLE, token := secrets.token_hex(32))
    assert take_token() == token
    assert TOKEN_VARIABLE not in os.environ
    assert server_token() == token


def test_a_server_that_is_started_here_gets_a_secret_of_its_own(tmp_path):
    code = f"import os; print(os.environ[{TOKEN_VARIABLE!r}])"
    processes = []
    for name in ("a", "b"):
        argv = [sys.executable, "-c", code, "--port", str(free_port())]
        processes.append(ServerProcess(argv, {}, tmp_path / name))
        processes[-1].start()
        processes[-1]._process.wait(timeout=60)
        processes[-1].stop()
        assert (tmp_path / name).read_text().strip() == processes[-1].token
    assert processes[0].token != processes[1].token
    assert TOKEN_VARIABLE not in os.environ


def test_the_engine_reads_from_the_directory_at_its_start(monkeypatch, tmp_path):
    pytest.importorskip("vllm")
    import torch
    from safetensors.torch import save_file

    from trl_qarl.vllm_plugin.weight_transfer import FileReceiver, FileUpdateInfo

    first, another = tmp_path / "first", tmp_path / "another"
    for directory, value in ((first, 1.0), (another, 2.0)):
        make_transfer_dir(directory)
        save_file({"weight": torch.tensor([value])}, directory / "x.safetensors")
    monkeypatch.setenv(TRANSFER_DIR_VARIABLE, str(first))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        load_config=SimpleNamespace(load_format="auto"),
        model_config=None,
    )
    engine = FileReceiver(None, config, torch.device("cpu"), torch.nn.Module())
    monkeypatch.setenv(TRANSFER_DIR_VARIABLE, str(another))
    received = {}
    engine.load = received.update
    engine.receive_weights(FileUpdateInfo("x.safetensors"))
    assert received["weight"].item() == 1.0
    with pytest.raises(ValueError, match="not the name of a safetensors file"):
        engine.receive_weights(FileUpdateInfo("../another/x.safetensors"))
    # As long as nobody else can write to it.
    first.chmod(0o777)
    with pytest.raises(ValueError, match="others may write to it"):
        engine.receive_weights(FileUpdateInfo("x.safetensors"))


async def reply(send, content, status=200, headers=()):
    headers = [(b"content-type", b"application/json"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode() + b"\n"})


async def application(scope, receive, send):
    """The routes of vLLM that a connecting client uses, and the workers' answer."""
    body = (await receive())["body"]
    call = json.loads(body)["kwargs"]["call"] if scope["path"] == "/collective_rpc" else ""
    results = [{"call": call, "replica": 0, "value": {"backend": "qarl"}}]
    await reply(send, {"data": [{"id": "m"}], "results": results})


def serve(token=None, port=0):
    return WebServer(PublicationGate(application, token), port)


class Thief(WebServer):
    """A process of somebody else that took the port: it answers everything as the server would, but for the secret."""

    def __init__(self, port, directory, token_file, redirects_to=None):
        self.requests, self.redirects_to = [], redirects_to
        self.said = {"data": [{"id": "m"}], "instance": "i", "nonce": "0" * 32, "holder": None, "results": [{}]}
        self.said |= {"session": "s", "transfer_dir": str(directory), "token_file": str(token_file)}
        super().__init__(self.answer, port)

    async def answer(self, scope, receive, send):
        path, body = scope["path"], json.loads((await receive())["body"] or b"{}")
        self.requests.append((path, body, scope["headers"]))
        # What it has seen of the trainer is the best guess it has for a proof.
        seen = [body["proof"] for path, body, _ in self.requests if path == SESSION_PATH]
        is_redirected = self.redirects_to and path.startswith("/qarl/")
        headers = [(b"location", f"{self.redirects_to}{path}".encode())] if is_redirected else []
        await reply(send, self.said | {"proof": (seen or ["0" * 64])[-1]}, 307 if is_redirected else 200, headers)


@pytest.fixture
def started():
    """Servers and clients that are stopped with the test, clients first."""
    processes = []
    yield processes
    for process in reversed(processes):
        process.close_session() if hasattr(process, "close_session") else process.stop()


@pytest.fixture
def make_client(started):
    pytest.importorskip("vllm")
    from trl_qarl.engines.client import QaRLClient

    def make(*args, **kwargs):
        client = QaRLClient(*args, **kwargs)
        started.append(client)
        return client

    return make


def test_trainer_and_server_find_each_other(started, make_client, monkeypatch, tmp_path):
    token_file, transfer_dir = tmp_path / "token", tmp_path / "transfer"
    make_token_file(token_file)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(token_file))
    monkeypatch.setenv(TRANSFER_DIR_VARIABLE, str(transfer_dir))
    started.append(server := serve(read_token_file(token_file)))
    # The same user on the same host; with a copy of the file; as the one who started the server.
    copy = tmp_path / "copy"
    copy.touch(0o600)
    copy.write_bytes(token_file.read_bytes())
    for arguments in ({}, {"token_file": copy}, {"token": read_token_file(copy), "token_file": "/nowhere"}):
        client = make_client(server.url, **arguments)
        assert client.transfer_dir == str(transfer_dir)
        assert client.call_workers("qarl_describe") == [{"backend": "qarl"}]
        assert not client.has_lost_session()
        client.close_session()
        while client._get(f"{client.base_url}{STATE_PATH}")["holder"] is not None:
            time.sleep(0.01)


def test_the_session_ends_with_its_client(started):
    """Such as that of a trainer whose constructor raises: no garbage collector is needed."""
    pytest.importorskip("vllm")
    from trl_qarl.engines.client import QaRLClient

    started.append(server := serve(token := secrets.token_hex(32)))
    gc.collect()
    gc.disable()
    try:
        client = QaRLClient(server.url, token=token)
        assert client._get(f"{client.base_url}{STATE_PATH}")["holder"] is not None
        del client
        state = lambda: requests.get(f"{server.url}{STATE_PATH}", timeout=10).json()  # noqa: E731
        wait_until(lambda: state()["holder"] is None, 10, lambda: "the session outlives its client")
    finally:
        gc.enable()


def test_the_latest_client_of_a_process_has_the_session(started, make_client):
    """A notebook's cell that runs again makes its trainer before it drops the earlier one."""
    started.append(server := serve(token := secrets.token_hex(32)))
    first = make_client(server.url, token=token)
    second = make_client(server.url.replace("127.0.0.1", "localhost"), token=token)
    assert first._held is None and not second.has_lost_session()
    assert first.reconnect(5.0) is False
    assert second._held is None and not first.has_lost_session()


def test_what_to_do_about_a_wrong_or_missing_secret_is_said(started, make_client, monkeypatch, tmp_path):
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)
    started.append(server := serve(secrets.token_hex(32)))
    with pytest.raises(ValueError, match="`vllm_token_file`"):
        make_client(server.url)
    with pytest.raises(ValueError, match="`vllm_token_file`"):
        make_client(server.url, token_file=tmp_path / "none")
    make_token_file(tmp_path / "other")
    with pytest.raises(ValueError, match=r"another secret than this trainer.* '.*/other'"):
        make_client(server.url, token_file=tmp_path / "other")


def test_who_takes_the_port_gets_no_weights(started, make_client, monkeypatch, tmp_path):
    import torch

    from trl_qarl.engines.http_session import ServerLost
    from trl_qarl.sync.channels import FileChannel

    token, mine, theirs = secrets.token_hex(32), tmp_path / "mine", tmp_path / "theirs"
    for directory in (mine, theirs):
        make_transfer_dir(directory)
    monkeypatch.setenv(TRANSFER_DIR_VARIABLE, str(mine))
    started.append(server := serve(token))
    client = make_client(server.url, token=token)
    transport = FileChannel(client)
    server.stop()
    started.append(thief := Thief(server.port, theirs, theirs / "token"))
    # In the middle of a publication, and of a rollout: nothing reaches it, and nothing it says is believed.
    for request in (
        lambda: transport.send([("weight", torch.ones(8))]),
        lambda: client._post(f"{client.base_url}/v1/completions", json={}),
        client.weight_version,
    ):
        with pytest.raises(ServerLost, match="ended the session"):
            request()
    assert thief.requests == []
    with pytest.raises(ServerLost, match="did not prove that it knows the secret"):
        client.reconnect(0)
    assert {path for path, *_ in thief.requests} == {"/health", STATE_PATH, SESSION_PATH}
    assert token not in str(thief.requests)
    assert client.transfer_dir == str(mine)
    # At the start of a training.
    with pytest.raises(ValueError, match="did not prove that it knows the secret.*gets no weights.*ss -ltnp"):
        make_client(server.url, token=token)
    # The mark of the server that was there.
    assert list(theirs.iterdir()) == [path for path in mine.iterdir() if not path.name.endswith("-here")] == []
    # When it has gone and the server is back, so is the trainer.
    thief.stop()
    started.remove(thief)
    started.append(serve(token, server.port))
    assert client.reconnect(10)
    assert client.call_workers("qarl_describe")


def test_who_redirects_to_the_server_is_not_the_server(started, make_client, tmp_path):
    token = secrets.token_hex(32)
    started.append(server := serve(token))
    started.append(thief := Thief(0, tmp_path, tmp_path / "token", redirects_to=server.url))
    with pytest.raises(ValueError, match="opened no session"):
        make_client(thief.url, token=token)
