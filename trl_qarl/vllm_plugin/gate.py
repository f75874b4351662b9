"""
The server's gate: generation only with completely published weights, and one trainer at a time.

[`PublicationGate`] is an ASGI middleware for vLLM's OpenAI server
(`--middleware trl_qarl.vllm_plugin.gate.PublicationGate`). It reads only paths and status codes and imports only the
standard library. docs/reliability.md says what it guarantees.

- Generation is refused with 503 from the start, and from each `/pause` or `/start_weight_update` on, until a `/resume`
  after a successful `/finish_weight_update`.
- `POST /qarl/session` opens a session ([`trl_qarl.wire.handshake`]) and keeps its response open: the session *is* the
  connection, so it ends with the trainer in any case. While it is open, a second session is refused with 409.
- Requests from a web page are refused with 403, on every path.
- Requests that generate or only compute are open to everybody. All others that may change something, on known and
  unknown paths, need the session's token in the `X-QaRL-Session` header, or are refused with 409. Methods of workers
  other than [`WORKER_METHODS`] are refused with 403.
- Session and requests end when the engine dies: vLLM's server waits for them before it ends, and calls of workers
  would never be answered.
"""

import asyncio
import json
import math
import os
import secrets
import time
from pathlib import Path
from typing import Any

from ..wire.handshake import TOKEN_FILE_VARIABLE, is_proof, json_object, proof, server_token
from ..wire.protocol import SESSION_HEADER, SESSION_PATH, STATE_PATH, TRANSFER_DIR_VARIABLE
from ..wire.transfer_dir import make_transfer_dir, owned_prefix, remove_leftovers


# Methods that `/collective_rpc` may call. vLLM's workers have methods that write files and set environment variables.
WORKER_METHODS = frozenset(["qarl_begin", "qarl_clear_cache", "qarl_describe", "qarl_finish"])

# Methods that change nothing in any of vLLM's routes.
_READING_METHODS = frozenset(["GET", "HEAD", "OPTIONS"])
# POST requests that generate, or compute with the weights in another way.
_GENERATING = """
/classify /cohere/v2/chat /generative_scoring /inference/v1/generate /invocations /pooling /rerank /score
/v1/audio/transcriptions /v1/audio/translations /v1/chat/completions /v1/chat/completions/batch /v1/completions
/v1/embeddings /v1/messages /v1/rerank /v1/responses /v1/score /v1/systemone /v2/embed /v2/rerank
"""
_GENERATING_PATHS = frozenset(_GENERATING.split())
# POST requests that neither need weights nor have lasting effects.
_HARMLESS = """
/detokenize /is_scaling_elastic_ep /ping /tokenize /v1/messages/count_tokens
"""
_HARMLESS_PATHS = frozenset(_HARMLESS.split())

_HEARTBEAT_SECONDS = 30.0
# Seconds between looks at the engine, and time for vLLM to answer for one that has died.
_LOOK_SECONDS, _LAST_SECONDS = 1.0, 5.0
# Limit of a body that is read before its sender is authenticated.
_SESSION_BYTES = 2**16


