"""
Marks checkpoints that are complete, and checks that all of their files are still there.

A folder says so by the name of one file, which is `checkpoint_begun` before anything else of it is written and becomes
`checkpoint_complete` by one renaming after everything of all processes is on disk. Whatever ends a save in between
leaves the first name, also in a folder that was complete before. The file has the name and size of every other file,
in bytes, so that one that is cut, emptied or removed afterwards is told by its name.

Checkpoints of other trainers have neither: they count by their `trainer_state.json`, which transformers writes last,
if it is whole.
"""

import errno
import json
import os
from pathlib import Path


__all__ = ["BEGUN_FILE", "COMPLETE_FILE", "begin", "complete", "is_complete", "problem_of", "sync"]

BEGUN_FILE = "checkpoint_begun"
COMPLETE_FILE = "checkpoint_complete"
_TRAINER_STATE_FILE = "trainer_state.json"
# A page that users edit, and a file that is never uploaded; resuming needs neither.
_NOT_COUNTED = (BEGUN_FILE, COMPLETE_FILE, "README.md", "training_args.bin")


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
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in _NOT_COUNTED)
    begun = folder / BEGUN_FILE
    begun.write_text(json.dumps({path.relative_to(folder).as_posix(): _size(path) for path in files}, indent=1))
    _fsync(begun)
    os.replace(begun, folder / COMPLETE_FILE)
    _fsync(folder)


def sync(folder: Path) -> None:
    """Wait until what is in `folder` is on disk. `OSError` says that the disk cannot keep it, which some file systems
    find out only now."""
    for path in [*folder.rglob("*"), folder]:
        try:
            _fsync(path)
        except FileNotFoundError:
            # Another process' temporary file.
            continue


def is_complete(folder: str | Path) -> bool:
    """Return whether `folder` holds a checkpoint that was written to its end and has all that was written."""
    return problem_of(folder) is None


def problem_of(folder: str | Path) -> str | None:
    """Return why no run can resume from the checkpoint in `folder`, to follow the words "it is", or `None` if it
    can."""
    folder = Path(folder)
    incomplete = "incomplete: it was not written to its end"
    try:
        sizes = json.loads((folder / COMPLETE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        is_whole = not (folder / BEGUN_FILE).exists() and _has_whole_state(folder)
        return None if is_whole else incomplete
    except (OSError, ValueError) as error:
        return f"damaged: {COMPLETE_FILE} cannot be read ({error})"
    for name, size in sizes.items():
        try:
            found = _size(folder / name)
        except OSError as error:
            return f"damaged: {name} cannot be read ({error.strerror})"
        if found != size:
            return f"damaged: {name} has {found} of {size} bytes"
    return None


def _has_whole_state(folder: Path) -> bool:
    try:
        state = json.loads((folder / _TRAINER_STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and isinstance(state.get("global_step"), int)


def _size(path: Path) -> int:
    """Size in bytes, of a file that is opened for it: only then NFS asks for what another host has written."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size


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
