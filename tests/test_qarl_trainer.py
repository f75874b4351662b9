import importlib.util
import inspect
import json
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
import trl
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback, TrainerState
from trl import GRPOConfig, GRPOTrainer

import trl_qarl.quantization.tensors
from testing_utils import CHAT_TEMPLATE, TRAINING, make_problems, make_tiny_model, make_tiny_tokenizer, spread, stop_at
from trl_qarl.checkpoint import marker
from trl_qarl.checkpoint.export import export_checkpoint
from trl_qarl.forward import takes_positions
from trl_qarl.objectives.presets import Preset
from trl_qarl.objectives.registry import all_objectives, get_objective
from trl_qarl.qarl_config import QaRLConfig
from trl_qarl.qarl_trainer import QaRLTrainer
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.quantization.swap import prepare_model, quantized_layers, restore_model


def arguments(output_dir, **kwargs):
    defaults = {
        # The same on every processor.
        "bf16": True,
        "negative_epsilon_low": 0.1,
        "negative_epsilon_high": 0.1,
        "positive_epsilon_high": 0.1,
    }
    if kwargs.get("objective", "tbpo") != "tbpo":
        for name in ("negative_epsilon_low", "negative_epsilon_high", "positive_epsilon_high"):
            del defaults[name]
    return QaRLConfig(str(output_dir), **(TRAINING | defaults | kwargs))


def make(model, output_dir, reward=spread, train_dataset=None, callbacks=None, **kwargs):
    return QaRLTrainer(
        model, reward, arguments(output_dir, **kwargs), train_dataset or make_problems(), callbacks=callbacks
    )


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def rows(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def without_times(row):
    return {
        name: value
        for name, value in row.items()
        if not name.endswith(("seconds", "_per_second", "_time", "_runtime"))
    }


def test_constructor_takes_exactly_the_arguments_of_grpo_trainer():
    ours = inspect.signature(QaRLTrainer.__init__).parameters
    stock = inspect.signature(GRPOTrainer.__init__).parameters
    assert list(ours) == list(stock)
    optional = {name for name, p in stock.items() if p.default is not inspect.Parameter.empty}
    assert {name for name, p in ours.items() if p.default is not inspect.Parameter.empty} == optional


@pytest.mark.parametrize("optim", ["muon", "adamw_torch"])
@pytest.mark.parametrize("weight_decay", [0.01, 0.0])
def test_a_batch_without_an_unmasked_completion_moves_weights_by_weight_decay_alone(
    tiny_model, tmp_path, optim, weight_decay
):
    assert QaRLConfig(str(tmp_path), use_cpu=True).weight_decay == 0.01, "the documented default"
    options = {"optim": optim, "weight_decay": weight_decay, "mask_truncated_completions": True}
    trainer = make(tiny_model, tmp_path, max_steps=1, max_completion_length=2, **options)
    before = parameters(trainer)
    trainer.train()
    (row,) = rows(trainer)
    assert row["completions/clipped_ratio"] == 1 and row["grad_norm"] == 0
    shrunk = set()
    for name, p in trainer.model.named_parameters():
        if weight_decay and not torch.equal(p, before[name]):
            torch.testing.assert_close(p, before[name] * (1 - 1e-3 * weight_decay), rtol=2**-22, atol=0)
            shrunk.add(name)
        else:
            assert torch.equal(p, before[name])
    # As PyTorch's Muon and AdamW do with a gradient of zero: matrices shrink, biases and norms do not.
    matrices = {name for name, p in trainer.model.named_parameters() if p.ndim == 2}
    assert shrunk == (matrices if weight_decay else set())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_training_updates_masters_and_logs_every_family(tiny_model, tmp_path, scheme):
    trainer = make(tiny_model, tmp_path, scheme=scheme)
    before = parameters(trainer)
    trainer.train()
    changed = [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])]
    assert any("q_proj.weight" in name for name in changed) and any("q_proj.bias" in name for name in changed)
    first, last = rows(trainer)[0], rows(trainer)[-1]
    assert len(rows(trainer)) == 4 and all(math.isfinite(row["loss"]) for row in rows(trainer))
    for name in (
        "reward",
        "entropy",
        "tbpo/ratio/mean",
        "tbpo/dropped/total",
        "mismatch/abs_logp_mean",
        "mismatch/k3",
        "mismatch/abs_logp_mean/positive",
        "mismatch/abs_logp_mean/q4",
        "rollout/error_token_share",
        "rollout/repetition_share",
        "rollout/garbled_share",
    ):
        assert math.isfinite(first[name]), name
    assert first["rollout/tokens_per_second"] > 0 and first["rollout/mean_length"] > 0
    if scheme != "bf16":
        # Each bit is worth some 6 dB, and 2 bits have 5 to 7 here.
        assert (4 if scheme.startswith("w2") else 10) < first["quant/sqnr"] < 60
        assert 0 < last["quant/code_flip_rate"] < 1 and last["quant/update_to_step"] > 0
        assert len(trainer.swap_report.converted) == 14
    assert all(p.dtype is torch.float32 for p in trainer.model.parameters())


def test_loops_and_garbled_completions_are_counted(tiny_model, tmp_path):
    # One byte per token: without its first byte the second character is none.
    cut_inside = make_tiny_tokenizer()("a\u00e9b")["input_ids"][2:]
    ids = [[5] * 16, list(range(5, 21)), cut_inside, [70] * 3]

    def rollout(prompts, trainer):
        n = len(prompts) // 4
        return {
            "prompt_ids": [[4, 5]] * len(prompts),
            "completion_ids": ids * n,
            "logprobs": [[-5.0] * len(x) for x in ids] * n,
        }

    trainer = QaRLTrainer(tiny_model, spread, arguments(tmp_path, max_steps=1), make_problems(), rollout_func=rollout)
    trainer.train()
    assert (rows(trainer)[0]["rollout/repetition_share"], rows(trainer)[0]["rollout/garbled_share"]) == (0.25, 0.25)


