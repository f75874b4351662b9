"""
Channels to a server, and the choice of one.

| channel | between | how |
|---|---|---|
| [`FileChannel`] | trainer and server on one host, or hosts with a shared filesystem | files in one directory |
| [`NCCLChannel`] | GPUs of trainer and server | vLLM's weight transfer through TRL's client |
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..engines import http_session
from ..engines.background import BackgroundCall
from ..engines.engine import Channel, Tensors, num_bytes_of
from ..engines.http_session import ServerLost, refusals
from ..wire.protocol import NCCL_BACKEND, PublishError
from ..wire.transfer_dir import check_transfer_dir, make_transfer_dir, owned_prefix, remove_leftovers


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
        seconds = http_session.REQUEST_SECONDS + GRACE_SECONDS

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


def choose_channel(client, device: torch.device | None = None) -> tuple[Channel, str]:
    """
    Return the channel to a server, and the reason for the choice in words: NCCL from `device` if the server was
    started for it, else files if the server's transfer directory is on this host too. `ValueError` is raised without
    either.
    """
    if client.call_workers("qarl_describe")[0]["backend"] == NCCL_BACKEND:
        return NCCLChannel(client, device), "the server was started for it"
    if Path(client.transfer_dir or "", client.transfer_mark or "").is_file():
        return FileChannel(client), "the server's transfer directory is on this host"
    raise ValueError(
        f"Weights cannot reach the server at {client.base_url}: this host does not see its transfer directory "
        f"{client.transfer_dir!r}. Either start it with `trl-qarl vllm-serve --transfer_dir DIR`, where DIR is a directory that both "
        "hosts share at the same path, or, for GPUs on both sides, with `--transport nccl`. An SSH tunnel "
        "(`ssh -N -L 8000:127.0.0.1:8000 HOST`) carries prompts and completions only."
    )
