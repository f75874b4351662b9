"""Learner with engine numerics and sampler give every token the same log-prob, bit for bit."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import logged, make_tiny_model, make_vllm_trainer
from trl_qarl import prepare_model
from trl_qarl.numerics import kernels, ops
from trl_qarl.numerics.attach import attach_engine_numerics
from trl_qarl.rollout.engines import make_engine
from trl_qarl.rollout.publisher import Publisher
from trl_qarl.rollout.server import free_port
from trl_qarl.rollout.transports import DirectTransport


pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not kernels.has_engine_kernels(), reason="needs vLLM's CPU kernels"),
]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")


def make_trainer(directory, arch="qwen3", **arguments):
    defaults = {
        "numerics": "engine",
        "vllm_mode": "colocate",
        "bf16": True,
        "per_device_train_batch_size": 16,
        "max_completion_length": 40,
        "learning_rate": 1e-2,
    }
    return make_vllm_trainer(directory, arch, **(defaults | arguments))


def record_batches(trainer):
    """Every generation batch of `trainer` from now on, in a list that grows."""
    batches, generate = [], trainer._generate_and_score_completions

    def generate_and_record(inputs):
        batches.append(generate(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = generate_and_record
    return batches


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
def test_rollout_and_learner_agree_in_every_bit_while_weights_change(tmp_path, arch, scheme):
    temperature = 0.7 if arch == "llama" else 1.0
    trainer = make_trainer(tmp_path, arch, scheme=scheme, temperature=temperature)
    batches = record_batches(trainer)
    trainer.train()
    assert len(batches) == 2
    for batch in batches:
        mask = batch["completion_mask"].bool()
        assert mask.sum() > 1000
        assert torch.equal(batch["old_per_token_logps"][mask], batch["sampling_per_token_logps"][mask])
        # A deterministic engine that was seeded alike would repeat itself within a group.
        assert len({tuple(row.tolist()) for row in batch["completion_ids"]}) == len(mask)
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0, 0.0]
    assert logged(trainer, "mismatch/weight_mean") == [1.0, 1.0]
    assert not torch.equal(batches[0]["old_per_token_logps"], batches[1]["old_per_token_logps"])


@torch.no_grad()
def test_chunks_of_a_prompt_and_a_cached_prefix_have_the_bits_of_the_whole(tmp_path):
    from vllm import SamplingParams

    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, "qwen3"), dtype=torch.float32)
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    llm = make_engine(
        model,
        torch.bfloat16,
        on_cpu=True,
        distributed_executor_backend="uni",
        max_model_len=512,
        max_num_batched_tokens=160,
        max_num_seqs=8,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=True,
        disable_log_stats=False,
    )
    Publisher(model, torch.bfloat16, DirectTransport(llm)).publish("0")
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(4, 260, (300,), generator=generator).tolist()
    prompts = [prefix + torch.randint(4, 260, (n,), generator=generator).tolist() for n in (1, 7, 50, 90)]
    parameters = SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True)
    # The first prompt fills the cache; all are longer than what vLLM computes at once.
    outputs = [o for part in (prompts[:1], prompts) for o in llm.generate([*map(tokens, part)], parameters)]
    assert [output.num_cached_tokens for output in outputs] == [0, 256, 256, 256, 256]
    attach_engine_numerics(model)
    for output in outputs:
        completion = output.outputs[0]
        ids = torch.tensor([output.prompt_token_ids + list(completion.token_ids)])
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(output.prompt_token_ids), -100)
        ours = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs[0, -40:]
        theirs = [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert ours.tolist() == theirs


def tokens(ids):
    return {"prompt_token_ids": ids}


def test_a_server_in_another_process_agrees_too(tmp_path):
    trainer = make_trainer(
        tmp_path, scheme="w4a16", vllm_mode="server", vllm_server_autostart=True, vllm_server_port=free_port()
    )
    trainer.train()
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0, 0.0]
    assert min(logged(trainer, "rollout/mean_length")) > 20


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
def test_transformers_decoding_with_a_cache_agrees_with_scoring(tmp_path, scheme):
    trainer = make_trainer(tmp_path, scheme=scheme, use_vllm=False, vllm_mode="server", temperature=0.7)
    trainer.train()
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0, 0.0]


@pytest.mark.parametrize("objective", ["tbpo", "gspo"])
def test_the_first_update_of_a_batch_is_exactly_on_policy(tmp_path, monkeypatch, objective):
    """In micro-batches of another size than scoring, under gradient checkpointing."""
    trainer = make_trainer(
        tmp_path,
        use_vllm=False,
        vllm_mode="server",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        gradient_checkpointing=True,
        learning_rate=1e-4,
        objective=objective,
    )
    ratios, score = [], trainer._get_per_token_logps_and_entropies
    monkeypatch.setattr(
        trainer,
        "_get_per_token_logps_and_entropies",
        lambda *args, **kwargs: ratios.append(score(*args, **kwargs)) or ratios[-1],
    )
    batches = record_batches(trainer)
    trainer.train()
    assert len(batches) == 2
    # A batch is scored once, then come two micro-batches of each of its two updates.
    of_batch = [[logps.detach() for logps, *_ in ratios[i : i + 5]] for i in (0, 5)]
    for batch, (scored, *updates) in zip(batches, of_batch, strict=True):
        rows = {tuple(row.tolist()) for row in scored}
        assert all(tuple(row.tolist()) in rows for logps in updates[:2] for row in logps)
        assert not all(tuple(row.tolist()) in rows for logps in updates[2:] for row in logps)
        assert len(batch["completion_ids"]) == 16
    dropped = logged(trainer, "tbpo/dropped/total" if objective == "tbpo" else "clip_ratio/region_mean")
    assert dropped[::2] == [0.0, 0.0]


def hf_add(x, residual):
    return (x + residual).float()


def hf_rotate(x, positions, cache):
    cos, sin = cache[positions].repeat(1, 2).unsqueeze(1).chunk(2, -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def hf_rms_norm(x, weight, epsilon, dtype):
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight, epsilon).to(dtype)


@pytest.mark.parametrize("replacement", [hf_add, hf_rotate, hf_rms_norm])
def test_other_arithmetic_in_the_learner_is_found_and_its_layer_named(tmp_path, monkeypatch, replacement):
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(ops, replacement.__name__.removeprefix("hf_"), replacement)
    with pytest.raises(RuntimeError, match=r"mismatch is .* and not 0: .*'layers.0' is the first layer whose output"):
        trainer.train()


def test_the_first_layer_that_differs_is_named_and_a_warning_lets_training_go_on(tmp_path, caplog):
    trainer = make_trainer(tmp_path, exact="warn", max_steps=2)
    trainer.model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.01)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "'layers.1' is the first layer whose output differs" in caplog.text
