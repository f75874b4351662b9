"""
The trainer's connection to a vLLM server: TRL's client, holding the server's session while it lives.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient

from .gate import SESSION_HEADER, SESSION_PATH, STATE_PATH
from .publish import PublishError


__all__ = ["QaRLClient", "ServerLost"]


# Seconds to connect, and to wait for an answer: generating a batch of long completions takes a while.
_TIMEOUT = (10, 3600)


class ServerLost(ConnectionError):
    """The server cannot be reached, or no longer knows this trainer."""


class QaRLClient(VLLMClient):
    """
    Client of a server started by `trl-qarl vllm-serve`.

    It opens the server's session, so that no second trainer can change the weights, and leaves retries to its caller: TRL's
    client repeats failed requests on its own, and an update must not be repeated in part.

    Args:
        base_url (`str`):
            Address of the server, such as `"http://127.0.0.1:8000"`.
        group_port (`int`, *optional*, defaults to `51216`):
            Port of the NCCL group.
        connection_timeout (`float`, *optional*, defaults to `0.0`):
            Seconds to wait for the server.

    Raises:
        ConnectionError: if no server answers, with the command that starts one.
        RuntimeError: if the server was started in another way, or works for another trainer.
    """

    def __init__(self, base_url: str, group_port: int = 51216, connection_timeout: float = 0.0):
        try:
            super().__init__(base_url=base_url, group_port=group_port, connection_timeout=connection_timeout)
        except requests.ConnectionError as error:
            raise ConnectionError(
                f"No vLLM server answers at {base_url} (waited {connection_timeout:g} s). Start one with `trl-qarl "
                "vllm-serve --model MODEL --scheme SCHEME --dtype DTYPE`, or set `vllm_server_autostart=True`."
            ) from error
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_maxsize=64))
        self._held: requests.Response | None = None
        self._lines: Iterator[bytes] | None = None
        self.instance: str | None = None
        self.transfer_dir: str | None = None
        self.open_session()

    def open_session(self) -> None:
        """Become the trainer of this server. A session this client held before is given up."""
        self.close_session()
        trainer = f"process {os.getpid()} on {socket.gethostname()}"
        # The server writes a line every 30 seconds, so silence for longer means that it is gone.
        url = f"{self.base_url}{SESSION_PATH}"
        held = requests.post(url, json={"trainer": trainer}, stream=True, timeout=(10, 120))
        if held.status_code == 404:
            raise RuntimeError(
                f"The server at {self.base_url} was not started by `trl-qarl vllm-serve`: it would generate before weights "
                "are published, and let two trainers change them. Start it with that command."
            )
        if held.status_code != 200:
            raise RuntimeError(
                f"{_error_text(held)} One server works for one trainer at a time: start another server."
            )
        # The iterator is kept with the response: one that is collected half way closes the connection.
        lines = held.iter_lines()
        state = json.loads(next(lines))
        self._held, self._lines = held, lines
        self.session.headers[SESSION_HEADER] = state["session"]
        self.instance, self.transfer_dir = state["instance"], state["transfer_dir"]

    def close_session(self) -> None:
        """Let another trainer use the server."""
        if self._held is not None:
            self._held.close()
            self._held = self._lines = None

    def reconnect(self, timeout: float) -> bool:
        """
        Wait up to `timeout` seconds for the server and open a session again; returns whether it is another server process.

        Raises:
            ServerLost: if no server answers in time.
        """
        self.close_session()
        instance, deadline = self.instance, time.monotonic() + timeout
        while True:
            try:
                if self.is_healthy():
                    self.open_session()
                    return self.instance != instance
            except (requests.RequestException, RuntimeError, StopIteration) as error:
                # The server notices only after a moment that the old session's connection has gone.
                if time.monotonic() >= deadline:
                    raise ServerLost(f"No vLLM server at {self.base_url} after {timeout:g} s: {error}") from error
            if time.monotonic() >= deadline:
                raise ServerLost(f"No healthy vLLM server at {self.base_url} after {timeout:g} s.")
            time.sleep(1.0)

    def is_healthy(self) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            return requests.get(f"{self.base_url}/health", timeout=10).status_code == 200
        except requests.RequestException:
            return False

    def control(self, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        """
        POST to one of the server's control endpoints.

        Raises:
            ServerLost: if the server does not answer or gave the session away.
            PublishError: if the server refuses.
        """
        try:
            response = self.session.post(f"{self.base_url}{path}", json=body or {}, timeout=_TIMEOUT)
        except requests.RequestException as error:
            raise ServerLost(f"The vLLM server at {self.base_url} did not answer {path}: {error}") from error
        if response.status_code == 409:
            raise ServerLost(f"{path}: {_error_text(response)}")
        if response.status_code != 200:
            raise PublishError(f"{path} failed with status {response.status_code}: {_error_text(response)}")
        return response

    def call_workers(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of [`~trl_qarl.rollout.engine.WorkerExtension`] on every worker and return the results."""
        return self.control("/collective_rpc", {"method": method, "kwargs": kwargs}).json()["results"]

    def weight_version(self) -> str:
        """The version that the server stamps on what it generates."""
        try:
            return self._get(f"{self.base_url}/weight_info")["weight_version"]
        except requests.RequestException as error:
            raise ServerLost(f"The vLLM server at {self.base_url} went away: {error}") from error

    def state(self) -> dict[str, Any]:
        """The gate's state: `is_open`, `num_publications`, `holder`, `instance`, `transfer_dir`."""
        return self._get(f"{self.base_url}{STATE_PATH}")

    def _post(self, url: str, **kwargs) -> dict:
        try:
            response = self.session.post(url, timeout=_TIMEOUT, **kwargs)
        except requests.RequestException as error:
            raise ServerLost(f"The vLLM server went away: {error}") from error
        # 503: nothing is published; 500: the engine behind the server has died.
        if response.status_code >= 500:
            raise ServerLost(f"{url} failed with status {response.status_code}: {_error_text(response)}")
        if response.status_code != 200:
            raise RuntimeError(f"{url} failed with status {response.status_code}: {_error_text(response)}")
        return response.json()


def _error_text(response: requests.Response) -> str:
    try:
        error = response.json().get("error", response.text)
    except ValueError:
        return response.text.strip()[:2000]
    return error.get("message", str(error)) if isinstance(error, dict) else str(error)
