"""
The directory of a server's file transport: its place, its permissions and its cleanup.

The names that a trainer puts into it begin with its host and process, from which the next one tells whether their
owner still lives.
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


__all__ = [
    "check_transfer_dir",
    "confined_path",
    "default_transfer_dir",
    "make_transfer_dir",
    "owned_prefix",
    "remove_leftover_dirs",
    "remove_leftovers",
    "transfer_bases",
]

_OWNED = re.compile(r"trl-qarl-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-(?P<rest>.+)")


def transfer_bases() -> list[Path]:
    """Return where transfer directories can be: shared memory, if this host has it, and the temporary directory."""
    bases = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return [base for base in bases if os.access(base, os.W_OK | os.X_OK)]


def default_transfer_dir(port: int, num_bytes: int = 0) -> Path:
    """
    Return the directory of one user and port: in shared memory if it has room for the largest chunk, `num_bytes`, else
    in the temporary directory, else where there is more room. Containers often have 64 MiB of shared memory.
    """
    bases = transfer_bases()
    free = [shutil.disk_usage(base).free for base in bases]
    # Metadata of the file and the page that each file system rounds up to.
    needed = num_bytes + num_bytes // 8 + 2**20
    fitting = [base for base, space in zip(bases, free, strict=True) if space >= needed]
    base = fitting[0] if fitting else bases[free.index(max(free))]
    return base / f"trl-qarl-{os.getuid()}-{port}"


def make_transfer_dir(directory: str | Path) -> None:
    """Make the directory only for its owner; what exists is [checked][check_transfer_dir]."""
    # A link to a directory would pass for one.
    if not os.path.islink(directory):
        os.makedirs(directory, mode=0o700, exist_ok=True)
    check_transfer_dir(directory)


def check_transfer_dir(directory: str | Path) -> None:
    """Raise `ValueError` unless `directory` is one that only this process's user can put weights into."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        problem, remedy = "is a link or no directory", "Name the directory itself"
    elif status.st_uid != os.getuid():
        problem, remedy = f"belongs to user {status.st_uid}, not to {os.getuid()}", "Choose one of your own"
    elif status.st_mode & 0o022:
        problem = f"has mode {stat.S_IMODE(status.st_mode):04o}, so others may write to it"
        remedy = "Run `chmod go-w` on it, or choose another"
    else:
        return
    raise ValueError(
        f"The transfer directory {str(directory)!r} {problem}: weights from somebody else could be in it. {remedy} with "
        "--transfer_dir."
    )


def confined_path(directory: str | None, name: str) -> Path:
    """Return the path of `name` in `directory`, or raise `ValueError` unless it is a regular `.safetensors` file."""
    if not directory:
        raise ValueError(
            f"This server takes no weights from files: {TRANSFER_DIR_VARIABLE} is not set. Start it with `trl-qarl "
            "vllm-serve`, or set the variable to a directory that only you can write to."
        )
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors", name):
        raise ValueError(f"{name!r} is not the name of a safetensors file in the transfer directory.")
    check_transfer_dir(directory)
    path = Path(directory) / name
    if not path.exists() and not path.is_symlink():
        raise ValueError(f"{name!r} is not in {directory!r}: is that the same directory on the trainer's host?")
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{name!r} in {directory!r} is not a regular file.")
    return path


def owned_prefix() -> str:
    """Beginning of the names of this process' files and folders: host, process and the time at which it was
    started."""
    return f"trl-qarl-{_host()}-{os.getpid()}-{_start_time(os.getpid())}-"


def remove_leftovers(directory: str | Path, also: str | None = None) -> None:
    """Remove from a folder what trainers of this user left that were killed on this host, and names with `also` after
    their prefix, which nobody alive can use, whoever made them."""
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
    """Differs wherever one process id can mean two processes: on another host, and in another container."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _start_time(pid: int) -> str | None:
    """Start time of the process in ticks since boot; `None` if it has ended. Without `/proc`, `"0"`."""
    if not os.path.isdir("/proc/self"):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return "0"
    try:
        # The name of the program comes before, in parentheses, and may itself hold any character.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
