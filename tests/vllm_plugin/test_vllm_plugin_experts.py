"""Mixtures in a real vLLM engine on a CPU: publication, what the audit sees of it, and which method experts get."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing_utils import make_tiny_mixture, make_tiny_model, tampered
from testing_utils.engines import PROMPTS, engine_logps, engine_model, make_publisher, update_masters
from trl_qarl import export_checkpoint, load_engine, prepare_model
from trl_qarl.bitwise import cpu as kernels
from trl_qarl.bitwise.attach import attach_engine_numerics, detach_engine_numerics
from trl_qarl.checkpoint.layout import quantization_config
from trl_qarl.engines.in_process import make_engine
from trl_qarl.engines.spec import EngineSpec
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.sync.publisher import Publisher
from trl_qarl.wire.protocol import PublishError


pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm]


def needs_engine(test):
    reason = kernels.reason_against()
    return pytest.mark.slow(pytest.mark.skipif(reason is not None, reason=str(reason))(test))


def make_mixtures_publisher(directory, arch, scheme):
    """A publisher whose learner has the engine's arithmetic."""
    publisher = make_publisher(make_tiny_mixture(directory, arch), scheme, torch.bfloat16)
    attach_engine_numerics(publisher.model)
    publisher.check_engine()
    return publisher


@torch.no_grad()
def learner_logps(model) -> list[list[float]]:
    rows = [torch.tensor([prompt]) for prompt in PROMPTS]
    return [model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[0].tolist() for ids in rows]


@pytest.fixture(scope="module")
def publisher(quick_engines, tmp_path_factory):
    publisher = make_mixtures_publisher(tmp_path_factory.mktemp("model"), "qwen3_moe", "w4a16")
    publisher.publish("0")
    return publisher


def routed_experts(publisher, layer=1):
    block = engine_model(publisher).model.layers[layer]
    return next(module for name, module in block.named_modules() if name.endswith("routed_experts"))


@pytest.mark.slow
def test_a_mixture_starts_beside_the_engine_of_a_dense_model(quick_engines, tmp_path):
    """First of this file: vLLM's groups of a dense model, whose engine is still there, lack the one of experts."""
    engines = []
    for path in (make_tiny_model(tmp_path, "qwen3"), make_tiny_mixture(tmp_path, "qwen3_moe")):
        model = AutoModelForCausalLM.from_pretrained(path)
        prepare_model(model, "bf16")
        engines.append(
            make_engine(EngineSpec.of(model, torch.bfloat16), on_cpu=True, max_model_len=128, max_num_seqs=8).llm
        )
    # Neither has been sent weights.
    assert [len(rows) for rows in map(engine_logps, engines)] == [len(PROMPTS)] * 2


@needs_engine
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("down_proj.weight_scale", lambda t: [], "down_proj.weight_scale: the engine received nothing"),
        (
            *("gate_proj|up_proj.weight_packed", lambda t: [t[[0, 1, 2, 4, 3, 5, 6, 7]]]),
            "model.layers.1.mlp.experts.3.gate_proj|up_proj.weight_packed: learner int32",
        ),
        ("1.mlp.gate.weight", lambda t: [t.flip(0)], "model.layers.1.mlp.gate.weight: learner bfloat16"),
    ],
    ids=["missing", "two experts swapped", "router"],
)
def test_what_does_not_arrive_is_named_by_its_expert(publisher, name, change, message):
    update_masters(publisher.model, 2)
    publisher.engine._worker.weight_transfer_engine.published = {}
    spoil = lambda n, t: [(n, each) for each in (change(t) if "layers.1" in n and n.endswith(name) else [t])]  # noqa: E731
    with tampered(publisher, spoil), pytest.raises(PublishError) as error:
        publisher.publish("damaged")
    assert message in str(error.value)
    assert publisher.publish("healed")["publish/canary_abs_logp"] == 0.0


@needs_engine
@pytest.mark.parametrize("when", ["loaded", "copied"])
def test_experts_that_the_engine_swaps_are_named(publisher, monkeypatch, when):
    """The received tensor is right; the loaded parameter, or the tensor the engine runs with, is wrong."""
    from vllm.model_executor.model_loader.reload import layerwise

    layer = routed_experts(publisher)

    def swap(*args):
        if args[0] is layer:
            weight = layer.w2_weight_packed.data
            weight[[3, 4]] = weight[[4, 3]]

    if when == "loaded":
        # The audit looks at what it is called with.
        load = layer.quant_method.process_weights_after_loading
        monkeypatch.setattr(
            layer.quant_method, "process_weights_after_loading", lambda *args: (swap(*args), load(*args))
        )
        message = r"model.layers.1.mlp.experts.3.down_proj.weight_packed: learner int32.*, engine int32"
    else:
        copy = layerwise._copy_and_restore_kernel_tensors
        monkeypatch.setattr(layerwise, "_copy_and_restore_kernel_tensors", lambda *args: (copy(*args), swap(*args)))
        message = r"routed_experts.w2_weight_packed\[3\]: int32.* was loaded, but the engine runs with"
    publisher.forget()
    with pytest.raises(PublishError, match=message):
        publisher.publish("swapped")
    monkeypatch.undo()
    assert publisher.publish("healed")["publish/canary_abs_logp"] == 0.0


