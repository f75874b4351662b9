"""
Channels to a server, and the choice of one.

| channel | between | how |
|---|---|---|
| [`FileChannel`] | trainer and server on one host, or hosts with a shared filesystem | files in one directory |
| [`HTTPChannel`] | trainer and server anywhere | pieces of safetensors files |
| [`NCCLChannel`] | GPUs of trainer and server | vLLM's weight transfer through TRL's client |
"""

import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file

from ..wire.protocol import NCCL_BACKEND, UPLOAD_HEADER, UPLOAD_PATH, PublishError
from ..wire.transfer_dir import check_transfer_dir, make_transfer_dir, owned_prefix, remove_leftovers
from .background import BackgroundCall
from .engine import Channel, Tensors, num_bytes_of
from .http_session import ServerLost, is_local, refusals


_PIECE_BYTES = 8 * 2**20
# Smallest piece: a proxy that refuses it ends the weight sync.
_SMALLEST_PIECE = 2**16
_MAX_FAILURES = 5

GRACE_SECONDS = 30.0
"""Additional wait for NCCL after the server's request time-out: the server answers only once it has all tensors."""

logger = logging.getLogger(__name__)


class FileChannel(Channel):
    """Writes each chunk to the server's transfer directory, which must be the same directory on both hosts."""

    works_meanwhile = True
    _known_dir: str | None = None

    def begin(self) -> None:
        directory = self.client.transfer_dir
        if directory and directory == self._known_dir and not os.path.lexists(directory):
            # Cleaners of temporary directories remove folders that look unused.
            logger.warning("The transfer directory %s was removed; it is created again.", directory)
            try:
                make_transfer_dir(directory)
            except (OSError, ValueError) as error:
                raise PublishError(
                    f"The transfer directory {directory!r} was removed and cannot be created again: {error}"
                ) from error
        if not directory or not os.access(directory, os.W_OK | os.X_OK):
            raise PublishError(
                f"The server takes weights from {directory!r}, which this host cannot write to. Start the server with "
                "`trl-qarl vllm-serve --transfer_dir DIR`, where DIR is a directory that both hosts share."
            )
        check_transfer_dir(directory)
        self._known_dir = directory
        # Remove files of killed trainers only: another server may use the same directory.
        remove_leftovers(directory, also=self.client.instance)

    def send(self, tensors: Tensors) -> None:
        directory = self.client.transfer_dir
        try:
            path = self._write(tensors, directory)
        except (OSError, SafetensorError) as error:
            try:
                free = f"{shutil.disk_usage(directory).free / 2**20:.0f} MiB are free there"
            except OSError as missing:
                free = str(missing)
            raise PublishError(
                f"A chunk of weights of {num_bytes_of(tensors) / 2**20:.1f} MiB could not be written to the transfer directory "
                f"{directory!r} ({error}); {free}. Make room, start the server with `trl-qarl vllm-serve --transfer_dir DIR` on a "
                "larger file system, or give a container more shared memory (`docker run --shm-size 2g`)."
            ) from error
        try:
            self.client.control("/update_weights", {"update_info": {"file": path.name}})
        finally:
            path.unlink(missing_ok=True)

    def _write(self, tensors: Tensors, directory: str) -> Path:
        # In a separate folder: safetensors writes to a temporary file first and chooses the mode of the file.
        prefix = f"{owned_prefix()}{self.client.instance}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=directory, ignore_cleanup_errors=True) as folder:
            written = Path(folder, "chunk.safetensors")
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors}, written)
            written.chmod(0o600)
            return written.rename(f"{folder}.safetensors")


class HTTPChannel(Channel):
    """Sends each chunk to the server's gate in pieces, each a request with its own time-out. If the connection drops,
    the piece is sent again from the byte at which the server stopped; if a proxy finds it too large (status 413),
    pieces become smaller."""

    _piece_bytes = _PIECE_BYTES

    def send(self, tensors: Tensors) -> None:
        data = save({name: tensor.cpu().contiguous() for name, tensor in tensors})
        self.client.control("/update_weights", {"update_info": {"file": self._upload(memoryview(data))}})

    def _upload(self, data: memoryview) -> str:
        """Send a file and return its name on the server."""
        digest, offset, failures = hashlib.sha256(data).hexdigest(), 0, 0
        url = f"{self.client.base_url}{UPLOAD_PATH}"
        while True:
            headers = {UPLOAD_HEADER: f"{digest} {len(data)} {offset}", "Content-Type": "application/octet-stream"}
            piece = bytes(data[offset : offset + self._piece_bytes])
            try:
                answer = self.client.session.post(url, data=piece, headers=headers).json()
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


