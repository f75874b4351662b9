import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import requests
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from trl_qarl.checkpoint.layout import quantization_config
from trl_qarl.quantization.swap import prepare_model
from trl_qarl.rollout import publisher, transports
from trl_qarl.rollout.publisher import Publisher, largest_chunk
from trl_qarl.rollout.transports import DirectTransport, FileTransport, _ServerTransport
from trl_qarl.wire.fingerprint import fingerprint
from trl_qarl.wire.protocol import PublishError
from trl_qarl.wire.transfer_dir import owned_prefix


class Recorder:
    """A transport that keeps what it is given."""

    def __init__(self):
        self.chunks, self.fingerprints, self.versions, self.num_cleared = [], {}, [], 0

    def begin(self):
        self.chunks = []

    def send(self, tensors):
        self.chunks.append(dict(tensors))

    def clear_cache(self):
        self.num_cleared += 1

    def finish(self, fingerprints, weight_version):
        self.fingerprints = fingerprints
        self.versions.append(weight_version)

    @property
    def names(self):
        return [name for chunk in self.chunks for name in chunk]


def test_w4a8_is_refused_in_an_engine_of_several_shards():
    """vLLM takes the scales of a shard apart by the largest of the shard, the learner by that of the row."""
    model = nn.Sequential(nn.Linear(128, 128))
    prepare_model(model, "w4a8", scale_dtype=torch.bfloat16)
    transport = Recorder()
    engine = {
        "quantization_config": quantization_config(model),
        "dtype": "bfloat16",
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": 1,
    }
    transport.describe = lambda: engine
    publisher = Publisher(model, torch.bfloat16, transport)
    assert publisher.check_engine() == engine
    engine["tensor_parallel_size"] = 2
    with pytest.raises(ValueError, match="scheme 'w4a8' needs tensor_parallel_size=1, the engine has 2"):
        publisher.check_engine()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: 1 is supported, the engine has 2"),
        ({"data_parallel_size": 4}, "data_parallel_size: 1 is supported, the engine has 4"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: the learner keeps keys and values in 'float32', engine 'fp8'"),
        ({"is_speculative": True}, "no weights are published to a draft model"),
        ({"use_w4a8": True}, "rounds them to 8 bits.*VLLM_CPU_INT4_W4A8=0"),
    ],
)
def test_an_engine_with_settings_that_change_numbers_is_refused(setting, message):
    """However they got there: by command line, a file, the environment or a default of vLLM."""
    transport = Recorder()
    fine = {
        "quantization_config": {},
        "dtype": "float32",
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": 1,
    }
    fine |= {"pipeline_parallel_size": 1, "data_parallel_size": 1, "kv_cache_dtype": "float32"}
    publisher = Publisher(nn.Linear(8, 8), torch.float32, transport)
    transport.describe = lambda: fine
    publisher.check_engine()
    transport.describe = lambda: fine | setting
    with pytest.raises(ValueError, match=message):
        publisher.check_engine()


def test_what_the_engine_has_lost_is_sent_again(caplog):
    model, transport = make_model(), Recorder()
    publisher = Publisher(model, torch.bfloat16, transport)
    publisher.publish("0")
    assert transport.num_cleared == 0
    transport.begin = lambda: [Recorder.begin(transport), "layers.1.mlp.weight", "ln_f.bias"][1:]
    with caplog.at_level("WARNING"):
        publisher.publish("1")
    assert transport.names == [f"layers.1.{n}" for n in ("norm.weight", "norm.bias", "mlp.weight", "mlp.bias")] + [
        "ln_f.weight",
        "ln_f.bias",
    ]
    assert caplog.messages[0].endswith("Sent again: layers.1, ln_f")
    # What was computed with the lost ones goes too.
    assert transport.num_cleared == 1
    # Nothing new to say where everything is sent anyway.
    caplog.clear()
    publisher.forget()
    publisher.publish("2")
    assert not caplog.messages


class Answers:
    """A client whose server gives prepared answers."""

    model = "model"

    def __init__(self, **answers):
        self.answers, self.requests = answers, []

    def control(self, path, body=None):
        self.requests.append((path, body))
        response = requests.Response()
        answer = self.answers.get(path.strip("/"), {})
        response.status_code = 200
        response._content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        return response

    def call_workers(self, method, **kwargs):
        return self.answers.get(method, [None])

    def weight_version(self):
        return "1"


