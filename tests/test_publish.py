import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
import torch
from torch import nn

from trl_qarl.export import quantization_config
from trl_qarl.rollout.audit import fingerprint
from trl_qarl.rollout.client import QaRLClient, ServerLost
from trl_qarl.rollout.publish import Publisher, PublishError
from trl_qarl.swap import prepare_model


class Recorder:
    """A transport that keeps what it is given."""

    def __init__(self):
        self.chunks, self.fingerprints, self.versions = [], {}, []

    def begin(self):
        self.chunks = []

    def send(self, tensors):
        self.chunks.append(dict(tensors))

    def finish(self, fingerprints, weight_version):
        self.fingerprints = fingerprints
        self.versions.append(weight_version)

    @property
    def names(self):
        return [name for chunk in self.chunks for name in chunk]


@pytest.fixture
def dead_engine():
    """Address of an HTTP server that answers as vLLM's does when the engine behind it has died."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(500)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "EngineCore encountered an issue."}}')

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_whose_engine_has_died_is_a_lost_server(dead_engine):
    """Lost servers are recovered from; any other error would end the training."""
    client = QaRLClient.__new__(QaRLClient)
    client.session, client.base_url = requests.Session(), dead_engine
    with pytest.raises(ServerLost, match="status 500: EngineCore encountered"):
        client._post(f"{dead_engine}/v1/completions", json={})
    with pytest.raises(PublishError, match="status 500"):
        client.control("/start_weight_update")


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
