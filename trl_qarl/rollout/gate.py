"""
The server's door: generation only with completely published weights, and one trainer at a time.

[`PublicationGate`] is an ASGI middleware for vLLM's OpenAI server (`--middleware trl_qarl.rollout.gate.PublicationGate`).
It looks at paths and status codes only and imports neither torch nor vLLM.

- Generation is refused with 503 from the start, and from each `/pause` or `/start_weight_update` on, until a `/resume` after a
  `/finish_weight_update` that has succeeded. An update that fails half way therefore leaves the door closed, and where the
  trainer ends before it lets the engine go on, other clients get an answer.
- `POST /qarl/session` opens a session and keeps its response open: the session *is* the connection, so it ends when the
  trainer ends, however that happens. While one is open, a second is refused with 409, and so are requests that would
  change weights, or cut off the trainer's rollouts, without the session's token in the `X-QaRL-Session` header.
"""

import asyncio
import json
import os
import secrets
from typing import Any


__all__ = ["SESSION_HEADER", "SESSION_PATH", "STATE_PATH", "TRANSFER_DIR_VARIABLE", "PublicationGate"]

SESSION_PATH = "/qarl/session"
STATE_PATH = "/qarl/state"
SESSION_HEADER = "x-qarl-session"
TRANSFER_DIR_VARIABLE = "TRL_QARL_TRANSFER_DIR"

_WEIGHT_PATHS = frozenset(
    [
        "/abort_requests",
        "/collective_rpc",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/pause",
        "/resume",
        "/sleep",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weight_version",
        "/update_weights",
        "/wake_up",
    ]
)
# POST requests that neither generate nor change weights.
_HARMLESS_PATHS = frozenset(
    [
        "/detokenize",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/tokenize",
        "/v1/chat/completions/render",
    ]
)

_HEARTBEAT_SECONDS = 30.0


class PublicationGate:
    """
    ASGI middleware; see the module's docstring. Its state lives in one process, so the server must run one API process.

    Args:
        app:
            The ASGI application behind the gate.
    """

    def __init__(self, app):
        self.app = app
        self.instance = secrets.token_hex(8)
        self.is_open = False
        self.is_complete = False
        self.num_updates = 0
        self.num_publications = 0
        self.session: str | None = None
        self.holder: str | None = None

    async def __call__(self, scope, receive, send):
        if scope["type"] == "websocket" and not self.is_open:
            return await send({"type": "websocket.close", "code": 1013})
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        # A prefix that the router behind would strip must not hide a path from the gate.
        path, method = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/"), scope["method"]
        if path == STATE_PATH:
            return await _respond(send, 200, self._state())
        if path == SESSION_PATH and method == "POST":
            return await self._hold_session(receive, send)
        if path in _WEIGHT_PATHS:
            return await self._change_weights(path, scope, receive, send)
        if method == "POST" and path not in _HARMLESS_PATHS and not self.is_open:
            return await _respond(
                send,
                503,
                {"error": "No complete set of weights has been published yet, so the server does not generate."},
            )
        return await self.app(scope, receive, send)

    def _state(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "is_open": self.is_open,
            "num_publications": self.num_publications,
            "holder": self.holder,
            "transfer_dir": os.environ.get(TRANSFER_DIR_VARIABLE),
        }

    async def _hold_session(self, receive, send) -> None:
        body = await _read_body(receive)
        if self.session is not None:
            return await _respond(send, 409, {"error": f"The server already works for {self.holder}."})
        token = secrets.token_hex(16)
        self.session, self.holder = token, str(json.loads(body or b"{}").get("trainer", "an unnamed trainer"))[:200]
        try:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
            )
            line = json.dumps({"session": token, **self._state()}) + "\n"
            await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
            # A host that vanished says nothing; a line that cannot be delivered does.
            gone = asyncio.ensure_future(_disconnected(receive))
            while not (await asyncio.wait([gone], timeout=_HEARTBEAT_SECONDS))[0]:
                await send({"type": "http.response.body", "body": b"\n", "more_body": True})
        finally:
            self.session = self.holder = None

    async def _change_weights(self, path: str, scope, receive, send) -> None:
        token = dict(scope["headers"]).get(SESSION_HEADER.encode(), b"").decode()
        if self.session is None or not secrets.compare_digest(token, self.session):
            holder = "nobody; open a session first" if self.holder is None else self.holder
            return await _respond(send, 409, {"error": f"The weights of this server belong to {holder}."})
        if path in ("/pause", "/start_weight_update"):
            self.is_open = False
        if path == "/start_weight_update":
            self.is_complete = False
            self.num_updates += 1
        update = self.num_updates

        async def watch(message):
            is_success = message["type"] == "http.response.start" and message["status"] == 200
            # A late answer to an update that has been given up says nothing about the one in progress.
            if is_success and update == self.num_updates:
                if path == "/finish_weight_update":
                    self.is_complete = True
                    self.num_publications += 1
                elif path == "/resume":
                    self.is_open = self.is_complete
            await send(message)

        await self.app(scope, receive, watch)


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _respond(send, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
