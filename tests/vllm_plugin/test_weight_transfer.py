"""Publication into a real vLLM engine in this process: what arrives, what is refused, what is computed then."""

from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer

from testing_utils import make_tiny_model, tampered
from testing_utils.engines import (
    differences,
    engine_logps,
    engine_model,
    learner_logps,
    make_publisher,
    mismatch,
    update_masters,
)
from trl_qarl import export_checkpoint, load_engine
from trl_qarl.checkpoint.layout import iter_checkpoint_tensors
from trl_qarl.sync.publisher import Publisher
from trl_qarl.wire.fingerprint import fingerprint
from trl_qarl.wire.protocol import PublishError


pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# Every scheme and architecture once; gemma ties its output head, qwen2 has biases, qwen3 norms of queries and keys.
CASES = [
    ("w4a16", "qwen2", torch.float32),
    ("w8a16", "qwen3", torch.float32),
    ("w8a8", "llama", torch.float32),
    ("fp8", "gemma", torch.float32),
    ("bf16", "llama", torch.bfloat16),
    pytest.param("w4a16", "gemma", torch.bfloat16, marks=pytest.mark.nightly),
    pytest.param("w8a8", "gemma", torch.bfloat16, marks=pytest.mark.nightly),
    pytest.param("fp8", "qwen2", torch.bfloat16, marks=pytest.mark.nightly),
    pytest.param("bf16", "gemma", torch.float32, marks=pytest.mark.nightly),
]


@pytest.mark.usefixtures("quick_engines")
@pytest.mark.parametrize(("scheme", "arch", "dtype"), CASES, ids=lambda v: str(v).removeprefix("torch."))
def test_the_engine_computes_with_what_was_published_last(tmp_path, monkeypatch, scheme, arch, dtype):
    path = make_tiny_model(tmp_path, arch)
    publisher = make_publisher(path, scheme, dtype)
    llm, model = publisher.engine.llm, publisher.model
    publisher.check_engine()
    versions, mismatches = [], []
    for version in range(3):
        first = publisher.publish(str(version))
        assert first["publish/tensors"] > 0 and llm.get_weight_version() == str(version)
        assert first["publish/canary_abs_logp"] < (1e-5 if dtype is torch.float32 else 0.05)
        logps = engine_logps(llm)
        mismatches.append(differences(logps, learner_logps(model, dtype)).mean())
        versions.append(logps)
        update_masters(model, version)
    # Float32 on both sides leaves the order of summation. In bf16 the engine rounds in more places than the learner,
    # and what tells right weights from stale ones is how much an update changes.
    if dtype is torch.float32:
        assert max(mismatches) < 1e-6
    assert 10 * mismatches[1] < differences(versions[0], versions[1]).mean()
    assert 10 * mismatches[2] < differences(versions[1], versions[2]).mean()

    # The same weights again: nothing is sent, and when everything is, nothing changes.
    publisher.publish("again")
    again = engine_logps(llm)
    assert publisher.publish("and again")["publish/tensors"] == 0
    assert engine_logps(llm) == again
    publisher.forget()
    assert publisher.publish("all of it")["publish/unchanged_tensors"] == 0
    assert engine_logps(llm) == again

    # An engine that loads the export from disk computes the same, bit for bit.
    exported = export_checkpoint(model, tmp_path / "export", AutoTokenizer.from_pretrained(path), dtype)
    fresh = load_engine(exported, max_model_len=128, max_num_seqs=8)
    assert engine_logps(fresh) == again


