"""
Uploads of weights over HTTP, in pieces, to files in the server's transfer directory, from which its workers read them.

`POST /qarl/upload` has a piece as its body, and [`UPLOAD_HEADER`] with the SHA-256 of the whole file, its size, and
the offset of the piece. The answer has the number of bytes received, so a dropped connection costs only a part of a
piece; repeated pieces are written to the same place. A file can be used in an update once it is complete and has the
announced hash. Memory does not grow with its size. Like the gate, this module needs only the standard library.
"""

import asyncio
import hashlib
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..wire.protocol import UPLOAD_HEADER
from ..wire.transfer_dir import make_transfer_dir, owned_prefix, remove_leftovers


__all__ = ["Uploads"]

_LIMIT = 2**32


class Uploads:
    """Files that a trainer sends to the transfer directory, of at most `limit` bytes together. Without a directory
    they are refused."""

    def __init__(self, directory: str | None, limit: int = _LIMIT):
        self._directory = directory
        self._limit = limit
        self._prefix = f"{owned_prefix()}upload-"
        # Contiguous bytes received of each file, by hash.
        self._received: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._finished: list[Path] = []
        # A trainer that finds this file shares the directory.
        self.mark = f"{self._prefix}here"
        if directory and os.path.isdir(directory):
            remove_leftovers(directory)
            Path(directory, self.mark).touch(0o600)

    async def receive(self, headers: dict[bytes, bytes], receive) -> tuple[int, dict[str, Any]] | None:
        """
        Receive a piece.

        Returns:
            Status and content of the answer: `received`, the number of bytes of the file, and `file`, its name, once
            it is complete; `None` if the connection is closed.
        """
        digest = None
        try:
            digest, size, offset = self._parse(headers.get(UPLOAD_HEADER.encode(), b"").decode("latin-1"))
            self._make_room(digest, size)
            # Written at its offset, so that duplicate or concurrent pieces change nothing.
            with self._path(digest, ".part").open("r+b", buffering=0) as file:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    data = message.get("body", b"")
                    if offset + len(data) > size:
                        raise ValueError(f"The piece extends beyond the end of the file, at {size} bytes.")
                    if offset <= self._received.get(digest, -1):
                        file.seek(offset)
                        file.write(data)
                        self._received[digest] = max(self._received[digest], offset + len(data))
                    offset += len(data)
                    if not message.get("more_body", False):
                        break
            if self._received.get(digest) != size:
                return 200, {"received": self._received.get(digest, 0)}
            return 200, {"received": size, "file": await self._finish(digest)}
        except ValueError as error:
            return 400, {"error": str(error)}
        except OSError as error:
            self._forget(digest)
            return 507, {"error": f"The server cannot keep what it is sent: {error}."}

    def forget_finished(self) -> None:
        """Remove files that an update has read."""
        while self._finished:
            self._finished.pop().unlink(missing_ok=True)

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
        if digest in self._received:
            return
        # Remove the rest of an earlier attempt, unless it is the same file.
        if sum(self._sizes.values()) > self._limit:
            for other in [other for other in self._sizes if other != digest]:
                self._forget(other)
        free = shutil.disk_usage(self._directory).free
        if free < size:
            self._sizes.pop(digest)
            raise OSError(f"{size} bytes are needed in {self._directory}, {free} are free")
        with open(os.open(self._path(digest, ".part"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"):
            self._received[digest] = 0

    async def _finish(self, digest: str) -> str:
        path = self._path(digest, ".part")
        if await asyncio.to_thread(_sha256, path) != digest:
            self._forget(digest)
            raise ValueError("The received file does not have the announced hash.")
        finished = self._path(digest, ".safetensors")
        path.rename(finished)
        self._finished.append(finished)
        self._forget(digest)
        return finished.name

    def _forget(self, digest: str | None) -> None:
        if digest is None:
            return
        self._received.pop(digest, None)
        self._sizes.pop(digest, None)
        with suppress(OSError):
            self._path(digest, ".part").unlink()

    def _path(self, digest: str, suffix: str) -> Path:
        assert self._directory is not None
        return Path(self._directory, f"{self._prefix}{digest[:32]}{suffix}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
