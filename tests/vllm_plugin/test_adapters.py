"""A LoRA adapter next to low-bit weights in a real vLLM engine: what arrives, is refused and is computed then."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_model, tampered
from testing_utils.engines import differences, engine_logps, engine_model, mismatch, publish_to_engine
from testing_utils.engines import update_masters as update
from trl_qarl import prepare_model
from trl_qarl.quantization.swap import freeze_model
from trl_qarl.sync.publisher import Publisher
from trl_qarl.wire.protocol import PublishError


pytest.importorskip("vllm")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

A = "model.layers.1.self_attn.v_proj.lora_A.weight"
B = "model.layers.1.self_attn.v_proj.lora_B.weight"


@pytest.fixture(scope="module")
def publisher(quick_engines, tmp_path_factory):
    path = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    # In vLLM k_proj and up_proj share a layer with others that are adapted. A rank below the engine's, a scaling other
    # than 1.
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets)).eval()
    prepare_model(model, "w4a16", scale_dtype=torch.float32)
    freeze_model(model)
    # On a CPU blocks are as long as this model's context otherwise, and what is in no whole block is never cached.
    publisher = publish_to_engine(model, path, torch.float32, block_size=32)
    publisher.description = publisher.check_engine()
    publisher.publish("0")
    return publisher


def test_the_engine_uses_the_last_published_adapter(publisher):
    llm, model = publisher.engine.llm, publisher.model
    assert publisher.description["lora"] == {
        "max_rank": 8,
        "dtype": "float32",
        "modules": [
            *("down_proj", "gate_proj", "gate_up_proj", "k_proj", "o_proj", "q_proj", "qkv_proj", "up_proj", "v_proj")
        ],
    }
    num_tensors = sum("lora_" in name for name, _ in model.named_parameters())
    before = engine_logps(llm)
    for version in range(3):
        update(model, version, 0.1)
        result = publisher.publish(str(version))
        assert result["publish/tensors"] == num_tensors and result["publish/unchanged_tensors"] > num_tensors
        assert result["publish/canary_abs_logp"] < 1e-5
        after = engine_logps(llm)
        assert mismatch(publisher) < 1e-5 < 0.01 < differences(after, before).mean()
        before = after
    # Nothing new, and everything again.
    assert publisher.publish("again")["publish/tensors"] == 0
    assert engine_logps(llm) == before
    publisher.forget()
    assert publisher.publish("all of it")["publish/unchanged_tensors"] == 0
    assert engine_logps(llm) == before
    with model.disable_adapter():
        assert mismatch(publisher) > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n, t: [] if n == A else [(n, t)], f"{A}: the engine received nothing"),
        (lambda n, t: [(n, t.flip(0) if n == B else t)], f"{B}: learner float32"),
        (lambda n, t: [(n, t), (n.replace("v_proj", "rotary_emb"), t)], "rotary_emb.lora_A.weight: the learner did"),
    ],
    ids=["missing", "rows elsewhere", "unknown"],
)
def test_a_damaged_adapter_is_refused_and_the_next_heals(publisher, change, message):
    update(publisher.model, 7, 0.1)
    with tampered(publisher, change), pytest.raises(PublishError) as error:
        publisher.publish("damaged")
    assert message in str(error.value)
    publisher.publish("healed")
    assert mismatch(publisher) < 1e-5


def scale_b(layer, set_lora, index, a, b):
    set_lora(index, a, [None if part is None else 1.5 * part for part in b])


def keep_the_old(*args):
    pass


def leave_a_row(layer, set_lora, index, a, b):
    set_lora(index, a, b)
    layer.lora_a_stacked[1][index, 0, 0, 0] = 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (scale_b, "lora_B.weight: learner float32[128, 4] "),
        (keep_the_old, "lora_A.weight: learner float32[4, 128] "),
        # Of k_proj, which has no adapter.
        (leave_a_row, "k_proj: the engine's buffer holds more than was sent"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unreached_running_buffers_are_noticed(publisher, monkeypatch, wrong, message):
    layer = engine_model(publisher).get_submodule("model.layers.0.self_attn.qkv_proj")
    update(publisher.model, 8, 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(layer, "set_lora", partial(wrong, layer, layer.set_lora))
        with pytest.raises(PublishError, match="The published adapter is not the learner's") as error:
            publisher.publish("wrong")
    assert message in str(error.value)
    assert publisher.publish("right")["publish/unchanged_tensors"] == 0
    assert mismatch(publisher) < 1e-5


@pytest.mark.parametrize("adapted", [["in_proj_qkv", "in_proj_z"], ["in_proj_qkv"]])
def test_slices_of_a_fused_layer_belong_to_their_matrices(adapted):
    """Those of Qwen3.5's linear attention: three of one matrix, and one of another."""
    from trl_qarl.vllm_plugin.lora import _slices

    layer = SimpleNamespace(lora_b_stacked=[torch.zeros(1, 1, rows, 4) for rows in (2, 2, 4, 4)])
    rows = {"in_proj_qkv": 8, "in_proj_z": 4}
    sent = {f"{name}.lora_B.weight": (name, torch.zeros(rows[name], 4)) for name in adapted}
    assert [*_slices(layer, [*rows], sent)] == [("in_proj_qkv", 0, 3), ("in_proj_z", 3, 4)]


