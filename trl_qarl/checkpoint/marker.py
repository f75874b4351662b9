"""
Marks complete checkpoints, and checks that all of their files still have their content.

The mark is the name of one file. It is `checkpoint_begun` before anything else is written, and a single rename turns
it into `checkpoint_complete` after the files of all processes are on disk. A save that is interrupted leaves the first
name, even in a folder that was complete before. The file lists name, size in bytes and CRC-32 of every other file, so
files that are later truncated, removed or changed, by a faulty disk or copy, are detected and named.

Checkpoints of other trainers have neither file. They count as complete if their `trainer_state.json`, which
transformers writes last, can be read.
"""

import errno
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path


BEGUN_FILE = "checkpoint_begun"
COMPLETE_FILE = "checkpoint_complete"
EARLIER_FILE = "checkpoint_of_an_earlier_run"
_TRAINER_STATE_FILE = "trainer_state.json"
# Users edit the page, and `training_args.bin` is never uploaded; resuming needs neither.
_NOT_COUNTED = (BEGUN_FILE, COMPLETE_FILE, EARLIER_FILE, "README.md", "training_args.bin")
_CHUNK = 1 << 24
_MAX_THREADS = 8


def begin(folder: Path) -> None:
    """Mark `folder` as incomplete, before anything else is written; one process calls this."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(folder / COMPLETE_FILE, folder / BEGUN_FILE)
    except FileNotFoundError:
        (folder / BEGUN_FILE).touch()
    (folder / EARLIER_FILE).unlink(missing_ok=True)
    _fsync(folder)


def leave_behind(first: Path) -> None:
    """Mark the checkpoints next to the first one of a run as those of an earlier run: they are resumed only by name,
    and deleted before those of this run."""
    for folder in first.parent.glob("checkpoint-*"):
        if folder.is_dir() and folder.name != first.name:
            (folder / EARLIER_FILE).touch()


def complete(folder: Path) -> None:
    """Mark `folder` as complete, after every process has written and [`sync`]ed its files; one process calls this."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in _NOT_COUNTED)
    begun = folder / BEGUN_FILE
    names, sizes, sums = [path.relative_to(folder).as_posix() for path in files], map(_size, files), _sums(files)
    begun.write_text(json.dumps(dict(zip(names, zip(sizes, sums, strict=True), strict=True)), indent=1))
    _fsync(begun)
    os.replace(begun, folder / COMPLETE_FILE)
    _fsync(folder)


def sync(folder: Path) -> None:
    """Wait until all files in `folder` are on disk. `OSError` is raised if the disk cannot store them, which some file
    systems report only now."""
    for path in [*folder.rglob("*"), folder]:
        # Another process may have removed a temporary file.
        with suppress(FileNotFoundError):
            _fsync(path)


def is_complete(folder: str | Path) -> bool:
    """Return whether `folder` holds a checkpoint that was written completely and still has all of its files."""
    return problem_of(folder) is None


def problem_of(folder: str | Path, reads_content: bool = False, is_named: bool = False) -> str | None:
    """Return the reason why no run can resume from the checkpoint in `folder`, worded to follow "it is", or `None`.
    With `reads_content` every file is read and compared with its CRC-32, otherwise only the sizes are compared. If the
    user named it (`is_named`), it may be one of an earlier run."""
    folder = Path(folder)
    if not is_named and (folder / EARLIER_FILE).exists():
        return "of an earlier run: name it to resume from it"
    try:
        marks = json.loads((folder / COMPLETE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        is_whole = not (folder / BEGUN_FILE).exists() and _has_whole_state(folder)
        return None if is_whole else "incomplete: it was not written to its end"
    except (OSError, ValueError) as error:
        return f"damaged: {COMPLETE_FILE} cannot be read ({error})"
    if not isinstance(marks, dict) or not all(isinstance(mark, list) and len(mark) == 2 for mark in marks.values()):
        return f"damaged: {COMPLETE_FILE} holds no sizes and sums of files"
    for name, (size, _) in marks.items():
        try:
            found = _size(folder / name)
        except OSError as error:
            return f"damaged: {name} cannot be read ({error.strerror})"
        if found != size:
            return f"damaged: {name} has {found} of {size} bytes"
    if reads_content:
        try:
            sums = _sums([folder / name for name in marks])
        except OSError as error:
            return f"damaged: {error.filename or 'a file'} cannot be read ({error.strerror})"
        for (name, (_, expected)), found in zip(marks.items(), sums, strict=True):
            if found != expected:
                return f"damaged: {name} has changed since it was saved (its CRC-32 is {found}, not {expected})"
    return None


def _sums(paths: list[Path]) -> list[str]:
    # zlib lets other threads run meanwhile.
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        return list(pool.map(lambda path: _sum(path, path.stat().st_size, path.stat().st_mtime_ns), paths))


# A run looks for its checkpoint twice: before and when it begins to train.
@lru_cache(maxsize=1024)
def _sum(path: Path, size: int, written_at: int) -> str:
    """Return the CRC-32 of a file; size and time of the last write identify its content in this process."""
    total, buffer = 0, memoryview(bytearray(min(size, _CHUNK)))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total = zlib.crc32(buffer[:count], total)
    return f"{total:08x}"


def _has_whole_state(folder: Path) -> bool:
    try:
        state = json.loads((folder / _TRAINER_STATE_FILE).read_text(encoding="utf-8"))
        return isinstance(state["global_step"], int)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _size(path: Path) -> int:
    # NFS asks for changes of another host only when a file is opened.
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support this for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
