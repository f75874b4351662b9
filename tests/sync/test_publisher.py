import json
import math
import re
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import requests
import torch
from torch import nn

from testing_utils import make_mixture
from testing_utils.layers import one_layer
from trl_qarl._version import __version__
from trl_qarl.checkpoint.layout import iter_checkpoint_tensors
from trl_qarl.engines.engine import Channel
from trl_qarl.engines.in_process import InProcessEngine
from trl_qarl.engines.server import ServerEngine
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.swap import prepare_model
from trl_qarl.sync import publisher
from trl_qarl.sync.publisher import Publisher, largest_chunk
from trl_qarl.wire.fingerprint import fingerprint
from trl_qarl.wire.protocol import EACH, PublishError, names_of_experts, tensors_of_experts


class Recorder:
    """A transport that keeps what it is given."""

    works_meanwhile = in_every_process = False

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


def publisher_to_one_engine(scheme):
    """A publisher of one linear layer, and what its engine says of itself."""
    (model, config), transport = one_layer(scheme, scale_dtype=torch.bfloat16), Recorder()
    engine = {
        "trl_qarl": __version__,
        "quantization_config": config,
        "dtype": "bfloat16",
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": 1,
    }
    transport.describe = lambda: engine
    return Publisher(model, torch.bfloat16, transport), engine


@pytest.mark.parametrize(
    ("scheme", "capability", "kernel", "other", "message"),
    [
        ("fp8", [9, 0], "CutlassFP8ScaledMMLinearKernel", "MarlinFP8ScaledMMLinearKernel", "not by Cutlass"),
        ("fp8", [8, 0], None, "HummingFP8ScaledMMLinearKernel", "leaves activations in 16 bits"),
        ("nvfp4a16", None, "QaRLNvFp4Kernel", "EmulationNvFp4LinearKernel", "may quantize activations"),
    ],
)
def test_an_engine_that_runs_another_kernel_is_refused(scheme, capability, kernel, other, message):
    publisher, engine = publisher_to_one_engine(scheme)
    engine["gpu"] = capability and {"capability": capability, "name": "NVIDIA X1", "vllm": "0.32.0"}
    if kernel:
        engine["kernels"] = {kernel: 1}
        assert publisher.check_engine() == engine
    engine["kernels"] = {other: 1}
    with pytest.raises(ValueError, match=f"{other}.*{message}|{message}.*"):
        publisher.check_engine()


def config_of(scheme):
    return {"quantization_config": one_layer(scheme)[1]}


@pytest.mark.parametrize(
    ("scheme", "setting", "message"),
    [
        ("w4a16", config_of(get_scheme("w4a16", 32)), "group_size: learner 128, engine 32"),
        ("w4a16", config_of("w8a8"), "'int-quantized'"),
        ("w4a16", {"quantization_config": one_layer("w4a16")[1] | {"ignore": ["lm_head"]}}, "'lm_head'"),
        ("bf16", config_of("w4a16"), "'compressed-tensors'"),
        ("w4a16", {"trl_qarl": "0.0.9"}, f"The engine runs trl_qarl 0.0.9, and this trainer {__version__}"),
        ("w4a16", {"dtype": "float32"}, "dtype: learner 'bfloat16', engine 'float32'"),
        ("w4a16", {"pipeline_parallel_size": 2}, "pipeline_parallel_size: 1 is supported, the engine has 2"),
        ("w4a16", {"data_parallel_size": 4}, "data_parallel_size: 1 is .* a mixture of experts, the engine has 4"),
        ("w4a16", {"enable_expert_parallel": True}, "enable_expert_parallel: not supported, as a rank holds some"),
        ("w4a16", {"kv_cache_dtype": "fp8"}, "'bfloat16'"),
        ("w4a16", {"is_speculative": True}, "no weights are published to a draft model"),
        ("w4a16", {"use_w4a8": True}, "VLLM_CPU_INT4_W4A8=0"),
        ("w8a8", {"tensor_parallel_size": 2}, "tensor_parallel_size=2 with 8-bit activations.*--data-parallel-size"),
    ],
)
def test_an_engine_with_other_numbers_is_refused(scheme, setting, message):
    """However they got there: by command line, a file, the environment or a default of vLLM."""
    publisher, engine = publisher_to_one_engine(scheme)
    engine |= {"pipeline_parallel_size": 1, "data_parallel_size": 1, "kv_cache_dtype": "bfloat16"}
    assert publisher.check_engine() == engine
    engine |= setting
    with pytest.raises(ValueError, match=message):
        publisher.check_engine()


class Answers:
    """A client whose server gives prepared answers."""

    model = "model"

    def __init__(self, **answers):
        self.answers, self.requests = answers, []

    def control(self, path, body=None, headers=None):
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


def engine_of(client):
    return ServerEngine(client, Channel(client))