def test_the_adapter_of_a_fused_matrix_is_split_by_rows():
    """That of GLM's `gate_up_proj`, for which vLLM has two layers."""
    from trl_qarl.vllm_plugin.lora import _unpacked

    manager = SimpleNamespace(
        packed_modules={"mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"]},
        modules={"mlp.gate_up_proj": SimpleNamespace(output_sizes=[3, 3])},
    )
    a, b, other = torch.rand(2, 4), torch.rand(6, 2), torch.rand(4, 2)
    fused = {"mlp.gate_up_proj.lora_A.weight": a, "mlp.gate_up_proj.lora_B.weight": b}
    unpacked = dict(_unpacked(manager, {**fused, "mlp.down_proj.lora_B.weight": other}))
    assert [unpacked.pop(f"mlp.{part}_proj.lora_A.weight") is a for part in ("gate", "up")] == [True, True]
    gate, up = (unpacked.pop(f"mlp.{part}_proj.lora_B.weight") for part in ("gate", "up"))
    assert torch.equal(torch.cat([gate, up]), b) and unpacked == {"mlp.down_proj.lora_B.weight": other}


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (lambda model: model.get_submodule("model.layers.1.mlp.down_proj").lora_b_stacked[0], "adapter"),
        (lambda model: model.get_submodule("model.layers.1.mlp.down_proj").base_layer.weight_packed, "model.layers.1"),
    ],
    ids=["adapter", "base"],
)
def test_what_has_changed_in_the_engine_is_named_and_sent_again(publisher, caplog, tensor, named):
    memory = tensor(engine_model(publisher)).data.view(torch.uint8).view(-1)
    memory[0] ^= 1
    result = publisher.publish("repaired")
    assert f"Sent again: {named}" in caplog.text and result["publish/tensors"] > 0
    assert result["publish/unchanged_tensors"] > 0
    assert mismatch(publisher) < 1e-5


def test_a_trainer_without_an_adapter_gets_the_base(publisher):
    """The next trainer of a server; its base happens to be the same."""
    base = AutoModelForCausalLM.from_pretrained(publisher.model.get_base_model().name_or_path, dtype=torch.float32)
    prepare_model(base, "w4a16", scale_dtype=torch.float32)
    other = Publisher(base.eval(), torch.float32, publisher.engine)
    other.publish("base")
    assert mismatch(other) < 1e-5
    publisher.forget()
    publisher.publish("back")
    assert mismatch(publisher) < 1e-5


def test_the_prefix_cache_forgets_the_old_adapter(publisher):
    from vllm import SamplingParams

    # Three blocks of 32 tokens, and the rest. Requests for log-probs of the prompt would not read the cache.
    llm, model, prompt = publisher.engine.llm, publisher.model, list(range(5, 105))
    parameters = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    cached = []

    def check():
        (output,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        cached.append(output.num_cached_tokens)
        ((token, entry),) = output.outputs[0].logprobs[0].items()
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[token].item()
        assert entry.logprob == pytest.approx(expected, abs=1e-5)

    publisher.publish("first")
    check()
    check()
    update(model, 10, 0.1)
    publisher.publish("second")
    check()
    assert cached == [0, 96, 0]
