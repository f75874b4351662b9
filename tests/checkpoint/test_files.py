"""Folders that one trainer holds, permissions that the umask decides, and errors of a full disk."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from trl_qarl.checkpoint.files import check_free, hold, is_of_the_disk, name_disk_errors


HOLDER = """
import os, sys, time
from contextlib import suppress
from pathlib import Path
from trl_qarl.checkpoint.files import hold

lock = hold(Path(sys.argv[1]))
# A child that outlives its parent, as processes that load data or run an engine may.
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


def test_a_folder_is_held_until_its_process_is_killed(tmp_path):
    lock = tmp_path / "run" / ".lock"
    check_free(lock)
    assert not lock.parent.exists()
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        for ask in (hold, check_free):
            message = f"output_dir='{lock.parent}' belongs to process {process.pid} on .*, which is still training"
            with pytest.raises(ValueError, match=message):
                ask(lock)
        process.kill()
        process.wait()
        # The child is there.
        os.kill(child, 0)
        # It drops the lock when it first runs, which may be after its parent has ended.
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with suppress(ValueError):
                check_free(lock)
                break
            time.sleep(0.05)
        ours = hold(lock)
        assert lock.read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(ValueError, match=f"belongs to process {os.getpid()} on "):
            hold(lock)
        ours.close()
        hold(lock).close()
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_no_error_and_said(tmp_path, monkeypatch, caplog, number):
    """Lustre that is mounted without `flock`, for one."""

    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    hold(tmp_path / ".lock").close()
    assert f"output_dir='{tmp_path}' is on a file system without locks" in caplog.text
    assert "a second trainer that writes there is not refused" in caplog.text


def test_errors_of_the_disk_are_told_from_others(tmp_path):
    from testing_utils import make_tiny_tokenizer

    tokenizer = make_tiny_tokenizer()._tokenizer
    with pytest.raises(Exception, match="os error 2") as caught:
        tokenizer.save(str(tmp_path / "missing" / "tokenizer.json"))
    # Nothing else tells it.
    assert type(caught.value) is Exception and is_of_the_disk(caught.value)
    assert is_of_the_disk(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_of_the_disk(ValueError("has experts in high precision")) and not is_of_the_disk(Exception("?"))


def test_a_disk_error_without_a_file_names_the_folder(tmp_path):
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"), name_disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="^cut off$"), name_disk_errors(tmp_path):
        raise OSError("cut off")