def test_every_shard_of_a_server_says_what_it_has_lost():
    transport = _ServerTransport(Answers(qarl_begin=[["a", "b"], [], ["b", "c"], None]))
    assert transport.begin() == ["a", "b", "c"]


def test_a_server_that_keeps_its_prefix_cache_is_refused():
    _ServerTransport(Answers(reset_prefix_cache={"success": True})).finish({}, "1")
    _ServerTransport(Answers()).finish({}, "1")
    client = Answers(reset_prefix_cache={"success": False})
    with pytest.raises(PublishError, match="could not empty its prefix cache"):
        _ServerTransport(client).finish({}, "1")
    assert "/finish_weight_update" not in dict(client.requests)


def test_log_probs_of_the_prompt_are_read_from_a_server():
    entries = [None, {"7": {"logprob": -1.5}, "9": {"logprob": -0.5}}, {"8": {"logprob": None}}]
    client = Answers(**{"v1/completions": {"choices": [{"prompt_logprobs": entries}]}})
    values = _ServerTransport(client).score([5, 7, 8])
    assert values[0] == -1.5 and math.isnan(values[1])
    # A sampled token would move the state that rollouts draw from.
    assert client.requests[0][1]["temperature"] == 0.0
    with pytest.raises(PublishError, match="no log-probs of the prompt"):
        _ServerTransport(Answers(**{"v1/completions": {"choices": [{}]}})).score([5, 7, 8])


def test_an_answer_that_makes_no_sense_is_a_publish_error():
    with pytest.raises(PublishError, match="something else than JSON: '<html/>'"):
        _ServerTransport(Answers(reset_prefix_cache=b"<html/>")).finish({}, "1")
    with pytest.raises(PublishError, match="something else than JSON"):
        _ServerTransport(Answers(**{"v1/completions": b"<html/>"})).score([5, 7])


def make_model():
    block = lambda: nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": nn.Linear(8, 8)})  # noqa: E731
    return nn.ModuleDict(
        {"layers": nn.ModuleList([block(), block()]), "ln_f": nn.LayerNorm(8), "head": nn.Linear(8, 4)}
    )


@pytest.mark.parametrize(
    ("changed", "sent"),
    [
        # vLLM reloads a module from what arrives, so weight and bias go together even where there is no layer number.
        ("ln_f.bias", ["ln_f.weight", "ln_f.bias"]),
        ("head.weight", ["head.weight", "head.bias"]),
        (
            "layers.1.norm.bias",
            ["layers.1.norm.weight", "layers.1.norm.bias", "layers.1.mlp.weight", "layers.1.mlp.bias"],
        ),
    ],
)
def test_what_belongs_together_is_sent_together(changed, sent):
    model, transport = make_model(), Recorder()
    publisher = Publisher(model, torch.bfloat16, transport)
    publisher.publish("0")
    assert transport.names == list(model.state_dict())
    with torch.no_grad():
        model.get_parameter(changed).add_(1)
    measured = publisher.publish("1")
    assert transport.names == sent
    assert measured["publish/tensors"] == len(sent)
    # What was not sent is still announced: the engine must have it.
    assert transport.fingerprints == {n: fingerprint(t.bfloat16()) for n, t in model.state_dict().items()}


def test_a_failed_publication_is_followed_by_a_whole_one():
    model, transport = make_model(), Recorder()
    publisher = Publisher(model, torch.float32, transport)
    publisher.publish("0")
    transport.send = lambda tensors: (_ for _ in ()).throw(RuntimeError("lost"))
    with torch.no_grad():
        model.get_parameter("ln_f.bias").add_(1)
    with pytest.raises(RuntimeError, match="lost"):
        publisher.publish("1")
    del transport.send
    publisher.publish("2")
    assert transport.names == list(model.state_dict()) and transport.versions == ["0", "2"]


def test_stacked_experts_are_refused():
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.Module()})})
    model["mlp"]["experts"].gate_up_proj = nn.Parameter(torch.zeros(2, 4, 8))
    with pytest.raises(NotImplementedError, match="all experts in one tensor"):
        Publisher(model, torch.float32, Recorder())


