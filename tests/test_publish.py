import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
import torch
from torch import nn

from trl_qarl.export import quantization_config
from trl_qarl.rollout.audit import fingerprint
from trl_qarl.rollout.client import QaRLClient, ServerLost
from trl_qarl.rollout.publish import Publisher, PublishError, _ServerTransport
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
    transport.begin = lambda: [Recorder.begin(transport), "layers.1.mlp.weight", "ln_f.bias"][1:]
    with caplog.at_level("WARNING"):
        publisher.publish("1")
    assert transport.names == [f"layers.1.{n}" for n in ("norm.weight", "norm.bias", "mlp.weight", "mlp.bias")] + [
        "ln_f.weight",
        "ln_f.bias",
    ]
    assert caplog.messages[0].endswith("Sent again: layers.1, ln_f")
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
        response.status_code, response._content = 200, json.dumps(self.answers.get(path.strip("/"), {})).encode()
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