def test_policy_that_its_updates_do_not_reach_is_warned_about_once(tiny_model, tmp_path, caplog):
    trainer = make(tiny_model, tmp_path, learning_rate=1e-12, max_steps=54, optim="sgd", weight_decay=0.0)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    warnings = [record.getMessage() for record in caplog.records if "stalled" in record.getMessage()]
    assert len(warnings) == 1 and "Raise `learning_rate` (1e-12 here)" in warnings[0] and "float32" in warnings[0]


def test_ratio_is_one_at_the_first_update_and_moves_after(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)
    trainer.train()
    history = rows(trainer)
    for first, second in (history[:2], history[2:]):
        # bf16 kernels give the same bits for the same rows; batches of other shapes differ by rounding.
        assert first["tbpo/ratio/mean"] == pytest.approx(1, abs=2e-3)
        assert abs(second["tbpo/ratio/mean"] - 1) > abs(first["tbpo/ratio/mean"] - 1)


def test_float32_mismatch_of_w4a16_is_at_the_rounding_floor(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, bf16=False, max_steps=2)
    trainer.train()
    assert rows(trainer)[0]["mismatch/abs_logp_mean"] < 1e-6


def test_mismatch_would_be_seen_if_rollout_and_learner_differed(tiny_model, tmp_path, monkeypatch):
    trainer = make(tiny_model, tmp_path, bf16=False, max_steps=1)
    original = QaRLTrainer._generate_single_turn

    def with_high_precision_rollout(self, *args, **kwargs):
        restore_model(self.model)
        result = original(self, *args, **kwargs)
        (scheme,) = self.swap_report.plan.schemes
        prepare_model(self.model, scheme, scale_dtype=torch.float32)
        return result

    monkeypatch.setattr(QaRLTrainer, "_generate_single_turn", with_high_precision_rollout)
    trainer.train()
    assert rows(trainer)[0]["mismatch/abs_logp_mean"] > 1e-3


def test_learner_that_is_not_quantized_runs_its_masters_and_the_rollout_low_bits(tiny_model, tmp_path):
    mismatch, divergence, batches = {}, {}, {}
    for is_quantized in (True, False):
        options = {"quantize_learner": is_quantized, "bf16": False, "max_steps": 1, "mismatch_probe_steps": 1}
        trainer = make(tiny_model, tmp_path / str(is_quantized), **options)
        generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda x, f=generate, q=is_quantized: batches.setdefault(q, f(x))
        initial = {name: p.clone() for name, p in trainer.model.state_dict().items()}
        trainer.train()
        mismatch[is_quantized] = rows(trainer)[0]["mismatch/abs_logp_mean"]
        divergence[is_quantized] = rows(trainer)[0]["mismatch/probe_kl"]
    # The rollouts run the same low-bit weights with the same seed.
    quantized, batch = batches[True], batches[False]
    for name in ("completion_ids", "sampling_per_token_logps", "advantages"):
        assert torch.equal(quantized[name], batch[name])
    assert mismatch[True] < 1e-6 and mismatch[False] > 1e-3
    assert abs(divergence[True]) < 1e-6 < divergence[False]
    assert len(quantized_layers(trainer.model)) == 14
    trainer.model.load_state_dict(initial)
    restore_model(trainer.model)
    trainer.model.train()
    with torch.no_grad():
        # Rows of the scoring batch, so that sums run in the same order.
        size = trainer.args.per_device_train_batch_size
        untouched, _, _ = trainer._score(trainer.model, batch, batch_size=size)
    assert torch.equal(batch["old_per_token_logps"], untouched)


def test_update_of_a_learner_that_is_not_quantized_is_that_of_scheme_bf16_on_the_same_completions(
    tiny_model, tmp_path
):
    rollout_only, _ = trainers = [
        make(tiny_model, tmp_path / str(i), **options, bf16=False, beta=0.1)
        for i, options in enumerate(({"quantize_learner": False}, {"scheme": "bf16"}))
    ]
    rollout_only.model.train()
    inputs = rollout_only._generate_and_score_completions([{"prompt": f"{i // 4} +"} for i in range(8)])
    gradients, references = [], []
    for trainer in trainers:
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        trainer._compute_loss(trainer.model, inputs).backward()
        gradients.append({name: p.grad for name, p in trainer.model.named_parameters()})
        with torch.no_grad():
            references.append(trainer._score(trainer.ref_model, inputs)[0])
    assert torch.equal(*references)
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_reference_of_a_learner_that_is_not_quantized_is_not_either(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, quantize_learner=False, beta=0.1, bf16=False, max_steps=2)
    trainer.train()
    assert not quantized_layers(trainer.ref_model)
    assert rows(trainer)[0]["kl"] == pytest.approx(0, abs=1e-7) and rows(trainer)[-1]["quant/code_flip_rate"] > 0


def test_rollout_func_that_would_run_the_masters_is_refused(tiny_model, tmp_path):
    args = arguments(tmp_path, quantize_learner=False)
    with pytest.raises(ValueError, match="quantize_learner=False and use_vllm=False"):
        QaRLTrainer(tiny_model, spread, args, make_problems(), rollout_func=lambda prompts, trainer: {})


def test_old_log_probs_come_from_the_quantized_learner(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, bf16=False, max_steps=1, steps_per_generation=1)
    captured = {}
    original = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: captured.setdefault("output", original(inputs))
    before = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    trainer.train()
    output = captured["output"]
    trainer.model.load_state_dict(before)
    with torch.no_grad():
        quantized, _, _ = trainer._score(trainer.model, output)
        restore_model(trainer.model)
        unquantized, _, _ = trainer._score(trainer.model, output)
    mask = output["completion_mask"].bool()
    torch.testing.assert_close(output["old_per_token_logps"][mask], quantized[mask], rtol=0, atol=1e-5)
    assert (unquantized - quantized)[mask].abs().mean() > 1e-3