class Client:
    """The server of one transfer directory; remembers what it found there."""

    def __init__(self, directory, instance="0123456789abcdef"):
        self.transfer_dir, self.instance = str(directory), instance
        self.tensors, self.modes, self.failure = {}, [], None

    def call_workers(self, method, **kwargs):
        return [None]

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
        transport, mine = FileTransport(client), tmp_path / "model.safetensors"
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


def dead_prefix():
    """What a trainer calls its files that has ended since."""
    code = "from trl_qarl.wire.transfer_dir import owned_prefix; print(owned_prefix())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


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
    FileTransport(client).begin()
    assert sorted(os.listdir(tmp_path)) == sorted(stays)


def test_a_full_transfer_directory_names_room_and_remedy(tmp_path, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(transports, "save_file", full)
    monkeypatch.setattr(transports.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    with pytest.raises(PublishError) as caught:
        FileTransport(Client(tmp_path)).send([("a", torch.ones(2**18))])
    for part in (str(tmp_path), "1.0 MiB", "No space left", "64 MiB are free", "--transfer_dir", "--shm-size"):
        assert part in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is always full")
def test_a_device_that_is_full_is_a_publish_error(tmp_path, monkeypatch):
    def save(tensors, path):
        with open("/dev/full", "wb") as file:
            file.write(b"weights")

    monkeypatch.setattr(transports, "save_file", save)
    with pytest.raises(PublishError, match="could not be written to the transfer directory"):
        FileTransport(Client(tmp_path)).send([("a", torch.ones(4))])
    assert os.listdir(tmp_path) == []


def test_a_transfer_directory_that_went_away_is_a_publish_error(tmp_path):
    with pytest.raises(PublishError, match="gone.*could not be written|could not be written.*gone"):
        FileTransport(Client(tmp_path / "gone")).send([("a", torch.ones(4))])


def test_a_transfer_directory_that_was_there_is_made_again(tmp_path, caplog):
    transport = FileTransport(client := Client(tmp_path / "transfer"))
    # One of another host is not.
    with pytest.raises(PublishError, match="which this host cannot write to"):
        transport.begin()
    os.mkdir(client.transfer_dir, mode=0o700)
    transport.begin()
    os.rmdir(client.transfer_dir)
    with caplog.at_level("WARNING"):
        transport.begin()
    assert "Something has removed the transfer directory" in caplog.text
    assert os.stat(client.transfer_dir).st_mode & 0o777 == 0o700
    transport.send([("a", torch.ones(3))])
    assert client.tensors["a"].tolist() == [1, 1, 1]
    os.rmdir(client.transfer_dir)
    # Nor is what somebody has put in its place written to.
    os.symlink(tmp_path, client.transfer_dir)
    with pytest.raises(ValueError, match="is a link"):
        transport.begin()


def test_the_largest_chunk_is_the_model_a_full_chunk_or_the_largest_layer(monkeypatch):
    model = make_model()
    sizes = [sum(t.numel() for n, t in model.state_dict().items() if n.startswith(f"layers.{i}.")) for i in range(2)]
    total = sum(t.numel() for t in model.state_dict().values())
    assert largest_chunk(model, torch.bfloat16) == 2 * total
    monkeypatch.setattr(publisher, "CHUNK_BYTES", 8)
    assert largest_chunk(model.to("meta"), torch.float32) == 4 * max(sizes)
    sent = Recorder()
    Publisher(make_model(), torch.float32, sent).publish("0")
    assert max(sum(t.nbytes for t in chunk.values()) for chunk in sent.chunks) == 4 * max(sizes)


def test_what_the_engines_loader_raises_is_a_publish_error(monkeypatch):
    pytest.importorskip("vllm")

    def load(tensors):
        raise AttributeError("'Model' object has no attribute 'lm_heat'")

    transport = DirectTransport.__new__(DirectTransport)
    transport._worker = SimpleNamespace(
        weight_transfer_engine=SimpleNamespace(load=load, device="cpu"), vllm_config=SimpleNamespace()
    )
    import contextlib

    monkeypatch.setattr("vllm.config.set_current_vllm_config", lambda config: contextlib.nullcontext())
    with pytest.raises(PublishError, match="could not load lm_heat to lm_heat: AttributeError: 'Model'"):
        transport.send([("lm_heat", torch.ones(2))])
