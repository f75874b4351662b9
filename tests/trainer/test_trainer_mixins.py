"""Rollouts whose log-probs are the sampler's, compared in the first update of their batch."""

import json
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from torch import nn
from trl import GRPOTrainer

from testing_utils import fixed_completions, logged, make_trainer, make_vllm_trainer
from testing_utils.trainings import count_tokens, lora, without_times
from trl_qarl.bitwise import cpu as kernels
from trl_qarl.quantization.swap import prepare_model
from trl_qarl.quantization.versions import kept_version
from trl_qarl.trainer import trainer_mixins
from trl_qarl.trainer.trainer_mixins import ScoresRollouts, ScoringPlan


ENGINE = {"numerics": "engine", "bf16": True, "learning_rate": 1e-2, "max_steps": 4}


def train(model, folder, monkeypatch, scores_all=False, peft=None, **options):
    """A training that evaluates at its end; with `scores_all` as if nothing were known of its rollouts."""
    with monkeypatch.context() as patch:
        if scores_all:
            patch.setattr(
                ScoresRollouts,
                "_plan_scoring",
                lambda self, drawn=None: ScoringPlan("learner", self.state.global_step),
            )
        evaluation = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
        peft_config = None if peft is None else lora(**peft)
        problems = Dataset.from_dict({"prompt": ["1 +", "2 +"]})
        trainer = make_trainer(
            model, folder, eval_dataset=problems, peft_config=peft_config, **(ENGINE | evaluation | options)
        )
        trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "tbpo", "beta": 0.1, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
        {"loss_type": "grpo", "steps_per_generation": 2, "num_iterations": 2},
        {"optim": "adamw_torch", "peft": {"r": 4}, "lora_mode": "merged"},
        *(
            pytest.param(options, marks=pytest.mark.nightly)
            for options in (
                {"gradient_accumulation_steps": 3, "steps_per_generation": 2},
                {"loss_type": "tbpo", "steps_per_generation": 4},
                {
                    "loss_type": "grpo",
                    "importance_sampling_level": "sequence",
                    "gradient_accumulation_steps": 4,
                    "steps_per_generation": 2,
                },
                {"loss_type": "grpo", "beta": 0.1, "optim": "adamw_torch", "peft": {"r": 4}},
                {"loss_type": "dapo", "temperature": 0.7, "gradient_checkpointing": True},
            )
        ),
    ],
    ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items()),
)
def test_a_training_is_the_one_in_which_every_rollout_is_scored(tiny_model, tmp_path, monkeypatch, options):
    """Weights, losses and every metric, of evaluations too, in every bit."""
    ours, scored = (
        train(tiny_model, tmp_path / str(scores_all), monkeypatch, scores_all, **options)
        for scores_all in (False, True)
    )
    assert logged(ours, "mismatch/abs_logp_max") and set(logged(ours, "mismatch/abs_logp_max")) == {0.0}
    assert logged(ours, "eval_mismatch/abs_logp_max") == [0.0] * 2
    ours_rows, scored_rows = (list(map(without_times, run.state.log_history)) for run in (ours, scored))
    assert [row.keys() for row in ours_rows] == [row.keys() for row in scored_rows]
    for ours_row, scored_row in zip(ours_rows, scored_rows, strict=True):
        # A batch is observed in the order of its updates.
        assert ours_row == pytest.approx(scored_row, rel=1e-6, abs=1e-9)
    for name in ("loss", "grad_norm", "entropy"):
        assert logged(ours, name) == logged(scored, name) and any(logged(ours, name))
    assert all(map(torch.equal, ours.model.state_dict().values(), scored.model.state_dict().values()))