class NCCLChannel(Channel):
    """
    Broadcasts each chunk from this process' accelerator, `device`, over a group with the server's workers.

    NCCL waits for all members of a group without a time-out, and a worker joins while it answers a request. TRL's
    client posts that request in a thread and joins in the caller, which would wait forever for a server that has died
    or refused. Here both run in threads, and the caller stops at the first error.
    """

    def __init__(self, client, device: torch.device | None = None):
        super().__init__(client)
        self.device = device

    def connect(self) -> None:
        # Again after a failed broadcast, which leaves the two sides out of step.
        self.client.close_communicator()
        self._join(partial(self.client.init_communicator, device=self.device))

    def send(self, tensors: Tensors) -> None:
        tensors = [(name, tensor.to(torch.accelerator.current_accelerator())) for name, tensor in tensors]
        metadata = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors]
        # NCCL reads them in other streams, which do not wait for the kernels that produce them.
        torch.accelerator.synchronize()
        # With this flag TRL's client sends only tensors.
        self.client._updating_weights = True
        try:
            self._join(partial(self.client.update_named_params, metadata, iter(tensors)))
        finally:
            self.client._updating_weights = False

    def _join(self, function: Callable[[], None]) -> None:
        """Call `function`, which posts a request and joins the group; raise [`ServerLost`] if it does not end in time.
        A daemon thread that never ends stays behind."""
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        seconds = self.client.session.request_timeout + GRACE_SECONDS

        def join() -> None:
            if device is not None:
                # Every thread starts on the first device.
                torch.accelerator.set_device_index(device)
            function()

        self.client.joining = call = BackgroundCall()
        call.start(join)
        try:
            with refusals():
                try:
                    call.answer(seconds)
                except TimeoutError as error:
                    raise ServerLost(f"NCCL did not end within {seconds:g} s.") from error
                except (NotImplementedError, ServerLost):
                    raise
                except (OSError, RuntimeError) as error:
                    raise ServerLost(f"NCCL failed: {error}") from error
        except (ServerLost, PublishError):
            # vLLM's communicator then stops waiting.
            getattr(self.client.communicator, "destroy", lambda: None)()
            raise
        finally:
            self.client.joining = None


def choose_channel(
    client, wanted: str = "auto", allow_plain_http: bool = False, device: torch.device | None = None
) -> tuple[Channel, str]:
    """
    Return the channel to a server, and the reason for the choice in words.

    `wanted` is `"file"`, `"nccl"`, `"http"` or `"auto"`: NCCL from `device` if the server was started for it, else
    files if the server's transfer directory is on this host too, else HTTP. `ValueError` is raised for a channel that
    the server was not started for, and for plain HTTP to another host unless `allow_plain_http`.
    """
    backend = client.call_workers("qarl_describe")[0]["backend"]
    if (wanted == "nccl") != (backend == NCCL_BACKEND) and wanted != "auto":
        raise ValueError(
            f"vllm_transport={wanted!r}, but the server was started for {'NCCL' if backend == NCCL_BACKEND else 'files and HTTP'}. "
            f"Start it with `--transport {'nccl' if wanted == 'nccl' else 'file'}`, or leave out vllm_transport."
        )
    if backend == NCCL_BACKEND:
        return NCCLChannel(client, device), "the server was started for it"
    if wanted == "file":
        return FileChannel(client), "asked for"
    if wanted == "auto" and Path(client.transfer_dir or "", client.transfer_mark or "").is_file():
        return FileChannel(client), "the server's transfer directory is on this host"
    url = urlsplit(client.base_url)
    if url.scheme != "https" and not is_local(url.hostname) and not allow_plain_http:
        raise ValueError(
            f"Weights would travel to {client.base_url} in clear text: this host does not see the server's transfer directory "
            f"{client.transfer_dir!r}. Start the server with `--ssl-certfile` and `--ssl-keyfile` and use https:// (and "
            "`vllm_ssl_ca_certs` for a certificate of your own), give both a directory with `--transfer_dir`, or set "
            "`vllm_allow_plain_http=True` for a private network."
        )
    reason = "asked for" if wanted == "http" else "this host does not see the server's transfer directory"
    return HTTPChannel(client), reason


def sends_changes(channel: Channel, wanted: bool | None) -> bool:
    """Return `wanted`, or by default `True` only over HTTP: elsewhere, finding the changes takes longer than sending
    everything. Over NCCL `True` raises `ValueError`."""
    if wanted and isinstance(channel, NCCLChannel):
        raise ValueError(
            "vllm_delta_sync=True, but the server takes weights over NCCL, which is faster than finding out what changed. Remove "
            "it, or start the server with `--transport file`."
        )
    return isinstance(channel, HTTPChannel) if wanted is None else wanted
