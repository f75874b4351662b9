"""
The server's gate: generation only with completely published weights, and one trainer at a time.

[`PublicationGate`] is an ASGI middleware for vLLM's OpenAI server
(`--middleware trl_qarl.vllm_plugin.gate.PublicationGate`). It reads only paths and status codes and imports only the
standard library. docs/reliability.md says what it guarantees, docs/vllm.md how weights travel over HTTPS.

- Generation is refused with 503 from the start, and from each `/pause` or `/start_weight_update` on, until a `/resume`
  after a successful `/finish_weight_update`.
- `POST /qarl/session` opens a session ([`trl_qarl.wire.handshake`]) and keeps its response open: the session *is* the
  connection, so it ends with the trainer in any case. While it is open, a second session is refused with 409.
- Requests that generate or only compute are open to everybody. All others that may change something, on known and
  unknown paths, need the session's token in the `X-QaRL-Session` header, or are refused with 409. Requests from a
  browser, and methods of workers other than [`WORKER_METHODS`], are refused with 403.
- `POST /qarl/upload` has a piece of a file of weights as its body, and [`UPLOAD_HEADER`] with the SHA-256 of the whole
  file, its size, and the offset of the piece. The answer has the number of bytes received.
"""

import asyncio
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..wire.handshake import TOKEN_FILE_VARIABLE, is_proof, json_object, proof, server_token
from ..wire.protocol import (
    SESSION_HEADER,
    SESSION_PATH,
    STATE_PATH,
    TRANSFER_DIR_VARIABLE,
    UPLOAD_HEADER,
    UPLOAD_PATH,
)
from ..wire.transfer_dir import make_transfer_dir, owned_prefix, remove_leftovers