def gate_as_up(to, name, expert, shard):
    return to, name, expert, {"w1": "w3", "w3": "w1"}.get(shard, shard)


def next_expert(to, name, expert, shard):
    return to, name, expert ^ 1, shard


def other_names(to, name, expert, shard):
    return to, name.replace("down", "other"), expert, shard


@needs_engine
@pytest.mark.parametrize(
    ("change", "is_first", "message"),
    [
        (gate_as_up, False, "experts.0.gate_proj|up_proj.weight_packed: learner int32"),
        (gate_as_up, True, "experts.0.gate_proj|up_proj.weight_packed: learner int32"),
        (next_expert, True, "experts.0.down_proj.weight_packed: learner int32"),
        (other_names, False, "experts.0.down_proj.weight_packed: learner int32"),
        (other_names, True, "routed_experts.w2_weight_packed: the learner sent nothing for it"),
    ],
)
def test_a_loader_that_maps_experts_otherwise_is_refused(publisher, monkeypatch, change, is_first, message):
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    mapping = RoutedExperts.get_expert_mapping
    changed = lambda *args, **options: [change(*entry) for entry in mapping(*args, **options)]  # noqa: E731
    monkeypatch.setattr(RoutedExperts, "get_expert_mapping", changed)
    if is_first:
        # As in an engine that has loaded nothing.
        publisher.engine._worker.weight_transfer_engine._found.clear()
    publisher.forget()
    with pytest.raises(PublishError) as error:
        publisher.publish("mapped")
    assert message in str(error.value)
    monkeypatch.undo()
    assert publisher.publish("healed")["publish/canary_abs_logp"] == 0.0


@needs_engine
def test_an_expert_that_has_changed_in_the_engine_is_sent_again(publisher, caplog):
    publisher.publish("before")
    routed_experts(publisher).w13_weight_packed.data[3, 0, 0] += 1
    with caplog.at_level("WARNING", "trl_qarl"):
        publisher.publish("after")
    [warning] = [r.getMessage() for r in caplog.records if r.name == "trl_qarl.sync.publisher"]
    assert warning.endswith("Sent again: model.layers.1")
    assert engine_logps(publisher.engine.llm) == learner_logps(publisher.model)


# Other engines: the one above has ended with the first.
@needs_engine
@pytest.mark.parametrize(
    ("arch", "scheme"), [pytest.param("mixtral", "bf16", marks=pytest.mark.nightly), ("qwen2_moe", "w8a8")]
)
def test_a_reload_equals_loading_the_export(quick_engines, tmp_path, arch, scheme):
    publisher = make_mixtures_publisher(tmp_path, arch, scheme)
    llm, model = publisher.engine.llm, publisher.model
    for version in range(2):
        assert publisher.publish(str(version))["publish/canary_abs_logp"] == 0.0
        published = engine_logps(llm)
        assert published == learner_logps(model)
        update_masters(model, version)
    publisher.publish("last")
    published = engine_logps(llm)
    detach_engine_numerics(model)
    folder = export_checkpoint(model, tmp_path / "export", publisher.tokenizer, torch.bfloat16)
    assert engine_logps(load_engine(folder, max_model_len=128, max_num_seqs=8)) == published


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
def test_a_gpu_engine_uses_the_last_published_experts(tmp_path, scheme):
    """vLLM's own kernels (Marlin, CUTLASS, Triton), of which some repack. It has never run."""
    path = make_tiny_mixture(tmp_path, "qwen3_moe", moe_intermediate_size=128)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().cuda()
    prepare_model(model, scheme, scale_dtype=torch.bfloat16)
    engine = make_engine(
        EngineSpec.of(model, torch.bfloat16), on_cpu=False, max_model_len=128, gpu_memory_utilization=0.2
    )
    publisher = Publisher(model, torch.bfloat16, engine, AutoTokenizer.from_pretrained(path))
    publisher.check_engine()
    published = []
    for version in ("0", "again", "changed"):
        publisher.forget()
        assert publisher.publish(version)["publish/canary_abs_logp"] < 0.25
        published.append(engine_logps(engine.llm))
        if version == "again":
            update_masters(model, 1)
    assert published[0] == published[1] != published[2]
    routed_experts(publisher).w2_weight_scale.data.view(-1)[0] *= 2
    publisher.publish("healed")
    assert engine_logps(engine.llm) == published[2]