class PublicationGate:
    """ASGI middleware around `app`; see the module's docstring. Its state lives in one process, so the server must run
    only one API process. The secret `token` defaults to [`~trl_qarl.wire.handshake.server_token`]."""

    def __init__(self, app, token: str | None = None):
        self.app = app
        self._token = token or server_token()
        # Challenge of the next session; it is replaced after each proof, so that a proof is valid once.
        self._nonce = secrets.token_hex(16)
        self._transfer_dir = os.environ.get(TRANSFER_DIR_VARIABLE)
        # A trainer that finds this file shares the directory. The name tells the next one whether this server runs.
        self._mark = f"{owned_prefix()}here"
        self._token_file = os.environ.get(TOKEN_FILE_VARIABLE)
        self.instance = secrets.token_hex(8)
        self.is_open = False
        self.is_complete = False
        self.num_updates = 0
        self.num_publications = 0
        self.session: str | None = None
        self.holder: str | None = None

    async def __call__(self, scope, receive, send):
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "websocket" and (not self.is_open or _is_from_a_page(headers)):
            return await send({"type": "websocket.close", "code": 1013})
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if _is_from_a_page(headers):
            return await _respond(
                send, 403, {"error": "A browser sent this for a page, which may not use this server."}
            )
        # A prefix that the router strips later must not hide a path from the gate.
        path, method = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/"), scope["method"]
        if path == STATE_PATH:
            return await _respond(send, 200, self._state())
        if method in _READING_METHODS or (method == "POST" and path in _HARMLESS_PATHS):
            return await self._serve(scope, receive, send)
        if method != "POST" or path not in _GENERATING_PATHS:
            if not _is_json(headers):
                return await _respond(send, 403, {"error": "A request that changes this server has to be JSON."})
            if path == SESSION_PATH:
                return await self._hold_session(scope, receive, send)
            return await self._change(path, headers, scope, receive, send)
        if not self.is_open:
            error = "No complete set of weights has been published yet, so the server does not generate."
            return await _respond(send, 503, {"error": error})
        return await self._serve(scope, receive, send)

    async def _serve(self, scope, receive, send) -> None:
        """Pass a request on, and end it if the engine dies."""
        is_started = False

        async def note(message):
            nonlocal is_started
            is_started = True
            await send(message)

        call = asyncio.ensure_future(self.app(scope, receive, note))
        try:
            while not call.done() and not _is_engine_dead(scope):
                await asyncio.wait([call], timeout=_LOOK_SECONDS)
            await asyncio.wait([call], timeout=_LAST_SECONDS)
            if call.done():
                return call.result()
            if not is_started:
                await _respond(send, 500, {"error": "The engine has died."})
        finally:
            call.cancel()

    def _state(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "is_open": self.is_open,
            "num_publications": self.num_publications,
            "holder": self.holder,
            "transfer_dir": self._transfer_dir,
            "transfer_mark": self._mark,
            "token_file": self._token_file,
            "nonce": self._nonce,
        }

    async def _hold_session(self, scope, receive, send) -> None:
        request = json_object(await _read_body(receive, _SESSION_BYTES))
        trainer, nonces = str(request.get("trainer", "an unnamed trainer"))[:200], [request.get("nonce"), self._nonce]
        is_known = is_proof(request.get("proof"), self._token, "trainer", nonces, trainer)
        if is_known:
            self._nonce = secrets.token_hex(16)
        if self.session is not None:
            return await _respond(send, 409, {"error": f"The server already works for {self.holder}."})
        if not is_known:
            return await _respond(send, 403, {"error": "The request does not prove that its sender knows the secret."})
        try:
            self._leave_mark()
        except (OSError, ValueError) as error:
            return await _respond(send, 500, {"error": f"The server cannot write to its transfer directory: {error}"})
        self.session, self.holder = secrets.token_hex(16), trainer
        answer = {"session": self.session, **self._state()}
        answer["proof"] = proof(self._token, "server", nonces, answer)
        try:
            await _respond(send, 200, answer, end="\n", more_body=True)
            gone, last = asyncio.ensure_future(_disconnected(receive)), time.monotonic()
            while not _is_engine_dead(scope):
                if (await asyncio.wait([gone], timeout=min(_LOOK_SECONDS, _HEARTBEAT_SECONDS)))[0]:
                    return
                # Writing detects a vanished host, reading does not.
                if time.monotonic() - last >= _HEARTBEAT_SECONDS:
                    await send({"type": "http.response.body", "body": b"\n", "more_body": True})
                    last = time.monotonic()
            # The web server closes the connection of a response without an end.
            gone.cancel()
        finally:
            self.session = self.holder = None

    def _leave_mark(self) -> None:
        """Create the mark for a session: cleaners of temporary directories remove folders that look unused."""
        if self._transfer_dir:
            make_transfer_dir(self._transfer_dir)
            remove_leftovers(self._transfer_dir)
            Path(self._transfer_dir, self._mark).touch(0o600)

    async def _change(self, path: str, headers: dict[bytes, bytes], scope, receive, send) -> None:
        token = headers.get(SESSION_HEADER.encode(), b"")
        if self.session is None or not secrets.compare_digest(token, self.session.encode()):
            holder = "nobody; open a session first" if self.holder is None else self.holder
            return await _respond(send, 409, {"error": f"The weights of this server belong to {holder}."})
        if path == "/collective_rpc":
            body = await _read_body(receive)
            called = json_object(body).get("method")
            # A list is not hashable.
            if not isinstance(called, str) or called not in WORKER_METHODS:
                error = f"{called!r} cannot be called through this server, only {sorted(WORKER_METHODS)}."
                return await _respond(send, 403, {"error": error})
            receive = _receive_again(body, receive)
        if path in ("/pause", "/start_weight_update"):
            self.is_open = False
        if path == "/start_weight_update":
            self.is_complete = False
            self.num_updates += 1
        update = self.num_updates

        async def watch(message):
            is_success = message["type"] == "http.response.start" and message["status"] == 200
            # Ignore a late answer to an abandoned update.
            if is_success and update == self.num_updates:
                if path == "/finish_weight_update":
                    self.is_complete = True
                    self.num_publications += 1
                elif path == "/resume":
                    self.is_open = self.is_complete
            await send(message)

        await self._serve(scope, receive, watch)


def _is_from_a_page(headers: dict[bytes, bytes]) -> bool:
    """Return whether a browser sent the request, by the headers that it adds."""
    return b"origin" in headers or b"sec-fetch-site" in headers


def _is_json(headers: dict[bytes, bytes]) -> bool:
    """Return whether a request has JSON, which a page cannot send without a preflight, or names no media type."""
    media_type = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    return media_type == b"application/json"


def _is_engine_dead(scope) -> bool:
    """Return whether vLLM's client has lost its engine or one of its replicas."""
    engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    return engine is not None and engine.errored


def _receive_again(body: bytes, receive):
    """Return a `receive` that first repeats a body that has been read."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again():
        return messages.pop() if messages else await receive()

    return receive_again


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(receive, limit: float = math.inf) -> bytes:
    """Return the body of a request, or nothing if it has more than `limit` bytes."""
    chunks, size, more = [], 0, True
    while more and size <= limit:
        message = await receive()
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        more = message.get("more_body", False)
    return b"".join(chunks) if size <= limit else b""


async def _respond(send, status: int, content: dict[str, Any], end: str = "", more_body: bool = False) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    body = json.dumps(content) + end
    await send({"type": "http.response.body", "body": body.encode(), "more_body": more_body})
