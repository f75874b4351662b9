"""Learner with engine numerics and sampler give every token the same log-prob, bit for bit."""

import gc
import json
import re

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback

from testing_utils import MIXTURES, logged, make_tiny_model, make_vllm_trainer, start_engines_quickly
from testing_utils import make_trainer as make_plain_trainer
from trl_qarl import prepare_model
from trl_qarl.bitwise import cpu as kernels
from trl_qarl.bitwise import expert_products as experts
from trl_qarl.bitwise import low_bit
from trl_qarl.bitwise.attach import attach_engine_numerics
from trl_qarl.bitwise.exact import check_arithmetic, describe_difference
from trl_qarl.engines.in_process import make_engine
from trl_qarl.engines.server_command import cpu_environment
from trl_qarl.engines.spec import EngineSpec
from trl_qarl.sync import canary
from trl_qarl.sync.publisher import Publisher


vllm_envs = pytest.importorskip("vllm.envs")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not kernels.has_engine_kernels(), reason=str(kernels.reason_against())),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    # An engine that another test started has made vLLM remember its environment.
    vllm_envs.disable_envs_cache()
    start_engines_quickly(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def end_engines():
    """vLLM exempts an engine that it starts from collection: the last one would stay in this process."""
    yield
    gc.unfreeze()
    gc.collect()


def make_trainer(directory, arch="qwen3", **arguments):
    defaults = {
        "numerics": "exact",
        "vllm_mode": "colocate",
        "bf16": True,
        "per_device_train_batch_size": 16,
        "max_completion_length": 40,
        "learning_rate": 1e-2,
    }
    return make_vllm_trainer(directory, arch, **(defaults | arguments))


def assert_agrees(batches, num_tokens):
    """Log-probs of learner and sampler have the same bits, of more than so many tokens in each batch."""
    for batch in batches:
        mask = batch["completion_mask"].bool()
        assert mask.sum() > num_tokens
        assert torch.equal(batch["learner_logps"][mask], batch["sampling_per_token_logps"][mask])


def record_batches(trainer):
    """Generation batches of `trainer` from now on, with the learner's log-probs, in a list that grows."""
    batches, generate = [], trainer._generate_and_score_completions

    def generate_and_record(inputs):
        batch = generate(inputs)
        batches.append(batch | {"learner_logps": trainer._score_rollout(batch)})
        return batch

    trainer._generate_and_score_completions = generate_and_record
    return batches


@pytest.mark.parametrize(
    ("arch", "scheme"),
    [
        # Other schemes: tests/rollout/test_vllm_plans.py.
        *[("qwen3", "fp8"), ("llama", "w4a8-int8"), ("qwen2", "w8a16")],
        *[("qwen3_moe", "w4a16"), ("qwen2_moe", "bf16"), ("mixtral", "w8a8")],
        *(
            pytest.param(arch, scheme, marks=pytest.mark.nightly)
            for arch, schemes in {
                "qwen3": ["bf16", "w4a16", "w8a8", "w4a8-int8", "mxfp4a16"],
                "llama": ["bf16", "w4a16", "w8a8", "fp8"],
                "qwen3_moe": ["w4a8-int8"],
            }.items()
            for scheme in schemes
        ),
    ],
)
def test_rollout_and_learner_agree_while_routes_change(tmp_path, arch, scheme):
    has_experts, options = arch in MIXTURES, {"temperature": 0.7 if arch == "llama" else 1.0}
    if has_experts:
        options = {"router_aux_loss_coef": 0.01}
    trainer = make_trainer(tmp_path, arch, scheme=scheme, **options)
    assert trainer.numerics == "engine"
    batches = record_batches(trainer)
    trainer.train()
    assert len(batches) == 2
    assert_agrees(batches, 500 if has_experts else 1000)
    # 1 is perfect balance for each of two choices.
    assert all(1.9 < value < 16 for value in logged(trainer, "aux_loss"))
    assert bool(logged(trainer, "aux_loss")) == has_experts
    for batch in batches:
        # A deterministic engine that was seeded alike would repeat itself within a group.
        assert len({tuple(row.tolist()) for row in batch["completion_ids"]}) == len(batch["completion_ids"])
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0, 0.0]
    assert logged(trainer, "mismatch/weight_mean") == [1.0, 1.0]
    assert not torch.equal(batches[0]["learner_logps"], batches[1]["learner_logps"])


@pytest.fixture
def lenient_canary(monkeypatch):
    """Lets an engine begin whose first batch is to be looked into: the canary would refuse it, and names no layer."""
    monkeypatch.setattr(canary, "SMALLEST", canary.LARGEST)


