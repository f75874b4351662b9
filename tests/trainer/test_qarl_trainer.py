import inspect
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from testing_utils import CHAT_TEMPLATE, make_problems, make_tiny_model, make_tiny_tokenizer, spread
from testing_utils.trainings import EXPERTS, Masters, arguments, assert_equal, make, parameters, rows, train_stock
from trl_qarl.objectives.tbpo import TBPO
from trl_qarl.trainer.qarl_config import QaRLConfig
from trl_qarl.trainer.qarl_trainer import QaRLTrainer


def test_constructor_takes_exactly_the_arguments_of_grpo_trainer():
    ours = inspect.signature(QaRLTrainer.__init__).parameters
    stock = inspect.signature(GRPOTrainer.__init__).parameters
    assert list(ours) == list(stock)
    optional = {name for name, p in stock.items() if p.default is not inspect.Parameter.empty}
    assert {name for name, p in ours.items() if p.default is not inspect.Parameter.empty} == optional


FAULTS = """
import itertools, resource, sys
import torch
from testing_utils.trainings import make

def page_faults():
    "The fewest of some blocks of 64 MiB, one after another: another allocation may take a part of a freed block."
    counts = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(8):
        torch.ones(2**24)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return min(after - before for before, after in itertools.pairwise(counts))

before = page_faults()
make(*sys.argv[1:])
print(before, page_faults())
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_trainer_on_a_cpu_keeps_freed_memory(tiny_model, tmp_path):
    """In a process of its own: one that has trained before keeps free memory."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", FAULTS, tiny_model, str(tmp_path)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    before, after = map(int, output.split()[-2:])
    assert before > 1000 and after < 100


class Rates(TrainerCallback):
    """The learning rate of each update."""

    def __init__(self):
        self.rates = []

    def on_pre_optimizer_step(self, args, state, control, lr_scheduler=None, **kwargs):
        self.rates += lr_scheduler.get_last_lr()[:1]


@pytest.mark.parametrize("optim", ["muon", "adamw_torch", "adafactor", "one of the user's"])
def test_updates_without_a_gradient_move_nothing(tiny_model, tmp_path, optim, caplog):
    """Neither momentum nor weight decay, whatever the optimizer."""
    options = {"weight_decay": 0.1, "max_steps": 6, "lr_scheduler_type": "linear"}
    seen, schedule, model, own, calls = Masters(), Rates(), tiny_model, None, []

    def spread_once(completions, **kwargs):
        calls.append(None)
        return spread(completions) if len(calls) == 1 else [1.0] * len(completions)

    if optim == "one of the user's":
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        own = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.1)
    else:
        options["optim"] = optim
    args = arguments(tmp_path, **options)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    given = {"processing_class": tokenizer, "callbacks": [seen, schedule], "optimizers": (own, None)}
    trainer = QaRLTrainer(model, spread_once, args, make_problems(), **given)
    with caplog.at_level("WARNING", "trl_qarl"):
        trainer.train()
    assert [row["step/skipped"] for row in rows(trainer)] == [0, 0, 1, 1, 1, 1]
    assert [row["grad_norm"] == 0 for row in rows(trainer)] == [False] * 2 + [True] * 4
    moved = [not all(map(torch.equal, seen.at[step], seen.at[step + 1])) for step in range(6)]
    assert moved == [True, True, False, False, False, False]
    # As for gradients that overflow: updates count, and the schedule waits.
    assert trainer.state.global_step == 6
    assert (
        schedule.rates[:3] == pytest.approx([1e-3, 1e-3 * 5 / 6, 1e-3 * 4 / 6]) and len(set(schedule.rates[2:])) == 1
    )
    assert caplog.text.count("has no gradient") == 1 and "Update 3 has no gradient" in caplog.text
    assert "changed no weight" not in caplog.text


@pytest.mark.parametrize("optim", ["muon", "adamw_torch"])
def test_truncated_completions_move_nothing_when_masked(tiny_model, tmp_path, optim, caplog):
    assert QaRLConfig(str(tmp_path), use_cpu=True).weight_decay == 0.01, "the documented default"
    options = {"optim": optim, "weight_decay": 0.1, "mask_truncated_completions": True}
    trainer = make(tiny_model, tmp_path, max_steps=2, max_completion_length=2, **options)
    before = parameters(trainer)
    trainer.train()
    assert rows(trainer)[0]["completions/clipped_ratio"] == 1
    assert [row["step/skipped"] for row in rows(trainer)] == [1, 1]
    assert_equal(parameters(trainer), before)
    assert caplog.text.count("has changed no weight: none of its 2 updates had a gradient") == 1