def test_every_shard_of_a_server_says_what_it_has_lost():
    client = Answers(qarl_begin=[["a", "b"], [], ["b", "c"], None])
    assert engine_of(client).begin() == ["a", "b", "c"]
    # Requests of others are aborted first.
    assert client.requests[0][0] == "/pause?mode=abort"


def test_differing_replicas_are_refused():
    first = {"replica": 0, "dtype": "float32", "device": "cuda:0", "published": 3}
    # Two ranks of each.
    like = [first | {"replica": 1, "device": f"cuda:{rank}", "published": 0} for rank in (2, 3)]
    transport = engine_of(Answers(qarl_describe=[first, first | {"device": "cuda:1"}, *like]))
    assert transport.describe() == first | {"replicas": 2}
    entries = [None, {"7": {"logprob": -1.5}}]
    transport.client.answers["v1/completions"] = {"choices": [{"prompt_logprobs": entries}]}
    assert transport.score([5, 7]) == [-1.5, -1.5]
    other = Answers(qarl_describe=[first, first | {"replica": 1, "dtype": "bfloat16"}])
    with pytest.raises(ValueError, match="Replica 1 of the server .*: dtype"):
        engine_of(other).describe()


def test_a_server_that_keeps_its_prefix_cache_is_refused():
    engine_of(Answers(reset_prefix_cache={"success": True})).finish({}, "1")
    engine_of(Answers()).finish({}, "1")
    client = Answers(reset_prefix_cache={"success": False})
    with pytest.raises(PublishError, match="could not empty its prefix cache"):
        engine_of(client).finish({}, "1")
    assert "/finish_weight_update" not in dict(client.requests)


def test_log_probs_of_the_prompt_are_read_from_a_server():
    entries = [None, {"7": {"logprob": -1.5}, "9": {"logprob": -0.5}}, {"8": {"logprob": None}}]
    client = Answers(**{"v1/completions": {"choices": [{"prompt_logprobs": entries}]}})
    values = engine_of(client).score([5, 7, 8])
    assert values[0] == -1.5 and math.isnan(values[1])
    # A sampled token would move the state that rollouts draw from.
    assert client.requests[0][1]["temperature"] == 0.0
    with pytest.raises(PublishError, match="no log-probs of the prompt"):
        engine_of(Answers(**{"v1/completions": {"choices": [{}]}})).score([5, 7, 8])


def test_an_answer_that_makes_no_sense_is_a_publish_error():
    with pytest.raises(PublishError, match="did not answer with JSON: '<html/>'"):
        engine_of(Answers(reset_prefix_cache=b"<html/>")).finish({}, "1")
    with pytest.raises(PublishError, match="did not answer with JSON"):
        engine_of(Answers(**{"v1/completions": b"<html/>"})).score([5, 7])


