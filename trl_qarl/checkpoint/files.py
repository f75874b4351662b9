"""
Locks that reserve a folder for one trainer, permissions of new files, and detection of disk errors. Needs no torch.

A folder is held by an `flock` on a file in it, which ends with the process in any case.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TextIO
from weakref import WeakSet

from safetensors import SafetensorError, safe_open


OUTPUT_LOCK = ".lock"
"""Name of the lock in an `output_dir`; pushes skip files that begin with a dot."""

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
_held: WeakSet[TextIO] = WeakSet()


def hold(lock: Path) -> TextIO:
    """Hold the output directory of a lock file until the returned file is closed. Folder and file are created if
    missing, and the file names its holder. `ValueError` is raised if another trainer holds it. A file system without
    locks only gets a warning."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = lock.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"output_dir={str(lock.parent)!r} belongs to {holder}, which is still training. Choose another folder."
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
        message = (
            "output_dir=%r is on a file system without locks (%s): a second trainer that writes there is not refused."
        )
        logger.warning(message, str(lock.parent), error.strerror)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _held.add(file)
    _leave_to_parent()
    return file


def check_free(lock: Path) -> None:
    """Raise `ValueError` if another trainer holds the folder of a lock."""
    if lock.exists():
        hold(lock).close()


@lru_cache(maxsize=1)
def _leave_to_parent() -> None:
    """Close locks in forked children, which inherit them and may outlive a killed trainer."""
    os.register_at_fork(after_in_child=lambda: [file.close() for file in list(_held)])


def check_writable(folder: str | Path) -> None:
    """Raise `ValueError` if a folder cannot be made, or nothing be written to it."""
    if folder == "":
        raise ValueError("'' is no folder. Name one.")
    path = Path(folder).absolute()
    try:
        existing = next(each for each in (path, *path.parents) if each.exists())
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(folder)!r} cannot be a folder: {error}. Name another one.") from error
    if not existing.is_dir():
        raise ValueError(f"{str(folder)!r} cannot be a folder: {existing} is a file. Name another one.")
    try:
        # Root has the permission everywhere, also in /proc.
        os.rmdir(tempfile.mkdtemp(dir=existing))
    except OSError as error:
        raise ValueError(
            f"{str(folder)!r}: nothing can be written to {existing} ({error.strerror}). Name another folder."
        ) from error


def allow_as_umask(paths: Iterable[Path]) -> None:
    """Give files the default permissions of new files in their folder. Safetensors ignores the umask and writes files
    for their owner only."""
    for path in paths:
        new = path.with_name(f"{path.name}.new")
        new.touch()
        path.chmod(new.stat().st_mode & 0o777)
        new.unlink()


def damaged_file(folder: str | Path) -> str | None:
    """Return the first file of safetensors in a folder whose header or length is wrong, `None` for a name of the
    Hub or if there is none."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, "numpy"):
                pass
        except SafetensorError:
            return str(path)
    return None


def is_of_the_disk(error: Exception) -> bool:
    """Return whether an error means that a file could not be written."""
    # Libraries in Rust raise a plain `Exception` with the text of an io::Error: "No space left ... (os error 28)".
    return isinstance(error, OSError | SafetensorError) or "(os error " in str(error)


@contextmanager
def name_disk_errors(folder: Path) -> Iterator[None]:
    """Turn the errors of libraries that could not write a file to `folder` into `OSError`, which names the folder and
    the usual reason. torch says "iostream error" or "unexpected pos" instead."""
    try:
        yield
    except OSError as error:
        # A write to an open file does not name it.
        if error.errno is not None and error.filename is None:
            error.filename = str(folder)
        raise
    except Exception as error:
        if not (is_of_the_disk(error) or re.search("iostream error|unexpected pos", str(error))):
            raise
        free = shutil.disk_usage(folder).free / 2**20
        raise OSError(
            errno.ENOSPC,
            f"No space left on the device, or over a quota ({free:.0f} MiB are free there now). A file could not be written: {error}",
            str(folder),
        ) from error