@pytest.mark.usefixtures("quick_engines")
@pytest.mark.parametrize(
    ("scheme", "arch", "leaf"),
    [("w4a16", "qwen2", "weight_packed"), ("w8a8", "gemma", "weight"), ("fp8", "qwen2", "weight")],
)
def test_codes_are_compared_as_the_engine_runs_with_them(tmp_path, monkeypatch, caplog, scheme, arch, leaf):
    from vllm.model_executor.model_loader.reload import layerwise

    from trl_qarl.vllm_plugin import engine_tensors, weight_transfer

    publisher = make_publisher(make_tiny_model(tmp_path, arch), scheme, torch.bfloat16)
    publisher.publish("before")
    before = engine_logps(publisher.engine.llm)
    layer = engine_model(publisher).get_submodule("model.layers.0.self_attn.qkv_proj")
    codes = engine_tensors.rows_as_loaded(layer, leaf)
    assert codes.data_ptr() == getattr(layer, leaf).data_ptr() and codes.is_contiguous()
    codes.view(torch.uint8)[-1, -1] ^= 1
    with caplog.at_level("WARNING", "trl_qarl"):
        publisher.publish("repaired")
    assert "Sent again: model.layers.0" in caplog.text and engine_logps(publisher.engine.llm) == before

    # They are read when a weight sync begins and when it ends, not while they are loaded.
    read, one, many = Counter(), weight_transfer.fingerprint, engine_tensors.fingerprints

    def count(tensors):
        tensors = list(tensors)
        for _, tensor in tensors:
            read[tensor.dtype] += tensor.nbytes
        return tensors

    publisher.forget()
    with monkeypatch.context() as patch:
        patch.setattr(weight_transfer, "fingerprint", lambda tensor: one(count([("", tensor)])[0][1]))
        patch.setattr(engine_tensors, "fingerprints", lambda tensors: many(count(tensors)))
        publisher.publish("all of it")
    sizes = Counter()
    for _, tensor in iter_checkpoint_tensors(publisher.model, torch.bfloat16):
        sizes[tensor.dtype] += tensor.nbytes
    assert read[codes.dtype] == 2 * sizes[codes.dtype] > 0

    update_masters(publisher.model, 3)
    copy = layerwise._copy_and_restore_kernel_tensors
    with monkeypatch.context() as patch:
        place = layerwise._place_kernel_tensors
        patch.setattr(
            layerwise, "_copy_and_restore_kernel_tensors", lambda at, i: (place if at is layer else copy)(at, i)
        )
        with pytest.raises(PublishError, match=rf"self_attn.v_proj.{leaf}: learner .*, engine"):
            publisher.publish("not copied")
    publisher.publish("healed")


@pytest.fixture(scope="module")
def publisher(quick_engines, tmp_path_factory):
    publisher = make_publisher(make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2"))
    publisher.publish("0")
    return publisher


NAME = "model.layers.1.mlp.up_proj.weight_packed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n, t: [] if n == NAME else [(n, t)], f"{NAME}: the engine received nothing"),
        (lambda n, t: [(n, t ^ (n == NAME) if t.dtype is torch.int32 else t)], f"{NAME}: learner int32"),
        (lambda n, t: [(n, t.flip(0) if n == "model.norm.weight" else t)], "model.norm.weight: learner float32"),
        (lambda n, t: [(n, t.flip(0) if n.endswith("q_proj.bias") else t)], "q_proj.bias: learner float32"),
    ],
    ids=["missing", "one bit", "norm", "bias"],
)
def test_a_damaged_publication_is_refused_and_the_next_heals(publisher, change, message):
    transport = publisher.engine
    update_masters(publisher.model, 7)
    transport._worker.weight_transfer_engine.published = {}
    with tampered(publisher, change), pytest.raises(PublishError) as error:
        publisher.publish("damaged")
    assert message in str(error.value)
    assert transport.llm.get_weight_version() != "damaged"
    # Nothing is left unsent because the learner believes it has arrived.
    assert publisher.publish("healed")["publish/unchanged_tensors"] == 0
    assert mismatch(publisher) < 1e-5


def test_a_loader_that_puts_rows_elsewhere_is_noticed(publisher, monkeypatch):
    """The received tensor is right and the loaded parameter is wrong, which only the parameter itself shows."""
    worker = publisher.engine._worker
    layer = worker.model_runner.model.get_submodule("model.layers.0.mlp.gate_up_proj")
    update_masters(publisher.model, 8)
    publisher.engine.begin()
    with monkeypatch.context() as patch:
        for loader in [p.weight_loader for p in layer._parameters.values() if p is not None]:
            load = loader.__wrapped__
            patch.setattr(loader, "__wrapped__", lambda p, t, shard=None, load=load: load(p, t, 1 - shard))
        patch.setattr(publisher.engine, "begin", lambda: None)
        with pytest.raises(PublishError, match="gate_proj.*: learner int32.*, engine int32"):
            publisher.publish("swapped")
    publisher.publish("healed")


def test_half_a_module_is_refused_although_no_value_changed(publisher):
    """vLLM fills the other half with whatever is in memory."""
    publisher.publish("whole")
    transport, fingerprints = publisher.engine, dict(publisher._published)
    tensors = iter_checkpoint_tensors(publisher.model, publisher.dtype)
    transport.begin()
    transport._worker.weight_transfer_engine.published = fingerprints
    transport.send([(name, tensor) for name, tensor in tensors if "layers.0.mlp.gate_proj" in name])
    with pytest.raises(PublishError, match="the learner sent .*gate_proj.*, but not .*up_proj"):
        transport.finish(fingerprints, "half")
    publisher.forget()
    publisher.publish("healed")