def test_a_rerouted_token_is_named_with_its_layer(tmp_path, monkeypatch, lenient_canary):
    trainer = make_trainer(tmp_path, "qwen3_moe", scheme="w4a16")
    choose = experts.route
    monkeypatch.setattr(experts, "route", lambda logits, *args: choose(logits.roll(1, dims=1), *args))
    message = r"'layers.0' is the first layer .*: token 0 goes to experts \[\d, \d\] in the learner, \[\d, \d\] in the engine"
    with pytest.raises(RuntimeError, match=message):
        trainer.train()


@pytest.mark.parametrize(
    ("lora_mode", "scheme"),
    [
        ("merged", "w4a16"),
        ("adapter", "w4a16"),
        pytest.param("adapter", "fp8", marks=pytest.mark.nightly),
        pytest.param("merged", "w8a8", marks=pytest.mark.nightly),
        pytest.param("adapter", "bf16", marks=pytest.mark.nightly),
    ],
)
def test_lora_agrees_in_every_bit_during_training(tmp_path, lora_mode, scheme):
    peft = pytest.importorskip("peft")
    trainer = make_trainer(
        tmp_path,
        "qwen2",
        scheme=scheme,
        lora_mode=lora_mode,
        # The engine fills up 3 to 8.
        peft_config=peft.LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM"),
        optim="adamw_torch",
        beta=0.1,
    )
    assert trainer.numerics == "engine"
    batches = record_batches(trainer)
    trainer.train()
    assert len(batches) == 2
    assert_agrees(batches, 500)
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0] * 2
    # The reference is the base without its adapter, in the same arithmetic.
    assert logged(trainer, "kl")[0] == 0.0 < logged(trainer, "kl")[-1]