# Methods that `/collective_rpc` may call. vLLM's workers have methods that write files and set environment variables.
WORKER_METHODS = frozenset(["qarl_begin", "qarl_clear_cache", "qarl_describe", "qarl_finish", "qarl_keep_copy"])

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
/cohere/v2/chat/render /detokenize /is_scaling_elastic_ep /ping /tokenize /v1/chat/completions/derender
/v1/chat/completions/render /v1/completions/derender /v1/completions/render /v1/messages/count_tokens
/v1/messages/render /v1/responses/render
"""
_HARMLESS_PATHS = frozenset(_HARMLESS.split())

_HEARTBEAT_SECONDS = 30.0
# Limit of a body that is read before its sender is authenticated.
_SESSION_BYTES = 2**16
# Limit of all uploaded files together.
_UPLOAD_BYTES = 2**32


class PublicationGate:
    """ASGI middleware around `app`; see the module's docstring. Its state lives in one process, so the server must run
    only one API process. The secret `token` defaults to [`~trl_qarl.wire.handshake.server_token`]."""

    def __init__(self, app, token: str | None = None):
        self.app = app
        self._token = token or server_token()
        # Challenge of the next session; it is replaced after each proof, so that a proof is valid once.
        self._nonce = secrets.token_hex(16)
        self._transfer_dir = os.environ.get(TRANSFER_DIR_VARIABLE)
        self._uploads = Uploads(self._transfer_dir)
        self._token_file = os.environ.get(TOKEN_FILE_VARIABLE)
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
        # A prefix that the router strips later must not hide a path from the gate.
        path, method = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/"), scope["method"]
        if path == STATE_PATH:
            return await _respond(send, 200, self._state())
        if method in _READING_METHODS or (method == "POST" and path in _HARMLESS_PATHS):
            return await self.app(scope, receive, send)
        if method != "POST" or path not in _GENERATING_PATHS:
            headers = dict(scope["headers"])
            if _is_from_a_page(headers, b"application/octet-stream" if path == UPLOAD_PATH else b"application/json"):
                error = "A browser sent this for a page. Only a trainer may change this server."
                return await _respond(send, 403, {"error": error})
            if path == SESSION_PATH:
                return await self._hold_session(receive, send)
            return await self._change(path, headers, scope, receive, send)
        if not self.is_open:
            error = "No complete set of weights has been published yet, so the server does not generate."
            return await _respond(send, 503, {"error": error})
        return await self.app(scope, receive, send)

    def _state(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "is_open": self.is_open,
            "num_publications": self.num_publications,
            "holder": self.holder,
            "transfer_dir": self._transfer_dir,
            "transfer_mark": self._uploads.mark,
            "token_file": self._token_file,
            "nonce": self._nonce,
        }

    async def _hold_session(self, receive, send) -> None:
        request = json_object(await _read_body(receive, _SESSION_BYTES))
        trainer, nonces = str(request.get("trainer", "an unnamed trainer"))[:200], [request.get("nonce"), self._nonce]
        is_known = is_proof(request.get("proof"), self._token, "trainer", nonces, trainer)
        if is_known:
            self._nonce = secrets.token_hex(16)
        if self.session is not None:
            return await _respond(send, 409, {"error": f"The server already works for {self.holder}."})
        if not is_known:
            return await _respond(send, 403, {"error": "The request does not prove that its sender knows the secret."})
        self.session, self.holder = secrets.token_hex(16), trainer
        answer = {"session": self.session, **self._state()}
        answer["proof"] = proof(self._token, "server", nonces, answer)
        try:
            await _respond(send, 200, answer, end="\n", more_body=True)
            # Writing detects a vanished host, reading does not.
            gone = asyncio.ensure_future(_disconnected(receive))
            while not (await asyncio.wait([gone], timeout=_HEARTBEAT_SECONDS))[0]:
                await send({"type": "http.response.body", "body": b"\n", "more_body": True})
        finally:
            self.session = self.holder = None

    async def _change(self, path: str, headers: dict[bytes, bytes], scope, receive, send) -> None:
        token = headers.get(SESSION_HEADER.encode(), b"")
        if self.session is None or not secrets.compare_digest(token, self.session.encode()):
            holder = "nobody; open a session first" if self.holder is None else self.holder
            return await _respond(send, 409, {"error": f"The weights of this server belong to {holder}."})
        if path == UPLOAD_PATH:
            answer = await self._uploads.receive(headers, receive)
            return None if answer is None else await _respond(send, *answer)
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
            if path == "/update_weights" and message["type"] == "http.response.start":
                self._uploads.forget_finished()
            is_success = message["type"] == "http.response.start" and message["status"] == 200
            # Ignore a late answer to an abandoned update.
            if is_success and update == self.num_updates:
                if path == "/finish_weight_update":
                    self.is_complete = True
                    self.num_publications += 1
                elif path == "/resume":
                    self.is_open = self.is_complete
            await send(message)

        await self.app(scope, receive, watch)


class Uploads:
    """Files that a trainer sends to the transfer directory, of at most `limit` bytes together; memory does not grow
    with their size. Without a directory they are refused."""

    def __init__(self, directory: str | None, limit: int = _UPLOAD_BYTES):
        self._directory = directory
        self._limit = limit
        self._prefix = f"{owned_prefix()}upload-"
        # Contiguous bytes received of each file, by hash.
        self._received: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        # Complete files, by hash.
        self._finished: dict[str, Path] = {}
        self._checking = asyncio.Lock()
        # A trainer that finds this file shares the directory.
        self.mark = f"{self._prefix}here"
        if directory and os.path.isdir(directory):
            remove_leftovers(directory)
            Path(directory, self.mark).touch(0o600)

    async def receive(self, headers: dict[bytes, bytes], receive) -> tuple[int, dict[str, Any]] | None:
        """Receive a piece. Return status and content of the answer, `received`, the number of bytes of the file, and
        `file`, its name, once it is complete; `None` if the connection is closed."""
        digest = None
        try:
            digest, size, offset = self._parse(headers.get(UPLOAD_HEADER.encode(), b"").decode("latin-1"))
            self._make_room(digest, size)
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                data, more = message.get("body", b""), message.get("more_body", False)
                if offset + len(data) > size:
                    raise ValueError(f"The piece extends beyond the end of the file, at {size} bytes.")
                if offset <= self._received.get(digest, -1):
                    # Written at its offset, so that duplicate or concurrent pieces change nothing.
                    with self._path(digest).open("r+b", buffering=0) as file:
                        file.seek(offset)
                        file.write(data)
                    self._received[digest] = max(self._received[digest], offset + len(data))
                offset += len(data)
            # A trainer that has lost the answer sends the last piece again, perhaps while its file is checked.
            async with self._checking:
                if self._received.get(digest) == size:
                    await self._finish(digest)
            if digest in self._finished:
                return 200, {"received": size, "file": self._finished[digest].name}
            return 200, {"received": self._received.get(digest, 0)}
        except ValueError as error:
            return 400, {"error": str(error)}
        except OSError as error:
            self._forget(digest)
            return 507, {"error": f"The server cannot keep what it is sent: {error}."}

    def forget_finished(self) -> None:
        """Remove files that an update has read."""
        while self._finished:
            digest, path = self._finished.popitem()
            path.unlink(missing_ok=True)
            self._forget(digest)

    def _parse(self, header: str) -> tuple[str, int, int]:
        if not self._directory:
            raise ValueError(
                "This server does not accept weights over HTTP. Start it with `trl-qarl vllm-serve --transport file`."
            )
        # Create it again if a cleaner of temporary directories has removed it.
        make_transfer_dir(self._directory)
        match = re.fullmatch(r"([0-9a-f]{64}) (\d{1,15}) (\d{1,15})", header)
        if match is None:
            raise ValueError(f"{UPLOAD_HEADER} must be the SHA-256 of the file, its size, and the piece's offset.")
        digest, size, offset = match[1], int(match[2]), int(match[3])
        if not 0 < size <= self._limit:
            raise ValueError(f"A file of {size} bytes is refused: this server accepts up to {self._limit}.")
        if self._sizes.setdefault(digest, size) != size:
            raise ValueError("The file was announced with another size before.")
        return digest, size, offset

    def _make_room(self, digest: str, size: int) -> None:
        if digest in self._received or digest in self._finished:
            return
        # Remove the rest of an earlier attempt, unless it is the same file.
        if sum(self._sizes.values()) > self._limit:
            for other in [other for other in self._sizes if other != digest]:
                self._forget(other)
        free = shutil.disk_usage(self._directory).free
        if free < size:
            self._sizes.pop(digest)
            raise OSError(f"{size} bytes are needed in {self._directory}, {free} are free")
        with open(os.open(self._path(digest), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"):
            self._received[digest] = 0

    async def _finish(self, digest: str) -> None:
        path = self._path(digest)
        with path.open("rb") as file:
            found = await asyncio.to_thread(hashlib.file_digest, file, "sha256")
        if found.hexdigest() != digest:
            self._forget(digest)
            raise ValueError("The received file does not have the announced hash.")
        self._finished[digest] = path.rename(path.with_suffix(".safetensors"))
        self._forget(digest)

    def _forget(self, digest: str | None) -> None:
        if digest is None:
            return
        self._received.pop(digest, None)
        self._sizes.pop(digest, None)
        with suppress(OSError):
            self._path(digest).unlink()

    def _path(self, digest: str) -> Path:
        assert self._directory is not None
        return Path(self._directory, f"{self._prefix}{digest[:32]}.part")


def _is_from_a_page(headers: dict[bytes, bytes], wanted: bytes) -> bool:
    """Return whether a browser sent the request: it adds its own headers, and a page cannot send the `wanted` media
    type without a preflight."""
    media_type = headers.get(b"content-type", wanted).partition(b";")[0].strip().lower()
    return b"origin" in headers or b"sec-fetch-site" in headers or media_type != wanted


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