def test_several_updates_use_each_completion_once_per_generation_batch(tiny_model, tmp_path, monkeypatch):
    trainer = make(tiny_model, tmp_path, steps_per_generation=8, max_steps=8, per_device_train_batch_size=2)
    generated, seen = [], []
    original = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda x: generated.append(original(x)) or generated[-1]
    loss = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: seen.append(inputs["completion_ids"]) or loss(model, inputs)
    trainer.train()
    assert len(generated) == 1 and len(seen) == 8
    assert sorted(torch.cat(seen).tolist()) == sorted(generated[0]["completion_ids"].tolist())


def test_masters_are_quantized_once_per_optimizer_step(tiny_model, tmp_path, monkeypatch):
    calls = []
    original = trl_qarl.quantization.tensors.quantize_weight
    monkeypatch.setattr(
        trl_qarl.quantization.tensors, "quantize_weight", lambda *args: calls.append(1) or original(*args)
    )
    trainer = make(tiny_model, tmp_path, gradient_accumulation_steps=2, steps_per_generation=4, max_steps=3)
    trainer.train()
    assert len(calls) == 14 * (1 + 3)


@pytest.mark.parametrize("optim", ["muon", "adamw_torch", "adamw_torch_fused", "adafactor"])
def test_learner_after_a_step_equals_a_fresh_model_with_its_masters(tiny_model, tmp_path, optim):
    trainer = make(tiny_model, tmp_path, optim=optim, bf16=False, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "masters"))
    fresh = make(str(tmp_path / "masters"), tmp_path / "other", bf16=False)
    tokens = torch.randint(4, 200, (2, 12))
    with torch.no_grad():
        assert torch.equal(trainer.model(tokens).logits, fresh.model(tokens).logits)
    assert rows(trainer)[-1]["quant/code_flip_rate"] > 0


@pytest.mark.parametrize("optim", ["muon", "adamw_torch_fused"])
# Step 3 is inside a generation batch of four updates, step 4 at its end.
@pytest.mark.parametrize("stop", [3, 4])
def test_interrupted_run_equals_the_uninterrupted_one_bit_for_bit(tiny_model, tmp_path, optim, stop):
    options = {"optim": optim, "max_steps": 6, "steps_per_generation": 4, "num_iterations": 1}
    whole = make(tiny_model, tmp_path / "whole", **options)
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": stop}
    make(tiny_model, tmp_path / "cut", callbacks=[stop_at(stop)], **options, **saving).train()
    resumed = make(tiny_model, tmp_path / "cut", **options, **saving)
    resumed.train(resume_from_checkpoint=True)
    for name, p in whole.model.named_parameters():
        assert torch.equal(p, resumed.model.get_parameter(name)), name
    # The first code-flip rate after a resume compares with the resumed weights, which is the same comparison.
    for expected, actual in zip(rows(whole)[stop:], rows(resumed)[stop:], strict=True):
        assert without_times(actual) == without_times(expected)


@pytest.mark.parametrize(
    "changed",
    [
        {"steps_per_generation": 8},
        {"steps_per_generation": 2},
        {"per_device_train_batch_size": 8},
        {"num_generations": 2},
        {"num_iterations": 2},
    ],
)
def test_resuming_with_other_generation_batches_starts_a_new_one(tiny_model, tmp_path, caplog, changed):
    options = {"save_strategy": "steps", "save_steps": 3, "steps_per_generation": 4, "max_steps": 6}
    make(tiny_model, tmp_path, callbacks=[stop_at(3)], **options).train()
    resumed = make(tiny_model, tmp_path, **(options | changed))
    generated, seen = [], []
    generate, loss = resumed._generate_and_score_completions, resumed._compute_loss
    resumed._generate_and_score_completions = lambda x: generated.append(generate(x)) or generated[-1]
    resumed._compute_loss = lambda model, inputs: seen.append(inputs["completion_ids"]) or loss(model, inputs)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    ((name, value),) = changed.items()
    assert f"{name}={getattr(arguments(tmp_path, **options), name)} there, {value} here" in caplog.text
    num_rows = resumed.args.per_device_train_batch_size
    assert resumed.state.global_step == 6 and [len(ids) for ids in seen] == [num_rows] * 3
    assert len(generated[0]["completion_ids"]) == num_rows * resumed.args.steps_per_generation
    assert all(row in generated[0]["completion_ids"].tolist() for row in seen[0].tolist())


def test_checkpoint_of_another_number_of_processes_starts_a_new_generation_batch(tiny_model, tmp_path, caplog):
    saving = {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}
    make(tiny_model, tmp_path, max_steps=1, **saving).train()
    path = tmp_path / "checkpoint-1" / "rollout_state_0.pt"
    state = torch.load(path, weights_only=True)
    state["shape"]["num_processes"] = 2
    torch.save(state, path)
    resumed = make(tiny_model, tmp_path, max_steps=2, **saving)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    assert "num_processes=2 there, 1 here" in caplog.text and resumed._step == 1


