"""
Directory of a server's file transport: its place, permissions and cleanup.

Names of a trainer's files begin with its host and process, so the next trainer can find out if their owner still runs.
"""

import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from .protocol import TRANSFER_DIR_VARIABLE


_OWNED = re.compile(r"trl-qarl-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-(?P<rest>.+)")


def transfer_bases() -> list[Path]:
    """Return the parents of transfer directories: shared memory, if this host has it, and the temporary directory."""
    bases = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return [base for base in bases if os.access(base, os.W_OK | os.X_OK)]


def default_transfer_dir(port: int, num_bytes: int = 0) -> Path:
    """Return the directory of one user and port: in shared memory if it has room for the largest chunk, `num_bytes`,
    else in the temporary directory, else in the one with more room. Containers often have 64 MiB of shared memory."""
    free = {base: shutil.disk_usage(base).free for base in transfer_bases()}
    # The file has metadata, and each file system rounds up to its pages.
    needed = num_bytes + num_bytes // 8 + 2**20
    base = next((base for base, space in free.items() if space >= needed), max(free, key=free.__getitem__))
    return base / f"trl-qarl-{os.getuid()}-{port}"


def make_transfer_dir(directory: str | Path) -> None:
    """Make the directory for its owner only, or [check][check_transfer_dir] an existing one."""
    # `makedirs` accepts a link to a directory.
    if not os.path.islink(directory):
        os.makedirs(directory, mode=0o700, exist_ok=True)
    check_transfer_dir(directory)


def check_transfer_dir(directory: str | Path) -> None:
    """Raise `ValueError` unless `directory` can be written to only by the user of this process."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        problem, remedy = "is a link or not a directory", "Name the directory itself"
    elif status.st_uid != os.getuid():
        problem, remedy = f"belongs to user {status.st_uid}, not to {os.getuid()}", "Choose one of your own"
    elif status.st_mode & stat.S_ISVTX:
        problem = "is a folder for the files of all users"
        remedy = (
            f"Name a folder of your own in it, such as {Path(directory) / 'weights'}, which is made if it is missing,"
        )
    elif status.st_mode & 0o022:
        problem = f"has mode {stat.S_IMODE(status.st_mode):04o}, so others may write to it"
        remedy = "Run `chmod go-w` on it, or choose another"
    else:
        return
    raise ValueError(
        f"The transfer directory {str(directory)!r} {problem}: another user could put weights into it. {remedy} with "
        "--transfer_dir."
    )


def confined_path(directory: str | None, name: str) -> Path:
    """Return the path of `name` in `directory`, or raise `ValueError` unless it is a regular `.safetensors` file."""
    if not directory:
        raise ValueError(
            f"This server does not accept weights from files: {TRANSFER_DIR_VARIABLE} is not set. Start it with `trl-qarl "
            "vllm-serve`, or set the variable to a directory that only you can write to."
        )
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors", name):
        raise ValueError(f"{name!r} is not the name of a safetensors file in the transfer directory.")
    check_transfer_dir(directory)
    path = Path(directory) / name
    if not path.exists() and not path.is_symlink():
        raise ValueError(f"{name!r} is not in {directory!r}, which must be the same directory on the trainer's host.")
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{name!r} in {directory!r} is not a regular file.")
    return path


def owned_prefix() -> str:
    """Return the prefix of the names of this process' files and folders: host, process and its start time."""
    return f"trl-qarl-{_host()}-{os.getpid()}-{_start_time(os.getpid())}-"


def remove_leftovers(directory: str | Path, also: str | None = None) -> None:
    """Remove files of this user's killed trainers on this host from a folder, and names with `also` after their
    prefix, which no running process can use."""
    for path in Path(directory).glob("trl-qarl-*"):
        name = _OWNED.fullmatch(path.name)
        if name is None:
            continue
        is_dead = name["host"] == _host() and _start_time(int(name["pid"])) != name["start"]
        if not is_dead and not (also and name["rest"].startswith(also)):
            continue
        with suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def remove_leftover_dirs() -> None:
    """Remove the transfer directories of servers whose trainers were killed."""
    for base in transfer_bases():
        remove_leftovers(base)


def _host() -> str:
    """Return an id that differs between hosts and containers, where one process id can mean two processes."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot; `None` if it has ended."""
    try:
        # The name of the program comes before, in parentheses, and may contain any character.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