@torch.no_grad()
def corrupt(tensor):
    """Add one to a byte in the middle of a tensor's memory."""
    data = tensor.data.view(-1).view(torch.uint8)
    data[len(data) // 2] += 1


@torch.no_grad()
def fill_with_nan(tensor):
    """Keys and values computed with it lie in the cache, and attention multiplies unused slots by 0."""
    tensor.fill_(float("nan"))


@pytest.mark.parametrize(
    ("path", "named", "spoil"),
    [
        ("model.layers.0.mlp.gate_up_proj.weight_packed", "model.layers.0", corrupt),
        ("model.layers.1.self_attn.qkv_proj.weight_scale", "model.layers.1", corrupt),
        ("model.layers.1.self_attn.qkv_proj.bias", "model.layers.1", corrupt),
        ("model.layers.0.input_layernorm.weight", "model.layers.0", corrupt),
        ("model.embed_tokens.weight", "model.embed_tokens", corrupt),
        ("model.norm.weight", "model.norm", corrupt),
        ("model.layers.0.input_layernorm.weight", "model.layers.0", fill_with_nan),
    ],
)
def test_a_changed_running_tensor_is_named_and_sent_again(publisher, caplog, path, named, spoil):
    publisher.publish("before")
    before = engine_logps(publisher.engine.llm)
    spoil(engine_model(publisher).get_parameter(path))
    if spoil is fill_with_nan:
        assert any(value != value for row in engine_logps(publisher.engine.llm) for value in row)
    with caplog.at_level("WARNING", "trl_qarl"):
        measured = publisher.publish("after")
    warnings = [r.getMessage() for r in caplog.records if r.name == "trl_qarl.sync.publisher"]
    assert len(warnings) == 1 and warnings[0].endswith(f"Sent again: {named}")
    assert measured["publish/tensors"] > 0 and measured["publish/unchanged_tensors"] > 0
    assert measured["publish/canary_abs_logp"] < 1e-5 and engine_logps(publisher.engine.llm) == before
    caplog.clear()
    assert publisher.publish("again")["publish/tensors"] == 0
    assert not [r for r in caplog.records if r.name == "trl_qarl.sync.publisher"]


def test_nothing_stays_of_an_engine_that_has_given_nan(publisher, monkeypatch):
    """Such as by a copy that a kernel keeps, and that is right again once everything has been sent."""
    publisher.publish("before")
    layer = engine_model(publisher).get_submodule("model.layers.0.self_attn.qkv_proj")
    with monkeypatch.context() as patch:
        compute = layer.forward
        patch.setattr(layer, "forward", lambda x: (compute(x)[0] * float("nan"), None))
        engine_logps(publisher.engine.llm)
        with pytest.raises(PublishError, match="nan nats from the learner's"):
            publisher.publish("broken")
    assert publisher.publish("after")["publish/unchanged_tensors"] == 0
    assert mismatch(publisher) < 1e-5


def test_a_buffer_that_no_publication_fills_is_an_error(publisher):
    publisher.publish("before")
    cache = dict(engine_model(publisher).named_buffers())["model.layers.0.self_attn.rotary_emb.cos_sin_cache"]
    kept = cache.clone()
    corrupt(cache)
    # The engine does not get used to it.
    for _ in range(2):
        with pytest.raises(PublishError, match=r"rotary_emb.cos_sin_cache has changed since the last publication"):
            publisher.publish("changed")
    cache.copy_(kept)
    publisher.publish("restored")


@pytest.mark.parametrize(("kind", "named"), [("QKVParallelLinear", "qkv_proj"), ("RMSNorm", "layernorm")])
def test_unreached_running_tensors_are_noticed(publisher, monkeypatch, kind, named):
    """vLLM loads the right values into temporary tensors and does not copy them."""
    from vllm.model_executor.model_loader.reload import layerwise

    copy = layerwise._copy_and_restore_kernel_tensors

    def copy_but_one_kind(layer, info):
        return (layerwise._place_kernel_tensors if type(layer).__name__ == kind else copy)(layer, info)

    update_masters(publisher.model, 11)
    with monkeypatch.context() as patch:
        patch.setattr(layerwise, "_copy_and_restore_kernel_tensors", copy_but_one_kind)
        with pytest.raises(PublishError, match=rf"{named}.*was loaded, but the engine runs with"):
            publisher.publish("lost")
    publisher.publish("healed")
    assert mismatch(publisher) < 1e-5


def test_a_layer_that_nothing_was_sent_for_must_stay_as_it_was(publisher, monkeypatch):
    publisher.publish("before")
    norm = engine_model(publisher).get_parameter("model.layers.0.input_layernorm.weight")
    with torch.no_grad():
        publisher.model.model.layers[1].mlp.up_proj.weight.add_(0.05)
    send = publisher.engine.send
    with monkeypatch.context() as patch:
        patch.setattr(publisher.engine, "send", lambda tensors: (send(tensors), corrupt(norm)))
        with pytest.raises(PublishError, match=r"model.layers.0.input_layernorm.weight: .*but the engine runs with"):
            publisher.publish("spoilt")
    publisher.publish("healed")


def test_an_interrupted_rollout_leaves_nothing(publisher, monkeypatch):
    from vllm import SamplingParams

    llm = publisher.engine.llm
    prompt = list(range(10, 74))
    parameters = SamplingParams(max_tokens=30, n=2)
    llm.llm_engine.add_request("interrupted", {"prompt_token_ids": prompt}, parameters)
    llm.llm_engine.step()
    assert llm.llm_engine.has_unfinished_requests()
    update_masters(publisher.model, 12)
    publisher.publish("after an interrupt")
    assert not llm.llm_engine.has_unfinished_requests()
    (output,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, logprobs=0), use_tqdm=False)
    assert output.num_cached_tokens == 0
    with monkeypatch.context() as patch:
        patch.setattr(llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(PublishError, match="could not empty its prefix cache"):
            publisher.publish("stale")
    publisher.publish("fresh")


def test_publication_in_many_chunks_is_the_same(publisher, monkeypatch):
    monkeypatch.setattr("trl_qarl.sync.publisher.CHUNK_BYTES", 1)
    publisher.forget()
    publisher.publish("chunks")
    assert mismatch(publisher) < 1e-5


# Last: an engine that ends takes the process group with it, which the module's engine shares.


def test_an_engine_of_another_model_or_tokenizer_is_refused(publisher, tmp_path):
    """All tensors have the same names and shapes."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    copy = make_tiny_model(tmp_path, "qwen2", rms_norm_eps=1e-3, rope_parameters=rope, **heads)
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.eos_token = "<|unk|>"
    tokenizer.save_pretrained(copy)
    transport = make_publisher(copy).engine
    with pytest.raises(ValueError) as error:
        Publisher(publisher.model, torch.float32, transport, publisher.tokenizer).check_engine()
    for line in (
        "model.num_attention_heads: learner 2, engine 4",
        "model.num_key_value_heads: learner 1, engine 2",
        "model.rms_norm_eps: learner 1e-06, engine 0.001",
        "model.rope_parameters.rope_theta: learner 10000.0, engine 100.0",
        "rotary embedding: the learner has 32 pairs",
        "tokenizer.eos_token_id: learner 2, engine 3",
    ):
        assert line in str(error.value)
    publisher.check_engine()


@pytest.mark.usefixtures("quick_engines")
@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's INT4 kernel rounds activations with AMX only"
)
def test_amx_does_not_round_activations_of_int4_weights(tmp_path, monkeypatch):
    path = make_tiny_model(tmp_path, "llama")
    publisher = make_publisher(path, dtype=torch.bfloat16)
    publisher.check_engine()
    right = publisher.publish("0")["publish/canary_abs_logp"]
    from vllm import envs

    # Against what an engine's start imposes.
    monkeypatch.setattr("trl_qarl.engines.in_process.cpu_environment", dict)
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    envs.disable_envs_cache()
    other = make_publisher(path, dtype=torch.bfloat16)
    # The plugin's kernel runs in the place of vLLM's, which would round.
    assert other.check_engine()["use_w4a8"] is False
    assert other.publish("0")["publish/canary_abs_logp"] == right < 1e-2


@pytest.mark.parametrize(("parts", "is_refused"), [(["gate_proj", "up_proj"], False), (["o_proj"], True)], ids=str)
def test_a_shard_is_not_compared_with_one_of_its_parts(parts, is_refused):
    """With two ranks, half of each part of a fused tensor has the shape of the first part."""
    from trl_qarl.vllm_plugin.weight_transfer import AuditedReload

    scales = {part: torch.rand(4, 1) for part in parts}
    layer = torch.nn.Module()
    layer.weight_scale = torch.nn.Parameter(torch.cat([scale[: 4 // len(parts)] for scale in scales.values()]) + 1)
    reload = AuditedReload.__new__(AuditedReload)
    reload.model = torch.nn.ModuleDict({"layer": layer})
    reload._engine_name = lambda name: name
    reload._owned = {"layer.weight_scale": [f"{part}.weight_scale" for part in parts]}
    reload._filled, reload._processed, reload._before = {}, {}, {}
    expected = {f"{part}.weight_scale": fingerprint(scale) for part, scale in scales.items()}
    reload._arrived = expected
    problems = reload._live_problems(expected, {"layer.weight_scale": fingerprint(layer.weight_scale)})
    assert bool(problems) is is_refused