def test_checkpoint_of_another_scheme_is_refused(tiny_model, tmp_path):
    make(tiny_model, tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    other = make(tiny_model, tmp_path, max_steps=2, scheme="w8a8")
    with pytest.raises(ValueError, match="'w4a16'.*'w8a8'"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_checkpoint_of_another_kind_of_learner_is_refused(tiny_model, tmp_path):
    make(tiny_model, tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    other = make(tiny_model, tmp_path, max_steps=2, quantize_learner=False)
    with pytest.raises(ValueError, match="'quantize_learner': True.*'quantize_learner': False"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_excluded_modules_may_be_a_tuple(tiny_model, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "exclude_modules": ("o_proj", "up_proj")}
    make(tiny_model, tmp_path, max_steps=1, **options).train()
    resumed = make(tiny_model, tmp_path, max_steps=2, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2


def test_incomplete_checkpoint_is_skipped_with_a_warning(tiny_model, tmp_path, caplog):
    saving = {"save_strategy": "steps", "save_steps": 1}
    make(tiny_model, tmp_path, max_steps=2, **saving).train()
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / marker.COMPLETE_FILE).unlink()
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"cut")
    resumed = make(tiny_model, tmp_path, max_steps=3, **saving)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-3 is incomplete" in caplog.text and resumed.state.global_step == 3


class Heard(TrainerCallback):
    """Which events a training had."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            self.events.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("limit", [{"max_steps": 3}, {"max_steps": -1, "num_train_epochs": 0.1875}])
def test_resuming_a_run_at_its_last_update_trains_nothing(tiny_model, tmp_path, caplog, limit):
    options = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant", **limit}
    whole = make(tiny_model, tmp_path, **options)
    whole.train()
    last = whole.state.global_step
    # Within an epoch.
    assert last == 3 and whole.state.epoch % 1
    for _ in range(2):
        heard = Heard()
        again = make(tiny_model, tmp_path, callbacks=[heard], **options)
        with caplog.at_level(logging.WARNING):
            output = again.train(resume_from_checkpoint=True)
        assert "checkpoint-3 is of update 3, and the run ends at 3: nothing is left to train" in caplog.text
        assert output.global_step == again.state.global_step == again.state.max_steps == last
        assert math.isfinite(output.training_loss) and "train_runtime" in output.metrics
        assert [row for row in again.state.log_history if "loss" in row] == rows(whole)
        during = set(heard.events) - {"on_init_end"}
        assert during == {"on_train_begin", "on_log", "on_train_end"}
        for name, p in whole.model.named_parameters():
            assert torch.equal(p, again.model.get_parameter(name)), name
        assert len(list(tmp_path.glob("checkpoint-*"))) == 3
    longer = make(tiny_model, tmp_path, **(options | {"max_steps": 4}))
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 4


def test_resuming_at_the_last_update_loads_the_best_model(tiny_model, tmp_path):
    scores = iter(range(1000, 0, -1))
    options = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
        "num_train_epochs": 1,
    }

    def run(resume):
        args = arguments(tmp_path, **options)

        def worse_and_worse(completions, **kwargs):
            return [float(next(scores)) for _ in completions]

        trainer = QaRLTrainer(tiny_model, worse_and_worse, args, make_problems(), make_problems())
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    first = run(None)
    assert first.state.best_global_step == 1
    again = run(True)
    assert again.state.global_step == 3
    for name, p in first.model.named_parameters():
        assert torch.equal(p, again.model.get_parameter(name)), name


@pytest.mark.parametrize("written", ["", '{\n  "best_global_step": nu'])
def test_checkpoint_whose_state_is_torn_is_skipped(tiny_model, tmp_path, caplog, monkeypatch, written):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    save_to_json = TrainerState.save_to_json

    def die_at_the_third(state, path):
        if state.global_step < 3:
            return save_to_json(state, path)
        Path(path).write_text(written)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainerState, "save_to_json", die_at_the_third)
        make(tiny_model, tmp_path, **saving).train()
    resumed = make(tiny_model, tmp_path, **saving)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-3 is incomplete" in caplog.text and resumed.state.global_step == 3


def test_checkpoint_that_is_torn_while_it_is_written_again_is_skipped(tiny_model, tmp_path, caplog):
    saving = {"save_strategy": "steps", "save_steps": 1}
    make(tiny_model, tmp_path, max_steps=2, **saving).train()
    again = make(tiny_model, tmp_path, max_steps=2, **saving)
    save = again._save

    def die_within(folder, *args):
        save(folder, *args)
        path = Path(folder, "model.safetensors")
        path.write_bytes(path.read_bytes()[:1000])
        raise KeyboardInterrupt

    again._save = die_within
    with pytest.raises(KeyboardInterrupt):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    with pytest.raises(ValueError, match="checkpoint-2 is incomplete"):
        make(tiny_model, tmp_path, max_steps=2, **saving).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed = make(tiny_model, tmp_path, max_steps=2, **saving)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-2 is incomplete" in caplog.text and resumed.state.global_step == 2
    for name, p in again.model.named_parameters():
        assert torch.equal(p, resumed.model.get_parameter(name)), name


def test_older_checkpoints_are_deleted_when_the_new_one_is_complete(tiny_model, tmp_path, monkeypatch):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "save_total_limit": 1}
    complete = marker.complete

    def die_at_the_second(folder):
        if folder.name == "checkpoint-2":
            raise KeyboardInterrupt
        complete(folder)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(marker, "complete", die_at_the_second)
        make(tiny_model, tmp_path, **saving).train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    resumed = make(tiny_model, tmp_path, **saving)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3"}
    assert torch.load(tmp_path / "checkpoint-3" / "training_args.bin", weights_only=False).save_total_limit == 1


def test_checkpoint_of_an_earlier_version_is_resumed(tiny_model, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    make(tiny_model, tmp_path, max_steps=2, **saving).train()
    for folder in tmp_path.glob("checkpoint-*"):
        (folder / marker.COMPLETE_FILE).unlink()
    resumed = make(tiny_model, tmp_path, max_steps=3, **saving)
    resumed.train(resume_from_checkpoint=True)
    assert [row["step"] for row in rows(resumed)] == [1, 2, 3]
    assert len(list(tmp_path.glob(f"*/{marker.COMPLETE_FILE}"))) == 1


def test_crash_leaves_the_last_checkpoint_usable(tiny_model, tmp_path):
    calls = []

    def crashing(completions, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("reward server went away")
        return spread(completions)

    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    with pytest.raises(RuntimeError, match="went away"):
        make(tiny_model, tmp_path, reward=crashing, **saving).train()
    resumed = make(tiny_model, tmp_path, **saving)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4


def test_resuming_without_any_checkpoint_says_so(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="No complete checkpoint"):
        make(tiny_model, tmp_path).train(resume_from_checkpoint=True)


def test_save_model_writes_ordinary_masters_and_the_scheme(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, group_size=64, exclude_modules=["o_proj"])
    trainer.save_model(str(tmp_path / "masters"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "masters", dtype=torch.float32)
    assert all(torch.equal(p, trainer.model.get_parameter(name)) for name, p in loaded.named_parameters())
    assert json.loads((tmp_path / "masters" / "qarl.json").read_text()) == {
        "scheme": "w4a16",
        "quantize_learner": True,
        "group_size": 64,
        "exclude_modules": ["o_proj"],
        "scale_dtype": "bfloat16",
    }
    export_checkpoint(trainer.model, tmp_path / "export", trainer.processing_class)


@pytest.mark.parametrize("objective", ["grpo", "dapo"])
def test_bf16_scheme_with_trls_loss_equals_stock_trl_bit_for_bit(tiny_model, tmp_path, objective):
    options = {"bf16": False, "optim": "adamw_torch", "steps_per_generation": 2}
    ours = make(tiny_model, tmp_path / "ours", scheme="bf16", objective=objective, **options)
    ours.train()
    args = arguments(tmp_path / "stock", objective=objective, **options)
    stock_fields = {f for f in GRPOConfig.__dataclass_fields__ if f not in ("generation_batch_size",)}
    stock_args = GRPOConfig(**{f: getattr(args, f) for f in stock_fields if GRPOConfig.__dataclass_fields__[f].init})
    stock = GRPOTrainer(tiny_model, spread, stock_args, make_problems())
    stock.train()
    for name, p in stock.model.named_parameters():
        assert torch.equal(p, ours.model.get_parameter(name)), name


@pytest.mark.parametrize("use_bias_correction_kl", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_tbpo_in_the_trainer_equals_stock_sequence_level_grpo(tiny_model, tmp_path, beta, use_bias_correction_kl):
    shared = {"bf16": False, "beta": beta, "use_bias_correction_kl": use_bias_correction_kl}
    bands = {"negative_epsilon_low": 3e-4, "negative_epsilon_high": 7e-4, "positive_epsilon_high": 4e-4}
    tbpo = make(tiny_model, tmp_path, **shared, **bands)
    stock = make(
        tiny_model,
        tmp_path,
        objective="grpo",
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
    results = []
    for trainer in (tbpo, stock):
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        results.append((loss.item(), {n: p.grad for n, p in trainer.model.named_parameters()}))
    (ours, our_grads), (theirs, their_grads) = results
    # A mean of terms of order 1 that cancel, in float32.
    assert ours == pytest.approx(theirs, abs=5e-7)
    for name, grad in their_grads.items():
        torch.testing.assert_close(our_grads[name], grad, rtol=1e-3, atol=1e-6)
    assert 0 < tbpo._metrics["train"]["tbpo/dropped/total"][-1] < 1


@pytest.mark.parametrize("objective", [name for name, o in all_objectives().items() if isinstance(o, Preset)])
def test_objectives_of_the_comparison_train_and_weigh_embedded_rollouts_by_their_mismatch(
    tiny_model, tmp_path, objective
):
    options = {"max_steps": 2} | ({"steps_per_generation": None} if objective == "on-policy" else {})
    trainer = make(tiny_model, tmp_path, objective=objective, **options)
    before, batches, advantages = parameters(trainer), [], []
    generate, compute = trainer._generate_and_score_completions, GRPOTrainer._compute_loss
    trainer._generate_and_score_completions = lambda x: batches.append(generate(x)) or batches[-1]

    def record(self, model, inputs):
        advantages.append((inputs["advantages"], inputs.get("importance_sampling_ratio")))
        return compute(self, model, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_compute_loss", record)
        trainer.train()
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert all(math.isfinite(row["loss"]) for row in rows(trainer))
    assert len(batches) == (2 if objective == "on-policy" else 1)
    for batch in batches:
        is_weighed = get_objective(objective).corrects_mismatch or objective in ("icepop", "kpop", "geo-mask")
        assert ("importance_sampling_ratio" in batch) == is_weighed
    assert bool(advantages) == (not get_objective(objective).has_own_loss)
    for weighed, ratio in advantages:
        assert ratio is None or weighed.shape == ratio.shape
        assert objective != "positive-only" or (weighed.min() == 0 and weighed.max() > 0)


@pytest.mark.parametrize("objective", ["bypass", "gspo"])
def test_bypass_saves_the_forward_that_scores_the_rollout_and_measures_no_mismatch(tiny_model, tmp_path, objective):
    trainer = make(tiny_model, tmp_path, objective=objective, max_steps=8)
    rows_scored = []
    score = GRPOTrainer._get_per_token_logps_and_entropies

    def count(self, model, input_ids, *args, **kwargs):
        rows_scored.append((len(input_ids), torch.is_grad_enabled()))
        return score(self, model, input_ids, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", count)
        trainer.train()
    is_bypass = objective == "bypass"
    assert any(not has_gradient for _, has_gradient in rows_scored) != is_bypass
    assert any(name.startswith("mismatch/") for row in rows(trainer) for name in row) != is_bypass
    assert all(math.isfinite(row["loss"]) for row in rows(trainer))


def test_reference_model_is_the_initial_low_bit_policy(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, beta=0.1, bf16=False)
    assert len(quantized_layers(trainer.ref_model)) == 14
    trainer.train()
    assert rows(trainer)[0]["kl"] == pytest.approx(0, abs=1e-7)
    assert rows(trainer)[-1]["kl"] > 1e-6


def test_synchronized_reference_uses_its_new_weights(tiny_model, tmp_path):
    options = {"ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0, "max_steps": 3, "steps_per_generation": 1}
    trainer = make(tiny_model, tmp_path, beta=0.1, bf16=False, sync_ref_model=True, **options)
    trainer.train()
    # With alpha 1 the reference is the policy of one step ago, so the KL is measured on equal policies.
    assert all(row["kl"] == pytest.approx(0, abs=1e-7) for row in rows(trainer))
    assert rows(trainer)[-1]["quant/code_flip_rate"] > 0


def test_synchronised_reference_is_quantized_anew_where_the_optimizers_step_was_skipped(tiny_model, tmp_path):
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


def test_evaluation_runs_and_logs_eval_metrics(tiny_model, tmp_path):
    trainer = QaRLTrainer(
        tiny_model,
        spread,
        arguments(tmp_path, per_device_eval_batch_size=4, max_steps=1),
        make_problems(),
        eval_dataset=make_problems(4),
    )
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"]) and math.isfinite(metrics["eval_reward"])
    assert math.isfinite(metrics["eval_mismatch/abs_logp_mean"])


def test_scoring_in_train_and_eval_mode_is_identical(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": "1 +"}] * 4)
    with torch.no_grad():
        training, _, _ = trainer._score(trainer.model.train(), inputs)
        evaluating, _, _ = trainer._score(trainer.model.eval(), inputs)
    assert torch.equal(training, evaluating)


def test_gradient_checkpointing_does_not_change_the_run(tiny_model, tmp_path):
    runs = []
    for enabled in (True, False):
        trainer = make(tiny_model, tmp_path, gradient_checkpointing=enabled)
        trainer.train()
        runs.append(parameters(trainer))
    assert all(torch.equal(p, runs[1][name]) for name, p in runs[0].items())


def test_an_environment_may_supply_the_prompts(tiny_model, tmp_path):
    pytest.importorskip("jmespath", reason="TRL asks for it before transformers 5.13")

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


def test_answers_of_tools_are_in_the_completion_and_not_in_the_loss(tmp_path, monkeypatch):
    pytest.importorskip("jmespath", reason="TRL asks for it before transformers 5.13")
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

    tbpo, compute_loss, losses = type(get_objective("tbpo")), QaRLTrainer._compute_loss, []
    own_loss = tbpo.loss

    def own_loss_and_its_gradient(self, args, batch):
        found = own_loss(self, args, batch)
        losses[-1].append(torch.autograd.grad(found.value, batch.per_token_logps, retain_graph=True)[0])
        return found

    def keep_inputs(self, model, inputs):
        losses.append([inputs])
        return compute_loss(self, model, inputs)

    monkeypatch.setattr(QaRLTrainer, "_generate_single_turn", call_first)
    monkeypatch.setattr(QaRLTrainer, "_compute_loss", keep_inputs)
    monkeypatch.setattr(tbpo, "loss", own_loss_and_its_gradient)
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
    ((inputs, gradient),) = losses
    (row,) = [row for row, ids in enumerate(inputs["completion_ids"].tolist()) if ids[: len(call)] == call]
    is_completion = inputs["completion_mask"].bool()
    is_answer = is_completion & ~inputs["tool_mask"].bool()
    answer = tokenizer.decode(inputs["completion_ids"][row][is_answer[row]])
    assert answer.endswith("<|im_start|>assistant\n") and "<tool_response>\n5\n</tool_response>" in answer
    assert is_answer.any(1).tolist() == [index == row for index in range(4)]
    # What the model wrote moves it, the turn after the answer too, and what the tool wrote does not.
    assert is_completion[row].nonzero().max() > is_answer[row].nonzero().max() > len(call)
    assert (gradient[is_completion & ~is_answer] != 0).all() and (gradient[is_answer] == 0).all()


def test_conversational_prompts_work(tiny_model, tmp_path):
    prompts = [[{"role": "user", "content": f"{i} + 1"}] for i in range(8)]

    def reward(completions, **kwargs):
        return spread([c[0]["content"] for c in completions])

    make(tiny_model, tmp_path, reward=reward, train_dataset=Dataset.from_dict({"prompt": prompts})).train()


def test_a_configuration_of_trl_is_refused_with_the_name_to_use(tiny_model, tmp_path):
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(
        TypeError, match="got GRPOConfig. QaRLConfig takes the options of GRPOConfig: replace the name"
    ):
        QaRLTrainer(tiny_model, spread, args, make_problems())


def test_missing_arguments_get_a_qarl_config_named_after_the_model_that_trains_on_a_cpu(
    tiny_model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    trainer = QaRLTrainer(tiny_model, spread, train_dataset=make_problems())
    assert isinstance(trainer.args, QaRLConfig) and trainer.args.output_dir == "qwen2-QaRL"
    assert trainer.accelerator.device.type == "cpu"
    trainer.args.max_steps, trainer.generation_config.max_new_tokens = 1, 4
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("use_vllm", [False, True])
def test_masters_below_float32_are_refused_before_and_after_loading(tmp_path, use_vllm, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("the model was loaded, or the engine made")

    path = make_tiny_model(tmp_path, "qwen2", dtype="bfloat16")
    args = arguments(tmp_path, use_vllm=use_vllm, model_init_kwargs={"dtype": "auto"})
    monkeypatch.setattr("trl_qarl.qarl_trainer.QaRLVLLMGeneration", never)
    # Known from the weights alone.
    with pytest.raises(ValueError, match="masters are bfloat16.*allow_low_precision_masters=True"):
        QaRLTrainer(path, spread, args, make_problems())
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", never)
    with pytest.raises(ValueError, match="masters are bfloat16"):
        QaRLTrainer(model, spread, args, make_problems())
    # As the command line adds it.
    args.model_init_kwargs = {"dtype": "bfloat16"}
    with pytest.raises(ValueError, match="masters are bfloat16"):
        QaRLTrainer(path, spread, args, make_problems())


def test_low_precision_masters_train_where_they_are_allowed_and_float32_is_the_default(tmp_path):
    path = make_tiny_model(tmp_path, "qwen2", dtype="bfloat16")
    assert make(path, tmp_path / "default").model.dtype is torch.float32
    options = {"model_init_kwargs": {"dtype": "auto"}, "allow_low_precision_masters": True}
    trainer = make(path, tmp_path / "allowed", max_steps=1, **options)
    trainer.train()
    assert trainer.model.dtype is torch.bfloat16


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.mark.parametrize("use_vllm", [False, True])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_experts_in_high_precision_are_refused(tmp_path, monkeypatch, use_vllm, is_loaded):
    def never(*args, **kwargs):
        raise AssertionError("the engine was made")

    monkeypatch.setattr("trl_qarl.qarl_trainer.QaRLVLLMGeneration", never)
    model = make_tiny_model(tmp_path, "qwen3_moe", **EXPERTS)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    share = 2 * 4 * 3 * 128 * 128 / sum(p.numel() for p in loaded.parameters())
    match = f"its experts, {share:.0%} of the weights.*no low-bit export.*scheme='bf16'"
    # With vLLM the option changes nothing.
    options = {"use_vllm": use_vllm, "allow_high_precision_experts": use_vllm}
    with pytest.raises(ValueError, match=match):
        make(loaded if is_loaded else model, tmp_path, **options)


def test_experts_in_high_precision_train_where_they_are_allowed_or_nothing_is_quantized(tmp_path):
    model = make_tiny_model(tmp_path, "qwen3_moe", **EXPERTS)
    trainer = make(model, tmp_path / "allowed", allow_high_precision_experts=True, max_steps=1)
    trainer.train()
    assert len(trainer.swap_report.converted) == 8
    make(model, tmp_path / "bf16", scheme="bf16")


def with_pictures(name="image"):
    return make_problems().add_column(name, [None] * 16)


@pytest.mark.parametrize("vllm_mode", ["colocate", "server"])
@pytest.mark.parametrize(
    "datasets",
    [
        {"train_dataset": with_pictures()},
        {"train_dataset": with_pictures("images")},
        {"eval_dataset": with_pictures()},
        {"eval_dataset": {"text": make_problems(), "pictures": with_pictures()}},
    ],
    ids=["image", "images", "eval", "one of eval"],
)
def test_pictures_are_refused_with_vllm_before_the_model_is_loaded(tmp_path, vllm_mode, datasets):
    args = arguments(tmp_path, use_vllm=True, vllm_mode=vllm_mode)
    with pytest.raises(ValueError, match=r"column 'images?'.*use_vllm=True.*placeholders.*`use_vllm=False`"):
        QaRLTrainer("no/such-model", spread, args, **({"train_dataset": make_problems()} | datasets))


def test_pictures_inside_prompts_are_refused_with_vllm_at_the_first_rollout(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)
    trainer.use_vllm = True
    with pytest.raises(ValueError, match="Pictures are not supported with use_vllm=True"):
        trainer._generate_single_turn([[4, 5]], [["a picture"]], {}, 1)


def test_problems_of_the_arguments_come_in_one_message(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    questions = Dataset.from_dict({"question": ["1 +"], "image": [None]})
    with pytest.raises(ValueError) as error:
        QaRLTrainer(model, spread, arguments(tmp_path, use_vllm=True), questions, quantization_config=object())
    lines = str(error.value).splitlines()
    assert lines[0] == "4 problems:"
    for line, text in zip(lines[1:], ["quantization_config", "`prompt`", "'image'", "bfloat16"], strict=True):
        assert text in line


def padded_batch(num_pads, num_completion=12):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 200, (1, 20 + num_completion), generator=generator)
    ids = torch.nn.functional.pad(ids, (num_pads, 0))
    mask = torch.ones_like(ids)
    mask[:, :num_pads] = 0
    return ids, mask, num_completion


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16", "bf16"])
def test_padding_of_the_prompt_does_not_move_the_log_probs(tiny_model, tmp_path, scheme):
    # PyTorch's own attention sums masked keys in another order, which leaves a rounding of 5e-7.
    trainer = make(tiny_model, tmp_path, scheme=scheme, bf16=False, model_init_kwargs={"attn_implementation": "eager"})
    with torch.no_grad():
        scored, padded = (
            trainer._get_per_token_logps_and_entropies(trainer.model, *padded_batch(num_pads), batch_size=1)[0]
            for num_pads in (0, 40)
        )
    assert torch.equal(scored, padded)


@pytest.mark.parametrize("objective", ["tbpo", "grpo"])
def test_scoring_and_loss_count_positions_from_the_first_token(tiny_model, tmp_path, objective):
    prompts = Dataset.from_dict({"prompt": ["1 + " * (1 + i % 4) for i in range(16)]})
    trainer = make(
        tiny_model, tmp_path, train_dataset=prompts, objective=objective, beta=0.1, max_steps=1, num_generations=2
    )
    seen = []

    def note(name):
        def hook(module, args, kwargs):
            if kwargs.get("fused_lm_head"):
                seen.append((name, torch.is_grad_enabled()))
                for positions, mask in zip(kwargs["position_ids"], kwargs["attention_mask"], strict=True):
                    first = mask.tolist().index(1)
                    count = int(mask.sum())
                    assert positions[first : first + count].tolist() == list(range(count))
                    padded.append(first)

        return hook

    padded: list[int] = []
    trainer.model.register_forward_pre_hook(note("policy"), with_kwargs=True)
    trainer.ref_model.register_forward_pre_hook(note("reference"), with_kwargs=True)
    trainer.train()
    assert set(seen) == {("policy", False), ("policy", True), ("reference", False)} and len(set(padded)) > 1


def test_a_model_that_counts_positions_itself_is_left_to_it(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert takes_positions(model)
    model.config.get_text_config = lambda: object()
    assert not takes_positions(model)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"peft_config": object()}, ValueError, "must be a `peft.LoraConfig`, got object"),
        ({"quantization_config": object()}, ValueError, "high precision"),
        ({"train_dataset": Dataset.from_dict({"question": ["1 +"]})}, ValueError, r"`prompt`.*question"),
        ({"args": GRPOConfig("x", use_cpu=True)}, TypeError, "QaRLConfig"),
        ({"args": {"report_to": ["none_of_them"]}}, ValueError, "'none_of_them' is no tracker. Choose from .*, wandb"),
    ],
)
def test_unsupported_arguments_raise_at_once(tiny_model, tmp_path, kwargs, error, match):
    arguments_ = {"args": {}, "train_dataset": make_problems()} | kwargs
    if isinstance(arguments_["args"], dict):
        arguments_["args"] = arguments(tmp_path, **arguments_["args"])
    with pytest.raises(error, match=match):
        QaRLTrainer(tiny_model, spread, **arguments_)


@pytest.mark.parametrize("name", ["wandb", "comet_ml"])
def test_a_tracker_that_is_not_installed_is_named_before_the_model_is_loaded(tmp_path, monkeypatch, name):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n, *a: None if n in ("wandb", "comet_ml") else found(n, *a))
    with pytest.raises(ValueError, match=rf"report_to='{name}'.*`pip install {name.replace('_', '-')}`"):
        QaRLTrainer("no/such-model", spread, arguments(tmp_path, report_to=name), make_problems())


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"ACCELERATE_DYNAMO_BACKEND": "aot_eager"}, "dynamo backend 'AOT_EAGER'.*--dynamo_backend no"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "tp_size.*DDP"),
    ],
)
def test_what_only_the_launcher_knows_is_refused(tiny_model, tmp_path, monkeypatch, variables, match):
    args = arguments(tmp_path)
    # Read once per process.
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotImplementedError, match=match):
        QaRLTrainer(tiny_model, spread, args, make_problems())


@pytest.mark.parametrize(
    ("arch", "rates"),
    [("qwen2", {"attention_dropout": 0.1}), ("phi", {"resid_pdrop": 0.1}), ("phi", {"embd_pdrop": 0.1})],
)
def test_dropout_is_refused_by_tbpo_and_switched_off_by_its_option(tmp_path, arch, rates):
    model = make_tiny_model(tmp_path, arch, **rates)
    with pytest.raises(ValueError, match=r"=0.1\), .*disable_dropout=True"):
        make(model, tmp_path)
    make(model, tmp_path, objective="grpo", scheme="bf16")
    trainer = make(model, tmp_path, disable_dropout=True, max_steps=2)
    tokens = torch.randint(4, 200, (2, 12))
    with torch.no_grad():
        assert torch.equal(trainer.model.train()(tokens).logits, trainer.model.eval()(tokens).logits)


def test_rewards_of_none_leave_their_completions_without_effect(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, reward=lambda completions, **kwargs: [None] * len(completions), max_steps=1)
    before = parameters(trainer)
    trainer.train()
    assert rows(trainer)[0]["grad_norm"] == 0 and rows(trainer)[0]["reward"] is None
    assert all(torch.isfinite(p).all() and p.shape == before[n].shape for n, p in trainer.model.named_parameters())


def test_rewards_of_nan_do_not_reach_the_weights(tiny_model, tmp_path):
    def sometimes_nan(completions, **kwargs):
        return [float("nan") if i % 4 == 0 else value for i, value in enumerate(spread(completions))]

    trainer = make(tiny_model, tmp_path, reward=sometimes_nan)
    trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert all(math.isfinite(row["loss"]) for row in rows(trainer))


def test_rewards_of_the_wrong_length_raise(tiny_model, tmp_path):
    with pytest.raises((RuntimeError, ValueError)):
        make(tiny_model, tmp_path, reward=lambda completions, **kwargs: [1.0]).train()


def test_log_probs_of_a_rollout_func_are_the_sampling_log_probs(tiny_model, tmp_path):
    def rollout(prompts, trainer):
        ids = [[5, 6, 7 + i % 3] for i in range(len(prompts))]
        return {"prompt_ids": [[4, 5]] * len(prompts), "completion_ids": ids, "logprobs": [[-9.0] * 3] * len(prompts)}

    trainer = QaRLTrainer(tiny_model, spread, arguments(tmp_path, max_steps=1), make_problems(), rollout_func=rollout)
    trainer.train()
    # A random model gives each of 260 tokens about log(1 / 260) = -5.6, which is 3.4 above what the rollout claims.
    assert rows(trainer)[0]["mismatch/abs_logp_mean"] == pytest.approx(3.4, abs=0.5)
    assert rows(trainer)[0]["mismatch/weight_mean"] == 2.0


def test_rollout_func_without_log_probs_raises(tiny_model, tmp_path):
    def rollout(prompts, trainer):
        n = len(prompts)
        return {"prompt_ids": [[4, 5]] * n, "completion_ids": [[5, 6, 7]] * n, "logprobs": None}

    trainer = QaRLTrainer(tiny_model, spread, arguments(tmp_path, max_steps=1), make_problems(), rollout_func=rollout)
    with pytest.raises(ValueError, match="logprobs=None"):
        trainer.train()


def test_rollout_func_with_tokens_the_model_has_no_rows_for_raises(tiny_model, tmp_path):
    def rollout(prompts, trainer):
        n = len(prompts)
        return {"prompt_ids": [[4, 5]] * n, "completion_ids": [[5, 260]] * n, "logprobs": [[-5.0] * 2] * n}

    trainer = QaRLTrainer(tiny_model, spread, arguments(tmp_path, max_steps=1), make_problems(), rollout_func=rollout)
    with pytest.raises(
        ValueError, match="`rollout_func` returned.*completion 0 of .*, token 1 of 2: 260 is no .* 0 to 259"
    ):
        trainer.train()
