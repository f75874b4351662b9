"""
Names for what a trainer puts into a transfer directory, from which the next one tells whether its owner still lives.
"""

import hashlib
import os
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path


__all__ = ["owned_prefix", "remove_leftovers"]

_OWNED = re.compile(r"trl-qarl-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-(?P<rest>.+)")


def owned_prefix() -> str:
    """Beginning of the names of this process' files and folders: host, process and the time at which it was started."""
    return f"trl-qarl-{_host()}-{os.getpid()}-{_start_time(os.getpid())}-"


def remove_leftovers(directory: str | Path, also: str | None = None) -> None:
    """
    Remove from `directory` what trainers of this user left that were killed on this host.

    Args:
        directory (`str` or `Path`):
            A transfer directory, or the one in which they are.
        also (`str`, *optional*):
            What comes after the prefix in names that nobody alive can use, whoever made them.
    """
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


def _host() -> str:
    """Differs wherever one process id can mean two processes: on another host, and in another container."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _start_time(pid: int) -> str | None:
    """When the process was started, in ticks since the host was; `None` if it has ended. Without `/proc`, `"0"`."""
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
