import os
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from testing_utils import dead_prefix
from trl_qarl.sync import channels
from trl_qarl.sync.channels import FileChannel, NCCLChannel, choose_channel
from trl_qarl.wire.protocol import FILE_BACKEND, NCCL_BACKEND, PublishError
from trl_qarl.wire.transfer_dir import owned_prefix


class Client:
    """The server of one transfer directory; remembers what it found there."""

    def __init__(self, directory, instance="0123456789abcdef"):
        self.transfer_dir, self.instance = str(directory), instance
        self.tensors, self.modes, self.failure = {}, [], None

    def control(self, path, body=None):
        if path == "/update_weights":
            assert os.listdir(self.transfer_dir) == [body["update_info"]["file"]]
            file = os.path.join(self.transfer_dir, body["update_info"]["file"])
            self.modes.append(os.stat(file).st_mode & 0o777)
            self.tensors |= load_file(file)
            if self.failure:
                raise self.failure


def test_a_chunk_is_its_owners_alone_and_gone_when_it_was_taken(tmp_path):
    client, umask = Client(tmp_path), os.umask(0o022)
    try:
        transport, mine = FileChannel(client), tmp_path / "model.safetensors"
        transport.begin()
        transport.send([("a", torch.ones(3))])
        assert client.modes == [0o600] and client.tensors["a"].tolist() == [1, 1, 1]
        assert os.umask(0o022) == 0o022
        client.failure = PublishError("no")
        with pytest.raises(PublishError, match="no"):
            transport.send([("a", torch.ones(3))])
    finally:
        os.umask(umask)
    assert os.listdir(tmp_path) == [] and not mine.exists()


def test_only_what_dead_trainers_left_is_removed(tmp_path):
    client = Client(tmp_path)
    host, pid, start = owned_prefix().removeprefix("trl-qarl-").rstrip("-").split("-")
    another, elsewhere = "fedcba9876543210", f"trl-qarl-{'0' * 8}-{pid}-{start}-"
    stays = [
        # Of a trainer that lives, on this host or perhaps on another, with another server that shares the directory.
        f"{owned_prefix()}{another}-x.safetensors",
        f"{elsewhere}{another}-x.safetensors",
        "model.safetensors",
        "trl-qarl-notes.safetensors",
    ]
    goes = [
        f"{dead_prefix()}{another}-x.safetensors",
        f"trl-qarl-{host}-{pid}-{int(start) + 1}-{another}-x.safetensors",
        # The server works for this trainer alone now.
        f"{elsewhere}{client.instance}-x.safetensors",
    ]
    for name in stays + goes:
        (tmp_path / name).write_bytes(b"weights")
    unfinished = tmp_path / f"{dead_prefix()}{another}-y"
    unfinished.mkdir()
    (unfinished / ".tmp").write_bytes(b"weights")
    FileChannel(client).begin()
    assert sorted(os.listdir(tmp_path)) == sorted(stays)


def test_a_full_transfer_directory_names_room_and_remedy(tmp_path, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(channels, "save_file", full)
    monkeypatch.setattr(channels.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    with pytest.raises(PublishError) as caught:
        FileChannel(Client(tmp_path)).send([("a", torch.ones(2**18))])
    for part in (str(tmp_path), "1.0 MiB", "No space left", "64 MiB are free", "--transfer_dir", "--shm-size"):
        assert part in str(caught.value)
    assert os.listdir(tmp_path) == []
    with pytest.raises(PublishError, match="could not be written .*gone"):
        FileChannel(Client(tmp_path / "gone")).send([("a", torch.ones(4))])


def test_a_transfer_directory_that_was_there_is_made_again(tmp_path, caplog):
    transport = FileChannel(client := Client(tmp_path / "transfer"))
    # One of another host is not.
    with pytest.raises(PublishError, match="which this host cannot write to"):
        transport.begin()
    os.mkdir(client.transfer_dir, mode=0o700)
    transport.begin()
    os.rmdir(client.transfer_dir)
    with caplog.at_level("WARNING"):
        transport.begin()
    assert "was removed; it is created again" in caplog.text
    assert os.stat(client.transfer_dir).st_mode & 0o777 == 0o700
    transport.send([("a", torch.ones(3))])
    assert client.tensors["a"].tolist() == [1, 1, 1]
    os.rmdir(client.transfer_dir)
    # Nor is what somebody has put in its place written to.
    os.symlink(tmp_path, client.transfer_dir)
    with pytest.raises(ValueError, match="is a link"):
        transport.begin()


class Described:
    """A client as far as the choice of a channel needs it."""

    base_url, transfer_mark = "http://10.0.0.7:8000", "trl-qarl-here"

    def __init__(self, transfer_dir, backend=FILE_BACKEND):
        self.transfer_dir, self.backend = transfer_dir, backend

    def call_workers(self, method):
        return [{"backend": self.backend}]


def test_the_channel_follows_the_place_of_the_server(tmp_path):
    (tmp_path / "trl-qarl-here").touch()
    assert type(choose_channel(Described(str(tmp_path)))[0]) is FileChannel
    assert type(choose_channel(Described(str(tmp_path), NCCL_BACKEND))[0]) is NCCLChannel


@pytest.mark.parametrize("is_here", [False, True])
def test_weights_without_a_way_are_refused_with_both_ways(tmp_path, is_here):
    # A directory of the same name without the server's mark is another one.
    directory = str(tmp_path if is_here else tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"{directory}.*--transfer_dir DIR.*--transport nccl.*ssh -N -L"):
        choose_channel(Described(directory))
