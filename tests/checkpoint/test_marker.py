"""A checkpoint is complete when its marker says so."""

import json
import os
from pathlib import Path

import pytest

from trl_qarl.checkpoint import marker
from trl_qarl.checkpoint.marker import BEGUN_FILE, COMPLETE_FILE, begin, complete, is_complete, problem_of, sync


STATE = json.dumps({"global_step": 3})


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoint-3"
    begin(folder)
    return folder


def test_a_save_counts_only_when_complete(folder, monkeypatch):
    (folder / "trainer_state.json").write_text(STATE)
    # Begun once more, after it was torn.
    begin(folder)
    assert not is_complete(folder) and (folder / BEGUN_FILE).exists()
    complete(folder)
    assert is_complete(folder) and not (folder / BEGUN_FILE).exists()
    seen, replace = [], os.replace

    def look_before_and_after(source, target):
        seen.append(is_complete(folder))
        replace(source, target)
        seen.append(is_complete(folder))

    monkeypatch.setattr(marker.os, "replace", look_before_and_after)
    begin(folder)
    complete(folder)
    assert seen == [True, False, False, True]


@pytest.mark.parametrize("state", [None, "", '{"global_st', "[]", "{}", '{"global_step": "3"}', STATE + " x", "\xff"])
def test_checkpoint_without_a_marker_needs_a_whole_state(tmp_path, state):
    assert not is_complete(tmp_path)
    if state is not None:
        (tmp_path / "trainer_state.json").write_bytes(state.encode("latin-1"))
    assert not is_complete(tmp_path)
    (tmp_path / "trainer_state.json").write_text(STATE)
    assert is_complete(tmp_path)


@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model_fsdp_0/__1_0.distcp"])
def test_a_cut_or_missing_file_is_named(folder, name):
    """A sharded checkpoint has folders of files, of which each process writes some."""
    (folder / "pytorch_model_fsdp_0").mkdir()
    for written in (name, "README.md", "training_args.bin"):
        (folder / written).write_bytes(b"0123456789")
    complete(folder)
    (folder / "README.md").write_text("Edited.")
    (folder / "training_args.bin").unlink()
    (folder / "more").touch()
    assert problem_of(folder) is None
    for size in (5, 0):
        (folder / name).write_bytes(b"0123456789"[:size])
        assert problem_of(folder) == f"damaged: {name} has {size} of 10 bytes"
    (folder / name).unlink()
    assert problem_of(folder) == f"damaged: {name} cannot be read (No such file or directory)"
    (folder / name).write_bytes(b"0123456789")
    assert is_complete(folder)


def test_a_damaged_or_missing_mark_is_named(folder):
    (folder / "optimizer.pt").touch()
    complete(folder)
    for content, said in (
        ("", "cannot be read ("),
        ('{"optim', "cannot be read ("),
        ("[]", "holds no sizes and sums"),
    ):
        (folder / COMPLETE_FILE).write_text(content)
        assert problem_of(folder).startswith(f"damaged: {COMPLETE_FILE} {said}")
    (folder / COMPLETE_FILE).unlink()
    assert not is_complete(folder)


@pytest.mark.parametrize("size", [1, 3 * marker._CHUNK + 1])
def test_a_flipped_bit_is_found_when_files_are_read(folder, size):
    path = folder / "nested" / "optimizer.pt"
    path.parent.mkdir()
    (folder / "empty").touch()
    path.write_bytes(os.urandom(size))
    complete(folder)
    whole = path.read_bytes()
    assert problem_of(folder, reads_content=True) is None
    for place in {0, size // 2, size - 1}:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert problem_of(folder) is None
        problem = problem_of(folder, reads_content=True)
        assert problem.startswith("damaged: nested/optimizer.pt has changed since it was saved")
    path.write_bytes(whole)
    assert problem_of(folder, reads_content=True) is None


def test_everything_is_on_disk_before_the_marker_moves(folder, monkeypatch):
    (folder / "nested").mkdir()
    names = {"model.safetensors", "nested/shard"}
    for name in names:
        (folder / name).write_text("x")
    synced, fsync = set(), os.fsync

    def record(descriptor):
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(folder.resolve()).as_posix())
        fsync(descriptor)

    monkeypatch.setattr(marker.os, "fsync", record)
    sync(folder)
    assert synced == names | {BEGUN_FILE, ".", "nested"}


def test_a_disk_that_cannot_keep_what_was_written_is_an_error(folder, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    (folder / "model.safetensors").write_text("x")
    monkeypatch.setattr(marker.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        sync(folder)
