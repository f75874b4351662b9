"""
Which checkpoint was written to its end.

A folder says so by the name of one empty file, which is `checkpoint_begun` before anything else of it is written and becomes
`checkpoint_complete` by one renaming after everything of all processes is on disk. Whatever ends a save in between leaves the first
name, also in a folder that was complete before.

Checkpoints of versions before this one, and of other trainers, have neither: they count by their `trainer_state.json`, which
transformers writes last, if it is whole.
"""

import errno
import json
import os
from pathlib import Path


__all__ = ["BEGUN_FILE", "COMPLETE_FILE", "begin", "complete", "is_complete", "sync"]

BEGUN_FILE = "checkpoint_begun"
COMPLETE_FILE = "checkpoint_complete"
_TRAINER_STATE_FILE = "trainer_state.json"


def begin(folder: Path) -> None:
    """Mark `folder` as incomplete, before anything of it is written; one process does."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(folder / COMPLETE_FILE, folder / BEGUN_FILE)
    except FileNotFoundError:
        (folder / BEGUN_FILE).touch()
    _fsync(folder)


def complete(folder: Path) -> None:
    """Mark `folder` as complete, after every process has written and [`sync`]ed its part; one process does."""
    os.replace(folder / BEGUN_FILE, folder / COMPLETE_FILE)
    _fsync(folder)


def sync(folder: Path) -> None:
    """
    Wait until what is in `folder` is on disk.

    Raises:
        OSError: if the disk cannot keep it, which some file systems find out only now.
    """
    for path in [*folder.rglob("*"), folder]:
        try:
            _fsync(path)
        except FileNotFoundError:
            # Another process' temporary file.
            continue


def is_complete(folder: str | Path) -> bool:
    """Return whether `folder` holds a checkpoint that was written to its end."""
    folder = Path(folder)
    if (folder / COMPLETE_FILE).exists():
        return True
    if (folder / BEGUN_FILE).exists():
        return False
    try:
        state = json.loads((folder / _TRAINER_STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and isinstance(state.get("global_step"), int)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # A file system that has no such call, as for folders on some networks.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