@torch.no_grad()
def test_chunks_and_cached_prefixes_have_the_same_bits(tmp_path):
    """The model has the rotary embedding of Llama 3 and uses each of its three bands of frequencies."""
    from vllm import SamplingParams

    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    path = make_tiny_model(tmp_path, "llama", rope_parameters=rope | {"original_max_position_embeddings": 64})
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    engine = make_engine(
        EngineSpec.of(model, torch.bfloat16),
        on_cpu=True,
        distributed_executor_backend="uni",
        max_model_len=512,
        max_num_batched_tokens=160,
        max_num_seqs=8,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=True,
        disable_log_stats=False,
    )
    Publisher(model, torch.bfloat16, engine).publish("0")
    llm = engine.llm
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(4, 260, (300,), generator=generator).tolist()
    prompts = [prefix + torch.randint(4, 260, (n,), generator=generator).tolist() for n in (1, 7, 50, 90)]
    parameters = SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True)
    # The first prompt fills the cache; all are longer than what vLLM computes at once.
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = [o for part in (requests[:1], requests) for o in llm.generate(part, parameters)]
    assert [output.num_cached_tokens for output in outputs] == [0, 256, 256, 256, 256]
    attach_engine_numerics(model)
    [table] = llm.apply_model(lambda engine: engine.model.layers[0].self_attn.rotary_emb.cos_sin_cache)
    assert torch.equal(model.model.rotary_emb.forward.tables[None], table)
    for output in outputs:
        completion = output.outputs[0]
        ids = torch.tensor([output.prompt_token_ids + list(completion.token_ids)])
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(output.prompt_token_ids), -100)
        ours = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs[0, -40:]
        theirs = [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert ours.tolist() == theirs


LENGTH = 2048


@pytest.mark.parametrize(
    ("arch", "head_dim", "fields"),
    [
        ("qwen3", 128, {}),
        pytest.param("qwen3", 64, {}, marks=pytest.mark.nightly),
        pytest.param("mistral", 128, {"sliding_window": 1000}, marks=pytest.mark.nightly),
        pytest.param(
            *("qwen2", 64, {"sliding_window": 300, "use_sliding_window": True, "max_window_layers": 0}),
            marks=pytest.mark.nightly,
        ),
        # A window in one of two layers; vLLM runs transformers' rotation.
        ("olmo3", 64, {"sliding_window": 300, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_long_sequences_agree_in_every_bit_while_weights_change(tmp_path, arch, head_dim, fields):
    """Prompts have more keys than a tile of vLLM's prefill, and two layers of attention."""
    sizes = {"head_dim": head_dim, "max_position_embeddings": LENGTH, "intermediate_size": 128}
    model = make_tiny_model(tmp_path, arch, **sizes, **fields)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        "".join(map(chr, row)) for row in torch.randint(97, 123, (4, LENGTH - 64), generator=generator).tolist()
    ]
    trainer = make_plain_trainer(
        model,
        tmp_path / "output",
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        scheme="w4a16",
        numerics="exact",
        bf16=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=LENGTH,
        max_completion_length=64,
        generation_kwargs={"ignore_eos": True},
        optim="muon",
        learning_rate=1e-2,
        steps_per_generation=1,
        num_generations=2,
        max_steps=2,
    )
    batches = record_batches(trainer)
    trainer.train()
    assert len(batches) == 2 and not torch.equal(batches[0]["completion_ids"], batches[1]["completion_ids"])
    for batch in batches:
        mask = batch["completion_mask"].bool()
        assert mask.all() and mask.shape[1] + batch["prompt_ids"].shape[1] == LENGTH
        assert torch.equal(batch["learner_logps"], batch["sampling_per_token_logps"])
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0, 0.0]


@pytest.mark.parametrize("stop", [None, ["a", "b", "c", "d"]])
def test_an_engine_makes_text_only_for_stop_strings(tmp_path, stop):
    trainer = make_trainer(tmp_path, generation_kwargs=stop and {"stop": stop})
    llm, completions = trainer.vllm_generation.llm, []
    generate = llm.generate

    def generate_and_record(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        completions[:] = [completion for output in outputs for completion in output.outputs]
        return outputs

    llm.generate = generate_and_record
    trainer._generate_and_score_completions([{"prompt": "1 +"}] * 16)
    assert len(completions) == 16 and any(completion.stop_reason for completion in completions) == bool(stop)
    assert any(completion.text for completion in completions) == bool(stop)


class ChangeArithmetic(TrainerCallback):
    """Lets the learner's last layer compute something else from update `step` on."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.01)


def test_rollouts_in_vllm_have_engine_numerics_by_default(tmp_path, caplog):
    """Arithmetic that differs is not an error then."""
    trainer = make_trainer(tmp_path, numerics=None, callbacks=[ChangeArithmetic(step=2)], max_steps=8)
    assert trainer.numerics == "engine"
    trainer.train()
    first, *others = logged(trainer, "mismatch/abs_logp_max")
    assert first == 0.0 and min(others) > 0 and len(others) == 3
    assert json.loads((tmp_path / "output" / "run.json").read_text())["numerics"] == "engine"
    assert sum("the largest mismatch is" in record.message for record in caplog.records) == 1


def test_an_engine_that_splits_the_sums_of_attention_is_refused(tmp_path, monkeypatch):
    settings = cpu_environment() | {"VLLM_CPU_ATTN_SPLIT_KV": "1"}
    monkeypatch.setattr("trl_qarl.engines.in_process.cpu_environment", lambda: settings)
    with pytest.raises(ValueError, match=r"is not the learner's:\n  VLLM_CPU_ATTN_SPLIT_KV: learner 0, engine 1\n"):
        make_trainer(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("avx512", False, r"avx512: learner True, engine False"),
        ("amx", None, r"amx: learner (True|False), engine None"),
        ("l2_cache_size", 1, r"l2_cache_size: learner \d+, engine 1"),
        ("vllm", "0.0.1", r"vllm: learner '\d+\.\d+\S*', engine '0.0.1'"),
        ("attention", None, r"learner 'requests of one pass', engine None\n.*same releases of vLLM and trl_qarl"),
        ("lora", {"max_rank": 64}, "max_lora_rank: learner 8, engine 64"),
    ],
)
def test_an_engine_with_another_prefill_or_rank_is_refused(key, value, message):
    theirs = low_bit.describe_arithmetic() | {"VLLM_CPU_ATTN_SPLIT_KV": 0}
    check_arithmetic({"arithmetic": theirs})
    check_arithmetic({"arithmetic": theirs, "lora": {"max_rank": 8}}, adapter_rank=8)
    with pytest.raises(ValueError, match=message):
        check_arithmetic({"arithmetic": theirs | {key: value}, "lora": {"max_rank": 8}} | {key: value}, adapter_rank=8)


def test_the_first_differing_layer_is_named(tmp_path, caplog):
    trainer = make_trainer(tmp_path, numerics="engine", max_steps=2, learning_rate=0.0)
    batches = record_batches(trainer)
    hook = trainer.model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.01)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "'layers.1' is the first layer whose output differs" in caplog.text
    # An engine whose layers are out of reach, as those of a server, is asked for log-probs.
    (batch,) = batches
    batch["old_per_token_logps"] = batch["learner_logps"]
    score = trainer.vllm_generation.engine.score
    text = describe_difference(batch, batch["completion_mask"], trainer.model, score=score)
    assert re.search(
        r"learner and sampler give token \d+ of completion \d+ \(id \d+\) log-probs .*; over the same tokens at once, at "
        r"temperature 1, \d+ of \d+ differ, the first is token 1 of the prompt \(learner -[\d.]+, engine -[\d.]+\); "
        r"vllm_mode='colocate' would name the layer",
        text,
    )
    hook.remove()
    text = describe_difference(batch, batch["completion_mask"], trainer.model, score=score)
    assert text.endswith("it agrees on all, so its decoding differs from its prefill")