@pytest.fixture
def config(monkeypatch):
    """vLLM's configuration of a checkpoint with INT4 weights, as an engine of a trainer finds it."""
    from trl_qarl.vllm_plugin import expert_kernels as experts

    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    monkeypatch.setattr(experts, "is_our_engine", lambda: True)
    return experts.QaRLCompressedTensorsConfig.from_config(quantization_config(Inventory.of(model)))


def make_layer(**changes):
    """An experts' layer of vLLM that is not built yet."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    layer = object.__new__(RoutedExperts)
    parallel = SimpleNamespace(use_ep=changes.pop("use_ep", False))
    layer.moe_config = SimpleNamespace(has_bias=False, moe_parallel_config=parallel)
    vars(layer).update(ckpt_gate_proj_name="w1", ckpt_up_proj_name="w3", ckpt_down_proj_name="w2")
    vars(layer).update(
        {"activation": MoEActivation.SILU, "swiglu_limit": None, "apply_router_weight_on_input": False} | changes
    )
    return layer


@pytest.mark.parametrize("has_amx", [False, True])
def test_a_trainers_engine_has_our_experts(config, monkeypatch, has_amx):
    """With AMX vLLM would take a kernel that rounds activations to 8 bits."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    method = config.get_quant_method(make_layer(), "model.layers.0.block_sparse_moe.experts")
    assert type(method).__name__ == "QaRLInt4Experts" and not method.is_monolithic


def test_any_other_engine_has_vllms_experts_where_it_has_some(config, monkeypatch):
    from trl_qarl.vllm_plugin import expert_kernels as experts

    monkeypatch.setattr(experts, "is_our_engine", lambda: False)
    monkeypatch.setattr(experts.CompressedTensorsConfig, "get_quant_method", lambda self, layer, prefix: "vLLM's")
    for has_amx, name in ((True, "str"), (False, "QaRLInt4Experts")):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        assert type(config.get_quant_method(make_layer(), "model.layers.0.mlp.experts")).__name__ == name


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"use_ep": True}, "expert parallelism"),
        ({"swiglu_limit": 7.0}, "a limit"),
        ({"apply_router_weight_on_input": True, "top_k": 2}, "several weights of the router"),
    ],
)
def test_experts_that_compute_something_else_are_refused(config, changes, what):
    with pytest.raises(NotImplementedError, match=f"'model.layers.0.mlp.experts' have {what}"):
        config.get_quant_method(make_layer(**changes), "model.layers.0.mlp.experts")


def test_a_router_with_two_names_is_no_tied_weight():
    from trl_qarl.vllm_plugin.engine_tensors import tied_names

    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "gate": torch.nn.Linear(4, 2)})
    model["runner"] = torch.nn.ModuleDict({"gate": model["gate"]})
    model["head"] = torch.nn.Linear(4, 8, bias=False)
    model["head"].weight = model["embed"].weight
    assert list(tied_names(model)) == [("head.weight", "embed.weight")]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_ours", [False, True])
def test_a_router_without_groups_minds_the_bias_of_scores(monkeypatch, scoring, is_ours):
    from trl_qarl.vllm_plugin import expert_kernels as experts

    experts.register_experts()
    monkeypatch.setattr(experts, "is_our_engine", lambda: is_ours)
    bias, logits = torch.tensor([0.0, 2.0, 0.0, 0.0]), torch.tensor([[3.0, 0.0, 1.0, 2.0]])
    router = experts.CPURouter(
        top_k=2, global_num_experts=4, scoring_func=scoring, e_score_correction_bias=bias, routed_scaling_factor=2.0
    )
    if not is_ours:
        with pytest.raises(AssertionError) if scoring == "sigmoid" else nullcontext():
            assert router._compute_routing(logits, logits, None)[1].sort().values.tolist() == [[0, 3]]
        return
    weights, ids = router._compute_routing(logits, logits, None)
    scores = logits.softmax(1) if scoring == "softmax" else logits.sigmoid()
    assert ids.sort().values.tolist() == [[0, 1]]
    chosen = scores.gather(1, ids.long())
    torch.testing.assert_close(weights, 2.0 * chosen / chosen.sum())
