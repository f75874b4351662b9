import os
from types import SimpleNamespace

import pytest

from trl_qarl.wire import transfer_dir
from trl_qarl.wire.transfer_dir import check_transfer_dir, confined_path, default_transfer_dir, make_transfer_dir


@pytest.mark.parametrize(
    ("shared", "temporary", "needed", "chosen"),
    [
        (64, 10_000, 256, "temporary"),  # what a container has
        (64, 10_000, 32, "shared"),
        (300, 10_000, 256, "shared"),
        (257, 10_000, 256, "temporary"),  # no margin
        (64, 32, 256, "shared"),  # too small both; what fails then says so
        (32, 64, 256, "temporary"),
    ],
)
def test_the_transfer_directory_is_where_a_chunk_fits(tmp_path, monkeypatch, shared, temporary, needed, chosen):
    free = {tmp_path / "shared": shared * 2**20, tmp_path / "temporary": temporary * 2**20}
    monkeypatch.setattr(transfer_dir, "transfer_bases", lambda: list(free))
    monkeypatch.setattr(transfer_dir.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    assert default_transfer_dir(8000, needed * 2**20).parent == tmp_path / chosen


def refused(directory, message):
    for check in (make_transfer_dir, check_transfer_dir):
        with pytest.raises(ValueError, match=message):
            check(directory)


def test_a_directory_that_others_may_change_is_refused(tmp_path, monkeypatch):
    directory = tmp_path / "transfer"
    make_transfer_dir(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    make_transfer_dir(directory)
    directory.chmod(0o1777)
    refused(directory, f"all users: .*Name a folder of your own in it, such as {directory}/weights")
    for mode in (0o777, 0o770, 0o702):
        directory.chmod(mode)
        refused(directory, rf"mode {mode:04o}, .*chmod go-w.*--transfer_dir")
    directory.chmod(0o700)
    for name, target in (("link", "transfer"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
        refused(tmp_path / name, "is a link or not a directory")
    assert not (tmp_path / "nowhere").exists()
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    refused(directory, "belongs to user")


@pytest.mark.parametrize(
    "name", ["../weights.safetensors", "/etc/passwd", "link.safetensors", "weights.pt", "", ".safetensors", 7]
)
def test_only_files_in_the_transfer_directory_are_read(tmp_path, name):
    directory, outside = tmp_path / "transfer", tmp_path / "weights.safetensors"
    make_transfer_dir(directory)
    outside.touch()
    (directory / "link.safetensors").symlink_to(outside)
    with pytest.raises(ValueError, match="not the name of a safetensors file|not a regular file"):
        confined_path(str(directory), name)