@pytest.mark.slow
def test_one_sequence_of_later_updates_is_compared(tiny_model, tmp_path, monkeypatch):
    rows, forward = [], GRPOTrainer._get_per_token_logps_and_entropies

    def count(self, model, input_ids, *args, **kwargs):
        rows.append((len(input_ids), torch.is_grad_enabled()))
        return forward(self, model, input_ids, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", count)
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    make_trainer(tiny_model, tmp_path, **(ENGINE | options)).train()
    assert rows == [(1, False), *[(4, True)] * 4] * 2


def test_a_batch_drawn_ahead_is_scored_with_its_weights():
    model = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128))
    prepare_model(model, "w8a16")
    inputs = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    drawn, before = ScoringPlan("learner", 3, kept_version(model)), model(inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    assert drawn.is_stale and not torch.equal(model(inputs), before)
    with drawn.at_drawn(model):
        assert torch.equal(model(inputs), before)
    now = ScoringPlan("learner", 4)
    with now.at_drawn(model):
        assert not torch.equal(model(inputs), before)


def of_some_prompts(prompts, completions, **kwargs):
    """Equal rewards for all completions of an even number."""
    return [int(prompt[0]) % 2 * len(set(text)) for prompt, text in zip(prompts, completions, strict=True)]


@pytest.mark.parametrize("objective", ["tbpo", "dapo"])
def test_sequences_without_a_gradient_are_not_computed(tiny_model, tmp_path, monkeypatch, objective):
    prompts = Dataset.from_dict({"prompt": [f"{i % 10} +" for i in range(32)]})
    sizes = {"num_generations": 4, "per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 2}
    runs = []
    for skips in (True, False):
        trainer = make_trainer(
            tiny_model, tmp_path / str(skips), of_some_prompts, prompts, loss_type=objective, **(ENGINE | sizes)
        )
        num_tokens = count_tokens(trainer)
        with monkeypatch.context() as patch:
            if not skips:
                patch.setattr(ScoresRollouts, "_choosing", lambda self, inputs: nullcontext())
            trainer.train()
        advantages = torch.cat([part["advantages"] for part in trainer._buffered_inputs])
        assert (advantages == 0).sum() >= 4 and (advantages != 0).any()
        runs.append((sum(num_tokens), trainer))
    (few, ours), (many, all_computed) = runs
    assert few < 0.9 * many
    assert logged(ours, "mismatch/abs_logp_max") == [0.0]
    for name, rel in (("loss", 1e-3), ("grad_norm", 2**-6), ("reward", 0), ("num_tokens", 0), ("step/skipped", 0)):
        assert logged(ours, name) == pytest.approx(logged(all_computed, name), rel=rel), name


def shift_last_sequence(trainer, monkeypatch, of_batch):
    """Have the sampler of batch number `of_batch` give a token of the sequence that is shuffled to the last update
    another log-prob."""
    shuffle, batches = trainer_mixins.shuffle_groups, []

    def shuffle_and_shift(batch, **groups):
        batch = shuffle(batch, **groups)
        if len(batches) == of_batch:
            for name in ("sampling_per_token_logps", "old_per_token_logps"):
                batch[name] = batch[name].clone()
                batch[name][-1, 0] += 2**-10
        batches.append(batch)
        return batch

    monkeypatch.setattr(trainer_mixins, "shuffle_groups", shuffle_and_shift)


ONE_BY_ONE = {"per_device_train_batch_size": 1, "num_generations": 2, "steps_per_generation": 2, "keep_groups": True}


@pytest.mark.slow
def test_an_unscored_sequence_is_found_before_the_update(tiny_model, tmp_path, monkeypatch):
    trainer = make_trainer(tiny_model, tmp_path, **(ENGINE | ONE_BY_ONE | {"numerics": "exact"}))
    shift_last_sequence(trainer, monkeypatch, of_batch=1)
    with pytest.raises(RuntimeError, match=r"the largest mismatch is 0.000977 and not 0: .* token 0 of completion 1"):
        trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.slow
def test_a_tolerated_difference_survives_a_resume(tiny_model, tmp_path, monkeypatch, caplog):
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    trainer = make_trainer(tiny_model, tmp_path, **(ENGINE | ONE_BY_ONE | saving))
    shift_last_sequence(trainer, monkeypatch, of_batch=1)
    trainer.train()
    first, second, third = logged(trainer, "mismatch/abs_logp_max")
    assert first == third == 0.0 and second == pytest.approx(2**-10, rel=1e-3)
    (message,) = [record.message for record in caplog.records if "the largest mismatch" in record.message]
    assert message.endswith("From the next batch on, each rollout is scored by an additional forward.")
    assert trainer.policy.exactness.has_differed
    resumed = make_trainer(tiny_model, tmp_path, **(ENGINE | ONE_BY_ONE | saving))
    assert not resumed.policy.exactness.has_differed
    resumed.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
    assert resumed.policy.exactness.has_differed
    assert all(map(torch.equal, trainer.model.state_dict().values(), resumed.model.state_dict().values()))


def test_rollouts_of_a_function_are_scored(tiny_model, tmp_path, caplog):
    with caplog.at_level("INFO", "trl_qarl.trainer.qarl_trainer"):
        trainer = make_trainer(tiny_model, tmp_path, rollout_func=fixed_completions, **(ENGINE | {"max_steps": 1}))
    assert "log-probs of a `rollout_func` are not the engine's" in caplog.text
    trainer.train()
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not kernels.has_engine_kernels(), reason=str(kernels.reason_against()))
@pytest.mark.parametrize("objective", ["tbpo", pytest.param("grpo", marks=pytest.mark.nightly)])
def test_a_stale_bias_ends_the_run_before_an_update(tmp_path, monkeypatch, objective):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    # One update of each batch, so that no sequence is left out and scored alone.
    options = ENGINE | {
        "numerics": "exact",
        "vllm_mode": "colocate",
        "loss_type": objective,
        "max_completion_length": 24,
    }
    options |= {"steps_per_generation": 1, "max_steps": 3}
    trainer = make_vllm_trainer(tmp_path, "qwen2", **options)
    generation, biases = trainer.vllm_generation, []
    publish = generation.sync_weights

    def publish_all_but_a_bias():
        publish()
        [bias] = generation.llm.apply_model(lambda engine: engine.model.layers[1].self_attn.qkv_proj.bias)
        biases.append(bias.detach().clone())
        with torch.no_grad():
            # One channel of one layer, as it was at first.
            bias[3] = biases[0][3]

    monkeypatch.setattr(generation, "sync_weights", publish_all_but_a_bias)
    with pytest.raises(RuntimeError, match="'layers.1'"):
        trainer.train()
    assert trainer.state.global_step == 1 and len(biases) == 2 and not torch.equal(*biases)
    # The batch before was compared, and agreed.
    rows = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    assert [row["mismatch/abs_logp_max"] for row in rows] == [0.0]
