"""HTTP requests that raise an error unless the server answers in time with an expected status."""

import ipaddress
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from typing_extensions import override

from ..wire.handshake import json_object
from ..wire.protocol import PublishError


_CONNECT_SECONDS = 10
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
    The arguments are those of [`~trl_qarl.rollout.client.QaRLClient`]. Proxies and certificates of the environment
    are not used for addresses of this machine. `ValueError` is raised for a certificate that is not trusted.
    """

    def __init__(self, request_timeout: float, generation_timeout: float, ca_certs: str | Path | None = None):
        super().__init__()
        self.ca_certs = None if ca_certs is None else str(ca_certs)
        self.request_timeout = request_timeout
        self.generation_timeout = generation_timeout

    @override
    def request(self, method, url, *, expected: Collection[int] = (200,), **kwargs):
        parts = urlsplit(url)
        self.trust_env = not is_local(parts.hostname)
        generates = method == "POST" and parts.path.endswith(_GENERATING_PATHS)
        seconds = self.generation_timeout if generates else self.request_timeout
        kwargs.setdefault("timeout", (_CONNECT_SECONDS, seconds))
        if self.ca_certs is not None:
            # Set per request: REQUESTS_CA_BUNDLE would override the session's.
            kwargs.setdefault("verify", self.ca_certs)
        try:
            response = super().request(method, url, **kwargs)
        except requests.ReadTimeout as error:
            option = "vllm_generation_timeout" if generates else "vllm_request_timeout"
            waited = kwargs["timeout"][1] if isinstance(kwargs["timeout"], tuple) else kwargs["timeout"]
            raise ServerLost(
                f"The vLLM server did not answer {url} within {waited:g} s. If it only needs more time, raise `{option}`."
            ) from error
        except requests.exceptions.SSLError as error:
            if "CERTIFICATE_VERIFY_FAILED" not in str(error):
                raise ServerLost(f"The vLLM server did not answer {url}: {error}") from error
            reason = re.search(r"certificate verify failed: ([^(]*)", str(error))
            raise ValueError(
                f"The certificate of the server at {url} is not trusted: {reason[1].strip() if reason else error}. If it is your own, set "
                "`vllm_ssl_ca_certs` to a file with this certificate, or with its issuer's."
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
