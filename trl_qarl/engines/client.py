"""The trainer's connection to a vLLM server: TRL's client, which holds the server's session."""

import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient
from typing_extensions import override

from ..wire.handshake import is_proof, json_object, proof, read_token_file
from ..wire.protocol import SESSION_HEADER, SESSION_PATH, STATE_PATH, values_of
from .background import BackgroundCall, within
from .http_session import CheckedSession, ServerLost, check_finished, error_text, json_of, refusals
from .pictures import PICTURE_PATH, complete_prompts, draw_again


_HEALTH_SECONDS = 10
# Time for all requests of a handshake. Those of `requests` begin anew with each byte that arrives, so whoever has
# taken the port could hold the trainer for ever.
_HANDSHAKE_SECONDS = 60.0
# A server detects a closed session within milliseconds.
_REFUSAL_SECONDS = 10.0

# TRL's path for prompts without pictures.
_TEXT_PATH = "/v1/completions"

# The only requests before the process at the port has proved that it is the server.
_HANDSHAKE_PATHS = ("/health", STATE_PATH, SESSION_PATH)


_clients: weakref.WeakSet["QaRLClient"] = weakref.WeakSet()


class QaRLClient(VLLMClient):
    """
    Client of a server started by `trl-qarl vllm-serve`.

    It opens the server's session, so that no second trainer can change the weights, after both sides have proved that
    they know the same secret. Without a session only the requests of this handshake are sent. The caller decides about
    retries: TRL's client repeats failed requests, but an update must not be repeated in part.

    Args:
        base_url, group_port:
            Address of the server, such as `"http://127.0.0.1:8000"`, and port of the NCCL group.
        connection_timeout:
            Seconds to wait for the server.
        token, token_file:
            The secret of a server that was started here, or a file that contains it. Defaults to the file that the
            server names, which only the same user can read.
        start_command:
            Command that starts a server, for the error if none answers.

    Raises:
        ConnectionError: if no server answers, with the command that starts one.
        ValueError: if the server was started in another way, works for another trainer, has another secret or does not
            prove that it knows the secret; if the token file cannot be read or other users can read it.
    """

    session: CheckedSession
    placeholders: frozenset[int] = frozenset()
    """Token ids that stand for pictures."""
    communicator: Any = None
    joining: BackgroundCall | None = None
    """Call that joins NCCL's group; a request that fails meanwhile ends it."""

    def __init__(
        self,
        base_url: str,
        group_port: int = 51216,
        connection_timeout: float = 0.0,
        token: str | None = None,
        token_file: str | Path | None = None,
        start_command: str = "trl-qarl vllm-serve --model MODEL --scheme SCHEME --dtype DTYPE",
    ):
        self._token, self._token_file = token, token_file
        self._held: requests.Response | None = None
        self._lines: Iterator[bytes] | None = None
        self.instance = self.transfer_dir = self.transfer_mark = None
        try:
            super().__init__(base_url=base_url, group_port=group_port, connection_timeout=connection_timeout)
        except ServerLost as error:
            raise ConnectionError(
                f"No vLLM server answers at {base_url} (waited {connection_timeout:g} s: {error}). Start one with "
                f"`{start_command}`, or set `vllm_server_autostart=True` without `vllm_server_base_url`."
            ) from error

    @override
    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """Waits for the server and opens its session. The constructor calls this before its first request."""
        self.session = CheckedSession()
        self.session.mount("http://", _SessionAdapter(self, pool_maxsize=64))
        deadline = time.monotonic() + total_timeout
        while True:
            try:
                self._ask_for_health()
                return self.open_session()
            except ServerLost:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(retry_interval)

    def _in_time(self, function: Callable[[], Any]) -> Any:
        try:
            return within(_HANDSHAKE_SECONDS, function)
        except TimeoutError as error:
            raise ServerLost(
                f"The process at {self.base_url} did not end its answer within {_HANDSHAKE_SECONDS:g} s. It may not be a server: "
                "identify it with `ss -ltnp`."
            ) from error

    def _ask_for_health(self) -> None:
        self._in_time(
            partial(self.session.get, f"{self.base_url}/health", timeout=_HEALTH_SECONDS, allow_redirects=False)
        )

    def open_session(self) -> None:
        """Become the trainer of this server. An earlier session of this client, or of another in this process, ends: a
        notebook's cell that runs again makes its trainer before it drops the earlier one."""
        self.close_session()
        self._held, self._lines, state = self._in_time(self._shake_hands)
        _clients.add(self)
        self.session.headers[SESSION_HEADER] = state["session"]
        self.instance, self.transfer_dir = state["instance"], state["transfer_dir"]
        self.transfer_mark = state.get("transfer_mark")

    def _shake_hands(self) -> tuple[requests.Response, Iterator[bytes], dict[str, Any]]:
        """Return the open response of a session, its lines, and what the server says of itself."""
        trainer = f"process {os.getpid()} on {socket.gethostname()}"
        # Redirections would lead to another server.
        opening = {"expected": range(200, 500), "allow_redirects": False}
        challenge = self.session.request("GET", f"{self.base_url}{STATE_PATH}", **opening)
        if challenge.status_code == 404:
            raise ValueError(
                f"The server at {self.base_url} was not started by `trl-qarl vllm-serve`: it would generate before weights "
                "are published, and let two trainers change them. Start it with that command."
            )
        state = json_object(challenge.content)
        if state.get("holder") == trainer:
            state = self._take_over(state)
        token, source = self._find_token(state.get("token_file"))
        nonces = [secrets.token_hex(16), state.get("nonce")]
        request = {"trainer": trainer, "nonce": nonces[0], "proof": proof(token, "trainer", nonces, trainer)}
        held = self.session.request("POST", f"{self.base_url}{SESSION_PATH}", json=request, stream=True, **opening)
        if held.status_code == 409:
            raise ValueError(f"{error_text(held)} One server works for one trainer at a time: start another server.")
        if held.status_code == 403:
            raise ValueError(
                f"The server at {self.base_url} has another secret than this trainer, which has it from {source}: "
                f"{error_text(held)} Set `vllm_token_file` to the file that the server was started with "
                f"({state.get('token_file')!r} on its host), or to a copy of it."
            )
        if held.status_code != 200:
            raise ValueError(f"The server at {self.base_url} opened no session: {error_text(held)}")
        # Keep the iterator with the response: it closes the connection when it is garbage-collected early.
        lines = held.iter_lines()
        try:
            state = json_object(next(lines, b""))
        except requests.RequestException as error:
            raise ServerLost(f"The vLLM server did not answer {held.url}: {error}") from error
        if not is_proof(state.pop("proof", None), token, "server", nonces, state):
            held.close()
            raise ValueError(
                f"The process that listens at {self.base_url} did not prove that it knows the secret of the trainer's server, which "
                f"the trainer has from {source}. It may have taken the port while the server was down, so it gets no weights. "
                "Identify it (`ss -ltnp`), end it and start the server again."
            )
        return held, lines, state

    def _take_over(self, state: dict[str, Any]) -> dict[str, Any]:
        """Close this process' session of the server with this state, and return its state once it has noticed."""
        for client in [*_clients]:
            if client.instance == state.get("instance"):
                client.close_session()
        deadline = time.monotonic() + _REFUSAL_SECONDS
        while state.get("holder") is not None and time.monotonic() < deadline:
            time.sleep(0.02)
            state = json_object(self.session.get(f"{self.base_url}{STATE_PATH}", allow_redirects=False).content)
        return state

    def _find_token(self, named_by_server: Any) -> tuple[str, str]:
        """Return the secret and its source in words. A file is read each time: a restarted server may have another."""
        if self._token is not None:
            return self._token, "the server's start"
        path = self._token_file or named_by_server
        if not isinstance(path, (str, Path)):
            raise ValueError(
                f"The server at {self.base_url} names no file with the secret that a trainer must know. Start it with "
                "`trl-qarl vllm-serve --token_file FILE` and set `vllm_token_file` to that file, or to a copy of it."
            )
        try:
            return read_token_file(path), f"the file {str(path)!r}"
        except ValueError as error:
            raise ValueError(
                f"{error} A trainer must know the secret of the server at {self.base_url}: copy the server's token file "
                f"({named_by_server!r} on its host) to this host, with mode 0600, and set `vllm_token_file` to the copy."
            ) from error

    def has_lost_session(self) -> bool:
        """Return whether the server has closed the session's connection, which happens only when the server ends."""
        held = self._held
        sock = None if held is None else getattr(held.raw.connection, "sock", None)
        if sock is None:
            return False
        sock.settimeout(0)
        try:
            # Meanwhile the server writes empty lines to keep the connection alive.
            while sock.recv(4096):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def close_session(self) -> None:
        """Let another trainer use the server. From now on only a new handshake is sent."""
        self.session.headers.pop(SESSION_HEADER, None)
        if self._held is not None:
            self._held.close()
            self._held = self._lines = None

    def reconnect(self, timeout: float) -> bool:
        """
        Wait up to `timeout` seconds for the server and open a session again. Return whether the server is a new
        process. [`ServerLost`] is raised if no server answers in time, and earlier for one that opens no session: it
        works for another trainer, or something else has taken the port.
        """
        self.close_session()
        instance, start, refused_since = self.instance, time.monotonic(), None
        while True:
            # Pooled connections still lead to the previous process.
            self.session.close()
            reason: Exception
            try:
                self._ask_for_health()
                self.open_session()
                return self.instance != instance
            except OSError as error:
                reason, refused_since = error, None
            except (RuntimeError, StopIteration, ValueError, KeyError) as error:
                # The server needs a moment to detect that the old session has been closed.
                reason, refused_since = error, refused_since or time.monotonic()
            now = time.monotonic()
            if now - start >= timeout or (refused_since is not None and now - refused_since >= _REFUSAL_SECONDS):
                raise ServerLost(f"No vLLM server at {self.base_url} after {now - start:.0f} s: {reason}")
            time.sleep(1.0)

    def is_healthy(self) -> bool:
        """Return whether the server answers and its engine lives."""
        try:
            self._ask_for_health()
            return True
        except ServerLost:
            return False

    def control(
        self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> requests.Response:
        """POST to one of the server's control endpoints; errors are raised as by [`refusals`]."""
        with refusals():
            return self.session.post(f"{self.base_url}{path}", json=body or {}, headers=headers)

    def call_workers(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of [`~trl_qarl.vllm_plugin.worker.WorkerExtension`] on every worker and return the results;
        errors are raised as by [`values_of`]."""
        call = secrets.token_hex(4)
        answer = self.control("/collective_rpc", {"method": method, "kwargs": {**kwargs, "call": call}})
        return values_of(json_of(answer)["results"], call)

    def weight_version(self) -> str:
        """Return the version that the server stamps on what it generates."""
        return self._get(f"{self.base_url}/weight_info")["weight_version"]

    @override
    def image_features(self, images, max_concurrent_requests=None):
        """Return pictures as they are: the server processes them together with their prompts."""
        return images

    @override
    def _generate_from_features(self, prompts, features, sampling_params, *args, **kwargs):
        """Sends pictures with their prompts and returns the server's expanded prompts."""
        post = partial(self._post, f"{self.base_url}{PICTURE_PATH}")
        return complete_prompts(post, self.model, prompts, features, sampling_params, self.placeholders)

    @override
    def _get(self, url: str, **kwargs) -> dict:
        return json_of(self.session.get(url, **kwargs))

    @override
    def _post(self, url: str, **kwargs) -> dict:
        """Draws completions of text with a sampled placeholder again; `complete_prompts` does so for pictures."""
        answer = self._post_once(url, **kwargs)
        if self.placeholders and url == f"{self.base_url}{_TEXT_PATH}":
            answer["choices"] = self._draw_text_again(kwargs["json"], answer["choices"])
        return answer

    def _draw_text_again(self, body: dict[str, Any], choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        def draw(places: list[int]) -> list[dict[str, Any]]:
            prompts = [body["prompt"][place // body["n"]] for place in places]
            # With the seed of the request the same tokens would be drawn again.
            return self._post_once(
                f"{self.base_url}{_TEXT_PATH}", json=body | {"prompt": prompts, "n": 1, "seed": None}
            )["choices"]

        return draw_again(choices, itemgetter("token_ids"), self.placeholders, draw)

    def _post_once(self, url: str, **kwargs) -> dict:
        # 503: nothing is published; 500: the engine behind the server has died.
        try:
            return check_finished(url, json_of(self.session.post(url, **kwargs)))
        except ServerLost as error:
            if self.joining is not None:
                self.joining.fail(error)
            raise


class _SessionAdapter(HTTPAdapter):
    """Sends requests only while the server keeps the session's connection open; without one, only a handshake's."""

    def __init__(self, client: QaRLClient, **kwargs):
        super().__init__(**kwargs)
        # A strong reference would form a cycle, and the session would end only at the next garbage collection.
        self._client = weakref.ref(client)

    def send(self, request, *args, **kwargs):
        client = self._client()
        if client is not None:
            if client.has_lost_session():
                raise requests.ConnectionError("the server has ended the session", request=request)
            path = urlsplit(request.url).path.removeprefix(urlsplit(client.base_url).path)
            if client._held is None and path not in _HANDSHAKE_PATHS:
                raise requests.ConnectionError("this trainer holds no session of the server", request=request)
        return super().send(request, *args, **kwargs)