def test_completions_that_end_at_an_own_token_are_not_truncated(tiny_model, tmp_path):
    """Half of all tokens end a completion, so few reach the limit."""
    options = {"mask_truncated_completions": True, "max_completion_length": 16, "max_steps": 1}
    trainer = make(tiny_model, tmp_path, generation_kwargs={"eos_token_id": [*range(4, 132)]}, **options)
    trainer.train()
    (row,) = rows(trainer)
    assert row["completions/clipped_ratio"] < 0.5 and row["grad_norm"] > 0


def loss_and_gradients(trainer, inputs):
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in trainer.model.named_parameters()}


def test_an_unquantized_learner_updates_as_bf16(tiny_model, tmp_path):
    rollout_only, _ = trainers = [
        make(tiny_model, tmp_path / str(i), **options, bf16=False, beta=0.1)
        for i, options in enumerate(({"quantize_learner": False}, {"scheme": "bf16"}))
    ]
    rollout_only.model.train()
    inputs = rollout_only._generate_and_score_completions([{"prompt": f"{i // 4} +"} for i in range(8)])
    (_, ours), (_, theirs) = (loss_and_gradients(trainer, inputs) for trainer in trainers)
    assert_equal(ours, theirs)
    with torch.no_grad():
        assert torch.equal(*(trainer._score(trainer.ref_model, inputs)[0] for trainer in trainers))


@pytest.mark.parametrize("objective", ["grpo", "dapo"])
def test_bf16_scheme_with_trls_loss_equals_stock_trl_bit_for_bit(tiny_model, tmp_path, objective):
    options = {"bf16": False, "optim": "adamw_torch", "steps_per_generation": 2}
    # Padded and shuffled as in TRL.
    options |= {"model_init_kwargs": {"attn_implementation": "eager"}, "keep_groups": False}
    ours = make(tiny_model, tmp_path / "ours", scheme="bf16", loss_type=objective, **options)
    ours.train()
    stock = train_stock(tiny_model, tmp_path / "stock", loss_type=objective, **options)
    assert_equal(parameters(stock), parameters(ours))


