"""Weights over HTTP or HTTPS, for a server that shares neither file system nor NCCL; and which transport a server
gets."""

import hashlib
import logging
import time
from pathlib import Path
from urllib.parse import urlsplit

from safetensors.torch import save

from ..wire.protocol import NCCL_BACKEND, UPLOAD_HEADER, UPLOAD_PATH, PublishError
from .http_session import ServerLost, is_local
from .transports import FileTransport, NCCLTransport, ServerTransport, Tensors


__all__ = ["HTTPTransport", "choose_transport", "sends_changes"]

_PIECE_BYTES = 8 * 2**20
# Smallest piece: a proxy that refuses it ends the weight sync.
_SMALLEST_PIECE = 2**16
_MAX_FAILURES = 5

logger = logging.getLogger(__name__)


class HTTPTransport(ServerTransport):
    """
    Sends each chunk to the server's gate in pieces, each a request with a time-out of its own. A piece whose
    connection is dropped is sent again from where the server has it; one that a proxy takes for too large (status 413)
    in smaller pieces.
    """

    _piece_bytes = _PIECE_BYTES

    def send(self, tensors: Tensors) -> None:
        data = save({name: tensor.cpu().contiguous() for name, tensor in tensors})
        self.client.control("/update_weights", {"update_info": {"file": self._upload(memoryview(data))}})

    def _upload(self, data: memoryview) -> str:
        """Send a file and return its name on the server."""
        digest, offset, failures = hashlib.sha256(data).hexdigest(), 0, 0
        while True:
            piece = data[offset : offset + self._piece_bytes]
            try:
                answer = self._post(digest, len(data), offset, piece)
                if isinstance(answer.get("file"), str):
                    return answer["file"]
                received = int(answer["received"])
                failures = 0 if received > offset else failures + 1
                offset = min(received, len(data) - 1)
            except ServerLost as error:
                if error.status == 413 and self._piece_bytes > _SMALLEST_PIECE:
                    self._piece_bytes //= 2
                    logger.warning(
                        "A proxy between trainer and server refuses large bodies; sending pieces of %d bytes.",
                        self._piece_bytes,
                    )
                    continue
                if error.status not in (None, 502, 503, 504):
                    raise PublishError(str(error)) from error
                failures += 1
                if failures > _MAX_FAILURES or self.client.has_lost_session():
                    raise
                time.sleep(min(0.1 * 2.0**failures, 5.0))
            except (KeyError, TypeError, ValueError) as error:
                raise PublishError(
                    f"{UPLOAD_PATH} did not answer with the number of bytes that arrived: {error!r}"
                ) from error
            if failures > _MAX_FAILURES:
                raise PublishError(f"{UPLOAD_PATH}: {failures} pieces of weights had no effect.")

    def _post(self, digest: str, size: int, offset: int, piece: memoryview) -> dict:
        headers = {UPLOAD_HEADER: f"{digest} {size} {offset}", "Content-Type": "application/octet-stream"}
        response = self.client.session.post(f"{self.client.base_url}{UPLOAD_PATH}", data=bytes(piece), headers=headers)
        return response.json()


def choose_transport(client, wanted: str = "auto", allow_plain_http: bool = False) -> tuple[ServerTransport, str]:
    """
    Return how weights reach a server, and why in words.

    Args:
        client ([`~trl_qarl.rollout.client.QaRLClient`]):
            With a session.
        wanted (`str`, *optional*, defaults to `"auto"`):
            `"file"`, `"nccl"`, `"http"` or `"auto"`, which is NCCL for a server that was started for it, else files if
            the server's transfer directory is on this host too, else HTTP.
        allow_plain_http (`bool`, *optional*, defaults to `False`):
            Whether weights may travel to another host in clear text.

    Raises:
        ValueError: for a transport that the server was not started for, or clear text to another host.
    """
    backend = client.call_workers("qarl_describe")[0]["backend"]
    if (wanted == "nccl") != (backend == NCCL_BACKEND) and wanted != "auto":
        raise ValueError(
            f"vllm_transport={wanted!r}, but the server was started for {'NCCL' if backend == NCCL_BACKEND else 'files and HTTP'}. "
            f"Start it with `--transport {'nccl' if wanted == 'nccl' else 'file'}`, or leave out vllm_transport."
        )
    if backend == NCCL_BACKEND:
        return NCCLTransport(client), "the server was started for it"
    if wanted == "file" or (wanted == "auto" and _shares_directory(client)):
        return FileTransport(
            client
        ), "asked for" if wanted == "file" else "the server's transfer directory is on this host"
    url = urlsplit(client.base_url)
    if url.scheme != "https" and not is_local(url.hostname) and not allow_plain_http:
        raise ValueError(
            f"Weights would travel to {client.base_url} in clear text: this host does not see the server's transfer directory "
            f"{client.transfer_dir!r}. Start the server with `--ssl-certfile` and `--ssl-keyfile` and use https:// (and "
            "`vllm_ssl_ca_certs` for a certificate of your own), give both a directory with `--transfer_dir`, or set "
            "`vllm_allow_plain_http=True` for a private network."
        )
    return HTTPTransport(
        client
    ), "asked for" if wanted == "http" else "this host does not see the server's transfer directory"


def sends_changes(transport: ServerTransport, wanted: bool | None) -> bool:
    """
    Return whether only changes are sent: as `wanted`, by default only over HTTP; elsewhere looking for it takes longer
    than sending everything.

    Raises:
        ValueError: if it is wanted over NCCL.
    """
    if wanted and isinstance(transport, NCCLTransport):
        raise ValueError(
            "vllm_delta_sync=True, but the server takes weights over NCCL, which is faster than finding out what changed. Leave it "
            "out, or start the server with `--transport file`."
        )
    return isinstance(transport, HTTPTransport) if wanted is None else wanted


def _shares_directory(client) -> bool:
    # A server without a mark is one of an earlier release.
    return client.transfer_mark is None or Path(client.transfer_dir or "", client.transfer_mark).exists()
