"""The gate is plain ASGI; it is driven here without a web framework, in front of an application that answers everything."""

import asyncio
import json

import pytest

from trl_qarl.rollout.gate import SESSION_HEADER, SESSION_PATH, STATE_PATH, PublicationGate


class Server:
    """A gate, an application that answers with `status`, and open sessions as tasks."""

    def __init__(self):
        self.status = 200
        self.gate = PublicationGate(self.application)
        self.token = None

    async def application(self, scope, receive, send):
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def request(self, path, method="POST", token=None, disconnect=None):
        """Status and body; with `disconnect`, an event, the connection stays open until it is set."""
        sent, first_body = [], asyncio.Event()

        async def receive():
            if not sent:
                return {"type": "http.request", "body": b'{"trainer": "process 7"}', "more_body": False}
            await disconnect.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if message["type"] == "http.response.body":
                first_body.set()

        headers = [] if token is None else [(SESSION_HEADER.encode(), token.encode())]
        scope = {"type": "http", "path": path, "method": method, "headers": headers}
        task = asyncio.ensure_future(self.gate(scope, receive, send))
        await first_body.wait()
        if disconnect is None:
            await task
        return sent[0]["status"], json.loads(sent[1]["body"] or b"{}"), task

    async def open_session(self):
        hang_up = asyncio.Event()
        status, body, task = await self.request(SESSION_PATH, disconnect=hang_up)
        return status, body.get("session"), hang_up, task

    async def publish(self, token):
        await self.request("/start_weight_update", token=token)
        status = (await self.request("/finish_weight_update", token=token))[0]
        await self.request("/resume", token=token)
        return status


def run(scenario):
    asyncio.run(scenario(Server()))


GENERATING = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/invocations", "/inference/v1/generate"]


@pytest.mark.parametrize("path", GENERATING)
def test_nothing_generates_before_the_first_publication(path):
    async def scenario(server):
        status, body, _ = await server.request(path)
        assert status == 503 and "published" in body["error"]
        assert (await server.request("/v1/models", method="GET"))[0] == 200
        _, token, *_ = await server.open_session()
        assert await server.publish(token) == 200
        assert (await server.request(path))[0] == 200

    run(scenario)


def test_an_update_that_fails_leaves_the_gate_closed():
    async def scenario(server):
        _, token, *_ = await server.open_session()
        await server.publish(token)
        await server.request("/start_weight_update", token=token)
        assert (await server.request("/v1/completions"))[0] == 503
        server.status = 500
        assert (await server.request("/finish_weight_update", token=token))[0] == 500
        server.status = 200
        assert (await server.request("/v1/completions"))[0] == 503
        assert await server.publish(token) == 200
        assert (await server.request("/v1/completions"))[0] == 200

    run(scenario)


def test_a_trainer_that_ends_before_it_resumes_the_engine_leaves_the_gate_closed():
    """The engine is paused meanwhile, and would let other clients wait."""

    async def scenario(server):
        _, token, *_ = await server.open_session()
        await server.publish(token)
        assert (await server.request("/v1/completions"))[0] == 200
        await server.request("/pause", token=token)
        assert (await server.request("/v1/completions"))[0] == 503
        await server.request("/resume", token=token)
        assert (await server.request("/v1/completions"))[0] == 200
        for path in ("/pause", "/start_weight_update", "/finish_weight_update"):
            await server.request(path, token=token)
            assert (await server.request("/v1/completions"))[0] == 503
        server.status = 500
        await server.request("/resume", token=token)
        server.status = 200
        assert (await server.request("/v1/completions"))[0] == 503
        await server.request("/resume", token=token)
        assert (await server.request("/v1/completions"))[0] == 200

    run(scenario)


def test_resuming_without_a_publication_opens_nothing():
    async def scenario(server):
        _, token, *_ = await server.open_session()
        for path in ("/resume", "/start_weight_update", "/resume"):
            await server.request(path, token=token)
            assert (await server.request("/v1/completions"))[0] == 503

    run(scenario)


def test_one_trainer_at_a_time_and_the_next_when_it_is_gone():
    async def scenario(server):
        status, token, hang_up, held = await server.open_session()
        assert status == 200
        status, body, _ = await server.request(SESSION_PATH)
        assert status == 409 and "process 7" in body["error"]
        hang_up.set()
        await held
        status, other, *_ = await server.open_session()
        assert status == 200 and other != token

    run(scenario)


@pytest.mark.parametrize(
    "path",
    ["/start_weight_update", "/update_weights", "/finish_weight_update", "/collective_rpc", "/update_weight_version"],
)
@pytest.mark.parametrize("token", [None, "", "wrong"])
def test_only_the_session_changes_weights(path, token):
    async def scenario(server):
        assert (await server.request(path, token=token))[0] == 409
        _, good, *_ = await server.open_session()
        assert (await server.request(path, token=token))[0] == 409
        assert (await server.request(path, token=good))[0] == 200

    run(scenario)


def test_the_state_tells_who_holds_the_server():
    async def scenario(server):
        _, before, _ = await server.request(STATE_PATH, method="GET")
        assert before["is_open"] is False and before["holder"] is None
        _, token, *_ = await server.open_session()
        await server.publish(token)
        _, after, _ = await server.request(STATE_PATH, method="GET")
        assert (after["is_open"], after["num_publications"], after["holder"]) == (True, 1, "process 7")
        assert after["instance"] == before["instance"]

    run(scenario)


def test_a_trailing_slash_is_no_way_around():
    async def scenario(server):
        assert (await server.request("/start_weight_update/"))[0] == 409
        assert (await server.request("/v1/completions/"))[0] == 503

    run(scenario)


def test_a_path_prefix_is_no_way_around():
    async def scenario(server):
        gate = server.gate
        server.gate = lambda scope, receive, send: gate({**scope, "root_path": "/x"}, receive, send)
        assert (await server.request("/x/v1/completions"))[0] == 503
        assert (await server.request("/x/start_weight_update"))[0] == 409

    run(scenario)


def test_a_late_answer_to_an_update_that_was_given_up_opens_nothing():
    async def scenario(server):
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

    run(scenario)


def test_a_host_that_vanished_loses_the_session(monkeypatch):
    """Nothing says that it has gone; the next line that cannot be delivered does."""
    monkeypatch.setattr("trl_qarl.rollout.gate._HEARTBEAT_SECONDS", 0.01)

    async def scenario(server):
        lines = []

        async def receive():
            if not lines:
                return {"type": "http.request", "body": b"{}", "more_body": False}
            await asyncio.Event().wait()

        async def send(message):
            lines.append(message)
            if len(lines) > 4:
                raise OSError("no route to host")

        scope = {"type": "http", "path": SESSION_PATH, "method": "POST", "headers": []}
        with pytest.raises(OSError, match="no route"):
            await server.gate(scope, receive, send)
        assert (await server.open_session())[0] == 200

    run(scenario)