@pytest.mark.parametrize("use_bias_correction_kl", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_tbpo_in_the_trainer_equals_stock_sequence_level_grpo(tiny_model, tmp_path, beta, use_bias_correction_kl):
    shared = {"bf16": False, "beta": beta, "use_bias_correction_kl": use_bias_correction_kl}
    bands = {"negative_epsilon_low": 3e-4, "negative_epsilon_high": 7e-4, "positive_epsilon_high": 4e-4}
    tbpo = make(tiny_model, tmp_path, **shared, **bands)
    stock = make(
        tiny_model,
        tmp_path,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        delta=1.0007,
        **shared,
    )
    tbpo.model.train()
    inputs = tbpo._generate_and_score_completions([{"prompt": f"{i // 4} +"} for i in range(16)])
    # Learner log-probs 4e-4 off on average put sequences on both sides of every bound; w = 1.
    inputs["old_per_token_logps"] = inputs["old_per_token_logps"] + 2e-3 * torch.randn(inputs["completion_ids"].shape)
    inputs["sampling_per_token_logps"] = inputs["old_per_token_logps"]
    (ours, our_grads), (theirs, their_grads) = (loss_and_gradients(trainer, inputs) for trainer in (tbpo, stock))
    # A mean of terms of order 1 that cancel, in float32.
    assert ours == pytest.approx(theirs, abs=5e-7)
    for name, grad in their_grads.items():
        torch.testing.assert_close(our_grads[name], grad, rtol=1e-3, atol=1e-6)
    assert 0 < tbpo._metrics["train"]["tbpo/dropped/total"][-1] < 1


def test_a_synced_reference_is_quantized_after_a_skipped_step(tiny_model, tmp_path):
    """A loss scaler skips `optimizer.step()` on an overflow; TRL writes to the reference all the same."""
    trainer = make(tiny_model, tmp_path, beta=0.1, bf16=False, sync_ref_model=True, ref_model_mixup_alpha=1.0)
    tokens = torch.randint(4, 200, (2, 12))
    with torch.no_grad():
        before = trainer.ref_model(tokens).logits
        for p in trainer.model.parameters():
            p.add_(0.01 * torch.randn_like(p))
        trainer.callback_handler.on_step_end(trainer.args, trainer.state, trainer.control)
        after = trainer.ref_model(tokens).logits
        assert torch.equal(after, trainer.model(tokens).logits) and not torch.equal(after, before)


def test_an_environment_may_supply_the_prompts(tiny_model, tmp_path):
    class Environment:
        def reset(self, number, **kwargs):
            return f"{number} + 1 ="

        def get_reward(self):
            return torch.rand(()).item()

    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("['content'] }}", "['content'] }}{{ message['tool_calls'] }}")
    trainer = QaRLTrainer(
        tiny_model,
        args=arguments(tmp_path, max_steps=1),
        train_dataset=Dataset.from_dict({"number": list(range(8))}),
        processing_class=tokenizer,
        environment_factory=Environment,
    )
    trainer.train()
    assert trainer.state.global_step == 1


def test_answers_of_tools_are_not_in_the_loss(tmp_path, monkeypatch):
    called = []

    def add(a: int, b: int) -> int:
        """
        Adds two numbers.

        Args:
            a: The first.
            b: The second.
        """
        called.append((a, b))
        return a + b

    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath("qwen3.jinja").read_text()
    call = tokenizer('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>')[
        "input_ids"
    ]
    generate, is_first = QaRLTrainer._generate_single_turn, [True]

    def call_first(self, prompt_ids, *args, **kwargs):
        # A random model calls no tool; its other turns are its own.
        completion_ids, logps = generate(self, prompt_ids, *args, **kwargs)
        if is_first.pop():
            completion_ids[0], logps[0] = call, [-5.5] * len(call)
        is_first.append(False)
        return completion_ids, logps

    batches, inputs_of_loss = [], []
    own_loss, compute_loss = TBPO.loss, QaRLTrainer._compute_loss
    monkeypatch.setattr(QaRLTrainer, "_generate_single_turn", call_first)
    monkeypatch.setattr(
        QaRLTrainer, "_compute_loss", lambda self, model, x: inputs_of_loss.append(x) or compute_loss(self, model, x)
    )
    monkeypatch.setattr(TBPO, "loss", lambda self, args, x: batches.append(x) or own_loss(self, args, x))
    prompts = [[{"role": "user", "content": f"{i} + 1"}] for i in range(8)]
    trainer = QaRLTrainer(
        # Longer than the prompt, or TRL leaves the answer out.
        make_tiny_model(tmp_path, max_position_embeddings=2048),
        lambda completions, **kwargs: spread([str(c) for c in completions]),
        arguments(tmp_path, max_steps=1, max_completion_length=256, steps_per_generation=1),
        Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        tools=[add],
    )
    trainer.train()
    assert called == [(2, 3)] and trainer.state.global_step == 1
    (inputs,), (batch,) = inputs_of_loss, batches
    (row,) = [row for row, ids in enumerate(inputs["completion_ids"].tolist()) if ids[: len(call)] == call]
    is_completion = inputs["completion_mask"].bool()
    is_answer = is_completion & ~inputs["tool_mask"].bool()
    answer = tokenizer.decode(inputs["completion_ids"][row][is_answer[row]])
    assert answer.endswith("<|im_start|>assistant\n") and "<tool_response>\n5\n</tool_response>" in answer
    assert is_answer.any(1).tolist() == [index == row for index in range(4)]
    # What the model wrote counts, the turn after the answer too, and what the tool wrote does not.
    assert is_completion[row].nonzero().max() > is_answer[row].nonzero().max() > len(call)
    assert torch.equal(batch.mask.bool(), is_completion & ~is_answer)


def test_missing_arguments_get_a_default_config(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    trainer = QaRLTrainer(tiny_model, spread, train_dataset=make_problems())
    assert isinstance(trainer.args, QaRLConfig) and trainer.args.output_dir == "qwen2-QaRL"
    assert trainer.accelerator.device.type == "cpu"
    trainer.args.max_steps, trainer.generation_config.max_new_tokens = 1, 4
    trainer.train()
    assert trainer.state.global_step == 1


def test_masters_of_a_checkpoint_in_bfloat16_are_float32(tmp_path):
    path = make_tiny_model(tmp_path, "qwen2", dtype="bfloat16")
    assert make(path, tmp_path / "default").model.dtype is torch.float32


def test_experts_train_in_high_precision_if_they_are_named(tmp_path):
    model = make_tiny_model(tmp_path, "qwen3_moe", **EXPERTS)
    options = {"exclude_modules": ["experts"], "max_steps": 1}
    trainer = make(model, tmp_path / "allowed", **options)
    trainer.train()
    assert len(trainer.swap_report.converted) == 8
    make(model, tmp_path / "bf16", scheme="bf16")


def test_rewards_of_none_leave_their_completions_without_effect(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, reward=lambda completions, **kwargs: [None] * len(completions), max_steps=1)
    before = parameters(trainer)
    trainer.train()
    assert rows(trainer)[0]["grad_norm"] == 0 and rows(trainer)[0]["reward"] is None
    assert all(torch.isfinite(p).all() and p.shape == before[n].shape for n, p in trainer.model.named_parameters())


def with_rollouts(tiny_model, tmp_path, ids, logprobs, reward=spread, **fields):
    """A trainer whose `rollout_func` returns these for each prompt."""

    def rollout(prompts, trainer):
        n = len(prompts)
        given = None if logprobs is None else [logprobs] * n
        others = {name: [*map(value, range(n))] for name, value in fields.items()}
        ids_of_all = [[*ids, 7 + i % 3] for i in range(n)]
        return {"prompt_ids": [[4, 5]] * n, "completion_ids": ids_of_all, "logprobs": given, **others}

    return QaRLTrainer(tiny_model, reward, arguments(tmp_path, max_steps=1), make_problems(), rollout_func=rollout)


def test_a_rollout_func_gives_its_rewards_to_a_function(tiny_model, tmp_path):
    def reward(completions, won, **kwargs):
        return won

    trainer = with_rollouts(tiny_model, tmp_path, [5, 6], [-9.0] * 3, reward, won=float)
    trainer.train()
    assert rows(trainer)[0]["reward_std"] > 0
    with pytest.raises(ValueError, match="needs a `prompt` column"):
        trainer.evaluate(Dataset.from_dict({"text": ["1"] * 4}))


def test_log_probs_of_a_rollout_func_are_the_sampling_log_probs(tiny_model, tmp_path):
    trainer = with_rollouts(tiny_model, tmp_path, [5, 6], [-9.0] * 3)
    trainer.train()
    # A random model gives each of 260 tokens about log(1 / 260) = -5.6, which is 3.4 above what the rollout claims.
    assert rows(trainer)[0]["mismatch/abs_logp_mean"] == pytest.approx(3.4, abs=0.5)
    assert rows(trainer)[0]["mismatch/weight_mean"] == 2.0


@pytest.mark.parametrize(
    ("ids", "logprobs", "names"), [([5, 6], None, "logprobs=None"), ([5, 260], [-5.0] * 3, "`rollout_func`.* 260 ")]
)
def test_a_rollout_that_cannot_be_trained_on_is_refused(tiny_model, tmp_path, ids, logprobs, names):
    with pytest.raises(ValueError, match=names):
        with_rollouts(tiny_model, tmp_path, ids, logprobs).train()


@pytest.mark.parametrize("value", [1e38, 1e17, math.nan, None])
def test_huge_rewards_do_not_reach_the_weights(tiny_model, tmp_path, caplog, value):
    def lengths(completions, **kwargs):
        return [float(len(text)) for text in completions]

    def overflows(completions, **kwargs):
        return [value, *[float(number) for number in range(len(completions) - 1)]]

    trainer = make(tiny_model, tmp_path, reward=[lengths, overflows], max_steps=4)
    trainer.train()
    said = [record.getMessage() for record in caplog.records if "returned" in record.getMessage()]
    if value is None or value == 1e17:
        assert said == []
    elif math.isnan(value):
        assert len(said) == 1 and "'overflows' returned nan for completion 0 of 8" in said[0]
    else:
        assert (
            len(said) == 1 and "'overflows' returned 1e+38 for completion 0 of 8: in float32 the advantages" in said[0]
        )
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert all(math.isfinite(row["loss"]) for row in rows(trainer))


def test_a_callback_that_evaluates_leaves_the_rows_of_updates(tiny_model, tmp_path):
    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.evaluate()

    trainer = make(tiny_model, tmp_path, eval_dataset=make_problems(4), callbacks=[Evaluates()], max_steps=2)
    trainer.train()
    assert [row["step"] for row in rows(trainer)] == [1, 2] and "reward" in rows(trainer)[0]


def test_an_evaluation_leaves_random_numbers_of_training_alone(tiny_model, tmp_path):
    """Those by which completions are drawn, and by which TRL shuffles a batch."""
    plain, evaluated = (
        make(tiny_model, tmp_path / name, eval_dataset=make_problems(4), max_steps=3, **options)
        for name, options in (("plain", {}), ("evaluated", {"eval_strategy": "steps", "eval_steps": 1}))
    )
    for trainer in (plain, evaluated):
        torch.manual_seed(3)
        trainer.train()
    assert len([row for row in evaluated.state.log_history if "eval_reward" in row]) == 3
    assert all(map(torch.equal, plain.model.state_dict().values(), evaluated.model.state_dict().values()))
    assert any(row["grad_norm"] for row in plain.state.log_history if "grad_norm" in row)
