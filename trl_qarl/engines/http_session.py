"""HTTP requests that raise an error unless the server answers in time with an expected status."""

import ipaddress
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import requests
from typing_extensions import override

from ..wire.handshake import json_object
from ..wire.protocol import PublishError


_CONNECT_SECONDS = 10

REQUEST_SECONDS = 300.0
"""Wait for an answer to a request that does not generate. The longest of them loads a chunk of weights, or compares
all tensors of a large model, which takes a slow CPU a minute or two."""

GENERATION_SECONDS = 7200.0
"""Wait for the completions of a whole generation batch, which one request asks for and which on a CPU may take an
hour. Only an engine that hangs costs this time: one that dies ends the request."""

_GENERATING_PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


class ServerLost(ConnectionError):
    """A request failed: the server cannot be reached, does not answer in time, or no longer knows this trainer.
    `status` is the status of the response, if there was one."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


@contextmanager
def refusals() -> Iterator[None]:
    """Turn a server's refusal of a request into [`PublishError`], unless the session is invalid (status 409)."""
    try:
        yield
    except ServerLost as error:
        if error.status in (None, 409):
            raise
        raise PublishError(str(error)) from error


class CheckedSession(requests.Session):
    """
    Session whose requests, including TRL's, either get one of the `expected` statuses in time or raise [`ServerLost`].
    Proxies of the environment are not used for addresses of this machine.
    """

    @override
    def request(self, method, url, *, expected: Collection[int] = (200,), **kwargs):
        parts = urlsplit(url)
        self.trust_env = not is_local(parts.hostname)
        generates = method == "POST" and parts.path.endswith(_GENERATING_PATHS)
        kwargs.setdefault("timeout", (_CONNECT_SECONDS, GENERATION_SECONDS if generates else REQUEST_SECONDS))
        try:
            response = super().request(method, url, **kwargs)
        except requests.ReadTimeout as error:
            waited = kwargs["timeout"][1] if isinstance(kwargs["timeout"], tuple) else kwargs["timeout"]
            remedy = "Generate fewer or shorter completions in a batch, or see" if generates else "See"
            raise ServerLost(
                f"The vLLM server did not answer {url} within {waited:g} s. {remedy} the log of the server for what holds it up."
            ) from error
        except requests.RequestException as error:
            # The innermost reason, without the wrappers of requests and urllib3.
            reason = getattr(error.args[0], "reason", error) if error.args else error
            raise ServerLost(f"The vLLM server did not answer {url}: {reason}") from error
        if response.status_code not in expected:
            raise ServerLost(
                f"{url} failed with status {response.status_code}: {error_text(response)}", response.status_code
            )
        return response


def server_urls(given: str | Sequence[str] | None) -> list[str]:
    """Return the addresses in `vllm_server_base_url`, a list or a text that separates them by commas or spaces,
    without the `/v1` of OpenAI's clients."""
    urls = given if isinstance(given, list | tuple) else str(given or "").replace(",", " ").split()
    return [str(url).rstrip("/").removesuffix("/v1") for url in urls]


def is_local(host: str | None) -> bool:
    """Return whether `host`, a name or an address, is this machine."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def json_of(response: requests.Response, failure: type[Exception] = ServerLost) -> dict[str, Any]:
    """Return the JSON object in a response, or raise `failure`."""
    try:
        return response.json()
    except ValueError as error:
        raise failure(f"{response.url} did not answer with JSON: {response.text[:200]!r}") from error


def check_finished(url: str, answer: Any) -> Any:
    """Return the `answer` of a server, or raise [`ServerLost`] if its completions were cut short: vLLM's
    `/pause?mode=abort` ends them with status 200, and TRL's client drops the reason."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    reasons = [choice.get("finish_reason") for choice in choices or () if isinstance(choice, dict)]
    if num_cut := reasons.count("abort"):
        raise ServerLost(f"{url} cut {num_cut} of {len(reasons)} completions short: it was told to abort them.")
    return answer


def error_text(response: requests.Response) -> str:
    """Return the error message of a response."""
    error = json_object(response.content).get("error", response.text.strip()[:2000])
    return error.get("message", str(error)) if isinstance(error, dict) else str(error)
