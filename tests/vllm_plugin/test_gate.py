"""The gate is plain ASGI, driven here in front of an application that answers everything."""

import asyncio
import json
import os
import shutil
from types import SimpleNamespace

import pytest

from trl_qarl.vllm_plugin.gate import WORKER_METHODS, PublicationGate
from trl_qarl.wire.handshake import is_proof, proof
from trl_qarl.wire.protocol import SESSION_HEADER, SESSION_PATH, STATE_PATH, TRANSFER_DIR_VARIABLE


pytestmark = pytest.mark.anyio

SECRET = "5" * 64


def part(body, more_body=True):
    """A message with a part of a request's body."""
    return {"type": "http.request", "body": body, "more_body": more_body}


class Server:
    """A gate, an application that answers with `status`, and open sessions as tasks."""

    def __init__(self):
        self.status = 200
        self.gate = PublicationGate(self.application, SECRET)
        self.reached = []
        # vLLM's client of the engine.
        self.engine = SimpleNamespace(errored=False)

    async def application(self, scope, receive, send):
        self.reached.append((scope["method"], scope["path"], (await receive())["body"]))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def request(self, path, method="POST", token=None, disconnect=None, body=None, headers=(), messages=None):
        """
        Status and body; with `disconnect`, an event, the connection stays open until it is set. The server receives
        `messages`, or else `body` in one.
        """
        sent, first_body = [], asyncio.Event()
        messages = iter([part(json.dumps(body or {}).encode(), False)] if messages is None else messages)

        async def receive():
            if (message := next(messages, None)) is not None:
                return message
            await disconnect.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if message["type"] == "http.response.body":
                first_body.set()

        headers = [(b"content-type", b"application/json"), *headers]
        headers += [] if token is None else [(SESSION_HEADER.encode(), token.encode())]
        app = SimpleNamespace(state=SimpleNamespace(engine_client=self.engine))
        scope = {"type": "http", "path": path, "method": method, "headers": headers, "app": app}
        task = asyncio.ensure_future(self.gate(scope, receive, send))
        answered = asyncio.ensure_future(first_body.wait())
        await asyncio.wait([task, answered], return_when=asyncio.FIRST_COMPLETED)
        if disconnect is None or not first_body.is_set():
            answered.cancel()
            await task
        return sent[0]["status"], json.loads(sent[1]["body"] or b"{}"), task

    async def prove(self, secret=SECRET, trainer="process 7"):
        """Body of a request for a session."""
        nonces = ["a", (await self.request(STATE_PATH, method="GET"))[1]["nonce"]]
        return {"trainer": trainer, "nonce": "a", "proof": proof(secret, "trainer", nonces, trainer)}

    async def open_session(self):
        hang_up = asyncio.Event()
        status, body, task = await self.request(SESSION_PATH, disconnect=hang_up, body=await self.prove())
        return status, body.get("session"), hang_up, task

    async def publish(self, token):
        await self.request("/start_weight_update", token=token)
        status = (await self.request("/finish_weight_update", token=token))[0]
        await self.request("/resume", token=token)
        return status


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """The transfer directory of `server`."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv(TRANSFER_DIR_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def server(directory):
    return Server()


@pytest.fixture
async def token(server):
    """The token of an open session."""
    _, token, hang_up, _ = await server.open_session()
    yield token
    hang_up.set()


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/invocations", "/inference/v1/generate"]
)
async def test_nothing_generates_before_the_first_publication(server, path):
    status, body, _ = await server.request(path)
    assert status == 503 and "published" in body["error"]
    assert (await server.request("/v1/models", method="GET"))[0] == 200
    _, token, *_ = await server.open_session()
    assert await server.publish(token) == 200
    assert (await server.request(path))[0] == 200


@pytest.mark.parametrize(
    ("is_published", "steps"),
    [
        (False, [("/resume", 200, 503), ("/start_weight_update", 200, 503), ("/resume", 200, 503)]),
        (True, [("/start_weight_update", 200, 503), ("/finish_weight_update", 500, 503), ("/resume", 200, 503)]),
        # The engine is paused until the trainer resumes it, and would let other clients wait.
        (
            True,
            [("/pause", 200, 503), ("/resume", 200, 200), ("/pause", 200, 503), ("/start_weight_update", 200, 503)],
        ),
        (True, [("/start_weight_update", 200, 503), ("/finish_weight_update", 200, 503), ("/resume", 500, 503)]),
    ],
    ids=["resumed without a publication", "an update that fails", "paused", "not resumed"],
)
async def test_the_gate_opens_after_a_complete_publication(server, token, is_published, steps):
    if is_published:
        await server.publish(token)
        assert (await server.request("/v1/completions"))[0] == 200
    for path, server.status, expected in steps:
        assert (await server.request(path, token=token))[0] == server.status
        server.status = 200
        assert (await server.request("/v1/completions"))[0] == expected, path
    assert await server.publish(token) == 200
    assert (await server.request("/v1/completions"))[0] == 200


async def test_one_trainer_at_a_time_and_the_next_when_it_is_gone(server):
    status, token, hang_up, held = await server.open_session()
    assert status == 200
    status, body, _ = await server.request(SESSION_PATH, body=await server.prove())
    assert status == 409 and "process 7" in body["error"]
    hang_up.set()
    await held
    status, other, *_ = await server.open_session()
    assert status == 200 and other != token


@pytest.mark.parametrize(
    "path", ["/start_weight_update", "/collective_rpc", "/v1/load_lora_adapter", "/a_route_of_the_next_version"]
)
@pytest.mark.parametrize("wrong", [None, "", "wrong", "é"])
async def test_only_the_session_changes_weights(server, path, wrong):
    call = {"body": {"method": "qarl_describe"}}
    assert (await server.request(path, token=wrong, **call))[0] == 409
    _, good, *_ = await server.open_session()
    # Also with the weights complete, when everybody may generate.
    await server.publish(good)
    server.reached.clear()
    assert (await server.request(path, token=wrong, **call))[0] == 409
    assert (await server.request(path, method="DELETE", token=wrong, **call))[0] == 409
    assert server.reached == []
    assert (await server.request(path, token=good, **call))[0] == 200
    assert server.reached == [("POST", path, json.dumps(call["body"]).encode())]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/is_paused", "/weight_info"])
async def test_everybody_may_read(server, path):
    assert (await server.request(path, method="GET"))[0] == 200
    assert (await server.request(f"{path}/", method="HEAD"))[0] == 200


ROUTES = f"""
GET {STATE_PATH}
GET /server_info
HEAD /v1/models
OPTIONS /tokenize
POST /tokenize
POST /v1/completions
PUT /a_route_of_the_next_version
POST {SESSION_PATH}
POST /collective_rpc
POST /update_weights
"""
PAGES = [(b"origin", b"http://evil.example"), (b"origin", b"null"), (b"sec-fetch-site", b"same-site")]


@pytest.mark.parametrize("header", PAGES)
@pytest.mark.parametrize("route", ROUTES.strip().splitlines())
async def test_a_page_gets_no_answer_from_any_path(server, token, route, header):
    await server.publish(token)
    server.reached.clear()
    method, path = route.split()
    body = await server.prove() | {"method": "qarl_describe"}
    status, answer, _ = await server.request(path, method=method, token=token, headers=[header], body=body)
    assert status == 403 and "browser" in answer["error"] and server.reached == []


async def test_a_page_opens_no_websocket(server, token):
    await server.publish(token)
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [(b"origin", b"http://evil.example")]}
    await server.gate(scope, None, send)
    assert sent == [{"type": "websocket.close", "code": 1013}] and server.reached[3:] == []


async def test_routes_that_render_prompts_need_the_session(server, token):
    """They fetch what a prompt with pictures names."""
    for path in ("/v1/chat/completions/render", "/v1/responses/render", "/v1/messages/render"):
        assert (await server.request(path))[0] == 409
        assert (await server.request(path, token=token))[0] == 200


@pytest.mark.parametrize(
    "method",
    [None, 7, ["qarl_finish"], "", "save_sharded_state", "update_environment_variables", "qarl_finish ", "load_model"],
)
async def test_workers_do_only_what_a_publication_needs(server, token, method):
    server.reached.clear()
    status, body, _ = await server.request("/collective_rpc", token=token, body={"method": method, "args": []})
    assert status == 403 and "qarl_describe" in body["error"]
    assert server.reached == []
    for allowed in WORKER_METHODS:
        assert (await server.request("/collective_rpc", token=token, body={"method": allowed}))[0] == 200


@pytest.mark.parametrize("secret", [None, "", "6" * 64])
async def test_a_session_opens_only_for_who_knows_the_secret(server, secret):
    body = {"trainer": "process 8"} if secret is None else await server.prove(secret, "process 8")
    status, answer, _ = await server.request(SESSION_PATH, body=body)
    assert status == 403 and "secret" in answer["error"] and "session" not in answer
    assert server.gate.holder is None
    # A stranger's attempts are no obstacle to the trainer.
    assert (await server.open_session())[0] == 200


async def test_a_proof_serves_once_and_for_its_trainer_only(server):
    body = await server.prove()
    forged = {**body, "trainer": "somebody else"}
    assert (await server.request(SESSION_PATH, body=forged))[0] == 403
    hang_up = asyncio.Event()
    *_, held = await server.request(SESSION_PATH, body=body, disconnect=hang_up)
    refused = await server.prove()
    assert (await server.request(SESSION_PATH, body=refused))[0] == 409
    hang_up.set()
    await held
    for seen in (body, refused):
        assert (await server.request(SESSION_PATH, body=seen))[0] == 403


async def test_the_server_proves_all_that_it_says(server):
    body = await server.prove()
    nonces = ["a", server.gate._nonce]
    _, answer, _ = await server.request(SESSION_PATH, body=body, disconnect=asyncio.Event())
    given = answer.pop("proof")
    assert is_proof(given, SECRET, "server", nonces, answer)
    assert not is_proof(given, SECRET, "server", nonces, {**answer, "transfer_dir": "/tmp/elsewhere"})
    assert not is_proof(given, SECRET, "server", ["b", nonces[1]], answer)
    assert SECRET not in json.dumps([body, answer])


async def test_a_long_request_of_a_stranger_is_not_kept(server):
    messages = iter([part(bytes(2**14))] * 100)
    assert (await server.request(SESSION_PATH, messages=messages))[0] == 403
    assert len([*messages]) > 90


@pytest.mark.parametrize("media_type", [b"text/plain", b"multipart/form-data; boundary=x"])
@pytest.mark.parametrize("path", [SESSION_PATH, "/collective_rpc", "/sleep"])
async def test_what_changes_something_has_to_be_json(server, path, media_type):
    """A page can send other media types without asking first."""
    if path == SESSION_PATH:
        request = {"body": await server.prove()}
    else:
        _, token, *_ = await server.open_session()
        request = {"body": {"method": "qarl_describe"}, "token": token}
    server.reached.clear()
    status, body, _ = await server.request(path, headers=[(b"content-type", media_type)], **request)
    assert status == 403 and "JSON" in body["error"] and server.reached == []
    assert path == SESSION_PATH or (await server.request(path, **request))[0] == 200


async def test_the_state_tells_who_holds_the_server_and_where_it_reads(server, directory, monkeypatch):
    monkeypatch.setenv(TRANSFER_DIR_VARIABLE, "/another/than/at/the/start")
    _, before, _ = await server.request(STATE_PATH, method="GET")
    assert before["is_open"] is False and before["holder"] is None
    assert before["transfer_dir"] == str(directory)
    _, token, *_ = await server.open_session()
    # By its mark a trainer knows that it has the same directory; it goes with its server, whose process it names.
    assert (directory / before["transfer_mark"]).exists() and str(os.getpid()) in before["transfer_mark"]
    await server.publish(token)
    _, after, _ = await server.request(STATE_PATH, method="GET")
    assert (after["is_open"], after["num_publications"], after["holder"]) == (True, 1, "process 7")
    assert after["instance"] == before["instance"]


@pytest.mark.parametrize("disguise", ["{}/", "/x{}"])
async def test_a_trailing_slash_or_a_prefix_is_no_way_around(server, disguise):
    gate = server.gate
    server.gate = lambda scope, receive, send: gate({**scope, "root_path": "/x"}, receive, send)
    assert (await server.request(disguise.format("/v1/completions")))[0] == 503
    assert (await server.request(disguise.format("/start_weight_update")))[0] == 409


async def test_a_late_answer_to_an_abandoned_update_opens_nothing(server):
    _, token, hang_up, held = await server.open_session()
    await server.request("/start_weight_update", token=token)
    arrived, answer = asyncio.Event(), asyncio.Event()
    application = server.gate.app

    async def slow(scope, receive, send):
        arrived.set()
        await answer.wait()
        await application(scope, receive, send)

    server.gate.app = slow
    finishing = asyncio.ensure_future(server.request("/finish_weight_update", token=token))
    await arrived.wait()
    hang_up.set()
    await held
    server.gate.app = application
    _, other, *_ = await server.open_session()
    await server.request("/start_weight_update", token=other)
    answer.set()
    assert (await finishing)[0] == 200
    await server.request("/resume", token=other)
    assert (await server.request("/v1/completions"))[0] == 503


async def test_a_host_that_vanished_loses_the_session(server, monkeypatch):
    """Nothing says that it has gone; the next line that cannot be delivered does."""
    monkeypatch.setattr("trl_qarl.vllm_plugin.gate._HEARTBEAT_SECONDS", 0.01)
    lines, body = [], json.dumps(await server.prove()).encode()

    async def receive():
        if not lines:
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()

    async def send(message):
        lines.append(message)
        if len(lines) > 4:
            raise OSError("no route to host")

    scope = {"type": "http", "path": SESSION_PATH, "method": "POST", "headers": []}
    with pytest.raises(OSError, match="no route"):
        await server.gate(scope, receive, send)
    assert (await server.open_session())[0] == 200


async def test_a_session_makes_a_removed_transfer_directory_again(server, directory):
    mark = server.gate._mark
    for _ in range(2):
        _, _, hang_up, held = await server.open_session()
        assert (directory / mark).exists() and directory.stat().st_mode & 0o777 == 0o700
        hang_up.set()
        await held
        shutil.rmtree(directory)
    directory.mkdir(0o777)
    directory.chmod(0o777)
    status, answer, _ = await server.request(SESSION_PATH, body=await server.prove())
    assert status == 500 and "others may write to it" in answer["error"] and server.gate.session is None


async def test_session_and_requests_end_with_the_engine(server, monkeypatch):
    """vLLM's server waits for both before it ends, and a call of workers that are gone has no answer."""
    monkeypatch.setattr("trl_qarl.vllm_plugin.gate._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("trl_qarl.vllm_plugin.gate._LAST_SECONDS", 0.01)
    _, token, hang_up, held = await server.open_session()
    await server.publish(token)
    application, arrived = server.gate.app, asyncio.Event()

    async def never(scope, receive, send):
        arrived.set()
        await asyncio.Event().wait()

    server.gate.app = never
    waiting = [
        asyncio.ensure_future(server.request(path, method=method, token=token, body={"method": "qarl_describe"}))
        for path, method in (("/collective_rpc", "POST"), ("/weight_info", "GET"), ("/v1/completions", "POST"))
    ]
    await arrived.wait()
    server.engine.errored = True
    for request in waiting:
        status, body, _ = await asyncio.wait_for(request, 10)
        assert status == 500 and "engine has died" in body["error"]
    await asyncio.wait_for(held, 10)
    assert not hang_up.is_set() and server.gate.session is None
    # Requests that vLLM answers itself have its answer.
    server.gate.app = application
    assert (await server.request("/v1/models", method="GET"))[0] == 200