def make_model():
    blocks = [nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": nn.Linear(8, 8)}) for _ in range(2)]
    return nn.ModuleDict({"layers": nn.ModuleList(blocks), "ln_f": nn.LayerNorm(8), "head": nn.Linear(8, 4)})


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


class Meanwhile(Recorder):
    """An engine that answers once the learner has gone on, and counts calls that overlap."""

    works_meanwhile = True

    def __init__(self, goes_on):
        super().__init__()
        self.goes_on, self.waited, self.num_calls, self.is_failing = goes_on, [], 0, False

    def answer(self, wanted):
        assert self.num_calls == 0
        self.num_calls += 1
        self.waited.append(self.goes_on(wanted))
        self.num_calls -= 1

    def begin(self):
        self.answer(1)
        super().begin()

    def send(self, tensors):
        # The last chunk has none after it.
        self.answer(2 if len(self.chunks) == 0 else 0)
        if self.is_failing:
            raise PublishError("lost")
        super().send(tensors)


@pytest.fixture
def counted_layers(monkeypatch):
    """Waits until the learner has taken the fingerprints of so many layers since the last publication."""
    monkeypatch.setattr(publisher, "CHUNK_BYTES", 8)
    condition, layers = threading.Condition(), []
    take = publisher.fingerprints_of

    def count(layer):
        with condition:
            layers.append(layer)
            condition.notify_all()
        return take(layer)

    def goes_on(wanted):
        with condition:
            return condition.wait_for(lambda: len(layers) >= wanted, timeout=20)

    monkeypatch.setattr(publisher, "fingerprints_of", count)
    goes_on.layers = layers
    return goes_on


def test_the_learner_quantizes_while_the_engine_works(counted_layers):
    model, engine = make_model(), Meanwhile(counted_layers)
    Publisher(model, torch.float32, engine).publish("0")
    assert len(engine.chunks) > 1 and all(engine.waited)
    assert engine.names == list(model.state_dict()) and engine.versions == ["0"]


def test_half_of_the_threads_are_left_to_the_engine(monkeypatch):
    """Quantizing takes five times as long where threads of both poll for cores."""
    # A worker of vLLM that has run in this process makes the function do nothing.
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    Publisher(make_model(), torch.float32, Meanwhile(lambda wanted: True)).publish("0")
    assert chosen == [2, 4]
    Publisher(make_model(), torch.float32, Recorder()).publish("0")
    assert chosen == [2, 4]


@pytest.mark.parametrize("who", ["engine", "learner"])
def test_what_fails_meanwhile_has_ended_before_the_next_attempt(counted_layers, monkeypatch, who):
    model, engine = make_model(), Meanwhile(counted_layers)
    sender = Publisher(model, torch.float32, engine)
    with monkeypatch.context() as patched:
        if who == "engine":
            engine.is_failing = True
        else:
            # The engine answers a third of a second after the learner has failed.
            engine.goes_on = lambda wanted: time.sleep(0.3) or True
            patched.setattr(publisher, "fingerprints_of", lambda layer: math.nan + layer)
        with pytest.raises(PublishError if who == "engine" else TypeError, match="lost|unsupported"):
            sender.publish("0")
    assert engine.num_calls == 0 and not engine.versions and not engine.chunks
    engine.is_failing, engine.goes_on = False, counted_layers
    counted_layers.layers.clear()
    sender.publish("1")
    assert engine.names == list(model.state_dict()) and engine.versions == ["1"]


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_a_master_that_is_not_finite_ends_the_publication(scheme):
    model, transport = make_mixture("qwen3_moe"), Recorder()
    prepare_model(model, scheme, scale_dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 7, 0] = math.nan
    name = re.escape("model.layers.1.mlp.experts.*.down_proj.weight_scale")
    with pytest.raises(ValueError, match=rf"^{name}: row 3, 7 is not finite \(nan\), so a master"):
        Publisher(model, torch.bfloat16, transport).publish("0")
    assert transport.versions == []


def test_gpt_oss_sends_experts_and_biases_under_engine_names():
    model, transport = make_mixture("gpt_oss"), Recorder()
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    Publisher(model, torch.bfloat16, transport).publish("0")
    [sent] = transport.chunks
    of_layer = {name: tuple(t.shape) for name, t in sent.items() if name.startswith("model.layers.1.mlp.experts.")}
    prefix = "model.layers.1.mlp.experts.*."
    assert of_layer == {
        f"{prefix}w13_weight_packed": (8, 128, 16),
        f"{prefix}w13_weight_scale": (8, 128, 2),
        f"{prefix}w2_weight_packed": (8, 128, 8),
        f"{prefix}w2_weight_scale": (8, 128, 1),
        f"{prefix}w13_bias": (8, 128),
        f"{prefix}w2_bias": (8, 128),
    }
    assert names_of_experts(f"{prefix}w2_bias", 2)[1] == ["model.layers.1.mlp.experts.1.w2_bias"]


@pytest.mark.parametrize(("arch", "scheme"), [("mixtral", "w4a16"), ("mixtral", "bf16"), ("qwen3_moe", "w8a8")])
def test_experts_are_sent_all_at_once_and_their_shapes_last(arch, scheme):
    """vLLM takes a layer for complete once it has counted the shapes of gate and up, each as large as both."""
    model, transport = make_mixture(arch), Recorder()
    prepare_model(model, scheme, scale_dtype=torch.bfloat16)
    Publisher(model, torch.bfloat16, transport).publish("0")
    [sent] = transport.chunks
    prefix = "block_sparse_moe" if arch == "mixtral" else "mlp"
    of_layer = [name for name in sent if name.startswith(f"model.layers.1.{prefix}.experts.")]
    assert len(of_layer) == {"w4a16": 6, "w8a8": 4, "bf16": 2}[scheme]
    if scheme == "w4a16":
        assert [name.rsplit(".", 2)[1:] for name in [n for n in sent if "layers.1." in n][-2:]] == [
            ["w2", "weight_shape"],
            ["w1|w3", "weight_shape"],
        ]
    checkpoint = dict(iter_checkpoint_tensors(model, torch.bfloat16))
    one_by_one = {}
    for name, tensor in sent.items():
        one_by_one |= tensors_of_experts(name, tensor) if EACH in name else [(name, tensor)]
    assert one_by_one.keys() == checkpoint.keys()
    for name, tensor in checkpoint.items():
        part = one_by_one[name].reshape(tensor.shape)
        assert torch.equal(part.view(torch.uint8), tensor.view(torch.uint8)), name
    assert len(transport.fingerprints[of_layer[0]].split("-")) == 8


def test_the_largest_chunk_is_bounded(monkeypatch):
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

    transport = InProcessEngine.__new__(InProcessEngine)
    transport._worker = SimpleNamespace(
        weight_transfer_engine=SimpleNamespace(load=load, device="cpu"), vllm_config=SimpleNamespace()
    )
    monkeypatch.setattr("vllm.config.set_current_vllm_config", nullcontext)
    with pytest.raises(PublishError, match="'Model'"):
        transport.send([("lm_heat", torch.ones(2))])
