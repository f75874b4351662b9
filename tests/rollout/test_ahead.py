"""Batches that a server draws ahead: which weights draw and score them, and what an interrupted run keeps."""

import copy
import threading
import time

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from torch.utils.data import BatchSampler
from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler

from testing_utils import logged, make_vllm_trainer
from testing_utils.played_server import weights
from testing_utils.trainings import bands
from trl_qarl.bitwise import cpu as kernels
from trl_qarl.engines.background import BackgroundCall
from trl_qarl.rollout.ahead import NextPrompts
from trl_qarl.rollout.failures import EngineLost


pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")
needs_engine_numerics = pytest.mark.skipif(
    kernels.reason_not_to_call() is not None, reason=str(kernels.reason_not_to_call())
)


class Boundaries(TrainerCallback):
    """Before each update, the learner's weights."""

    def __init__(self):
        self.weights = {}

    def on_step_begin(self, args, state, control, model, **kwargs):
        self.weights[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}


def record(trainer):
    """The generation batches of a training, and the weights at each update."""
    batches, boundaries, generate = [], Boundaries(), trainer._generate_and_score_completions

    def generate_and_record(inputs):
        output = generate(inputs)
        if trainer.model.training:
            batches.append({name: copy.copy(value) for name, value in output.items()})
        return output

    trainer._generate_and_score_completions = generate_and_record
    trainer.add_callback(boundaries)
    return batches, boundaries.weights


def record_parts(trainer):
    """The completions of each micro-batch of a training, in their order."""
    parts, compute = [], trainer._compute_loss

    def compute_and_record(model, inputs):
        if model.training:
            parts.append(inputs["completion_ids"].tolist())
        return compute(model, inputs)

    trainer._compute_loss = compute_and_record
    return parts


def scored(trainer, batch, state):
    """Log-probs of a batch by the weights of one update."""
    trainer.model.load_state_dict(state)
    trainer.model.train()
    return trainer._score_rollout(batch)


@pytest.mark.parametrize("objective", ["tbpo", "grpo"])
def test_weights_of_the_batch_before_draw_and_score_a_batch(make_played_trainer, objective):
    trainer, server = make_played_trainer(rollout_ahead=1, loss_type=objective, max_steps=5, beta=0.1)
    batches, states = record(trainer)
    asked, ask = [], server.ask
    server.ask = lambda what: asked.append(what) or ask(what)
    trainer.train()
    drawn_by = [0, 0, 1, 2, 3]
    assert logged(trainer, "rollout/weight_version") == drawn_by
    assert logged(trainer, "rollout/age_updates") == [step - version for step, version in enumerate(drawn_by)]
    # Of nothing that is not trained.
    assert len(batches) == 5 and trainer._ahead.pending is None
    assert asked.count("generate") == 5
    for batch, version in zip(batches, drawn_by, strict=True):
        assert torch.equal(batch["old_per_token_logps"], scored(trainer, batch, states[version]))
    last = scored(trainer, batches[-1], states[4]), scored(trainer, batches[-1], states[3])
    assert not torch.equal(*last)
    # Of the batches that are stale.
    assert len(logged(trainer, "staleness/abs_logp_mean")) == 4 and min(logged(trainer, "staleness/abs_logp_mean")) > 0
    expected = (last[0] - last[1])[batches[-1]["completion_mask"].bool()].abs()
    assert logged(trainer, "staleness/abs_logp_max")[-1] == pytest.approx(expected.max().item(), rel=1e-5)
    assert logged(trainer, "staleness/abs_logp_mean")[-1] == pytest.approx(expected.mean().item(), rel=1e-5)


@pytest.mark.slow
def test_a_run_resumed_anywhere_reaches_the_same_weights(make_played_trainer):
    """Within a generation batch and at the end of an epoch, of three with two batches each, with evaluations."""
    options = {"rollout_ahead": 1, "per_device_train_batch_size": 8, "num_generations": 2, "steps_per_generation": 2}
    options |= {"max_steps": 12, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 3}
    whole, _ = make_played_trainer("whole", **options)
    batches, _ = record(whole)
    whole.train()
    ages = logged(whole, "rollout/age_updates")
    assert ages == [0, 2, 2, 2, 2, 2]
    for step in (5, 8):
        resumed, server = make_played_trainer(f"resumed-{step}", **options)
        theirs, _ = record(resumed)
        resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-{step}")
        assert resumed.state.global_step == 12 and torch.equal(weights(resumed), weights(whole)), step
        left = batches[-len(theirs) :] if theirs else []
        assert len(theirs) == 6 - (step + 1) // 2
        for ours, its in zip(left, theirs, strict=True):
            assert torch.equal(ours["completion_ids"], its["completion_ids"])
            assert torch.equal(ours["old_per_token_logps"], its["old_per_token_logps"])
        assert logged(resumed, "rollout/age_updates") == ages


def test_an_evaluation_leaves_what_is_trained_alone(make_played_trainer):
    options = {"rollout_ahead": 1, "max_steps": 4, "steps_per_generation": 2}
    plain, _ = make_played_trainer("plain", **options)
    trainer, server = make_played_trainer("evaluated", eval_strategy="steps", eval_steps=1, **options)
    ours, theirs = (record_parts(each) for each in (trainer, plain))
    for each in (trainer, plain):
        torch.manual_seed(3)
        each.train()
    assert logged(trainer, "eval_rollout/weight_version") == [1, 2, 3, 4]
    assert logged(trainer, "rollout/age_updates") == [0, 2]
    assert ours == theirs and torch.equal(weights(trainer), weights(plain))


SAVED = {"rollout_ahead": 1, "max_steps": 3, "save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize(
    ("before", "changes", "step", "message"),
    [
        ({}, {"max_steps": 5}, 3, "was saved by a run that ended at update 3, and has no batch that was drawn ahead"),
        ({}, {"rollout_ahead": 0}, 3, "was saved with rollout_ahead=1, and this run has rollout_ahead=0"),
        ({"rollout_ahead": 0}, {}, 1, "was saved with rollout_ahead=0, and this run has rollout_ahead=1"),
        ({}, {}, 3, None),
    ],
    ids=str,
)
def test_a_resumed_run_says_if_it_is_another_run(make_played_trainer, caplog, before, changes, step, message):
    trainer, _ = make_played_trainer("first", **(SAVED | before))
    trainer.train()
    resumed, _ = make_played_trainer("resumed", **(SAVED | changes))
    caplog.clear()
    resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-{step}")
    said = [record.getMessage() for record in caplog.records if "another run" in record.getMessage()]
    assert len(said) == (message is not None) and (message is None or message in said[0])


class Writes(TrainerCallback):
    """Writes to all weights when the first update is made, and when the second was evaluated."""

    @torch.no_grad()
    def on_step_end(self, args, state, control, model, at=1, **kwargs):
        if state.global_step == at:
            for parameter in model.parameters():
                parameter.mul_(1.1)

    def on_evaluate(self, *args, **kwargs):
        self.on_step_end(*args, at=2, **kwargs)


def test_a_callbacks_weights_draw_the_next_batch(make_played_trainer, monkeypatch):
    ask_late(monkeypatch)
    options = {"rollout_ahead": 1, "steps_per_generation": 2, "max_steps": 6}
    trainer, server = make_played_trainer(eval_strategy="steps", eval_steps=2, callbacks=[Writes()], **options)
    batches, states = record(trainer)
    held, ask = [], server.ask
    server.ask = lambda what: (what == "generate" and held.append(server.held), ask(what))[1]
    trainer.train()
    drawn_by = [0, 0, 2]
    assert logged(trainer, "rollout/weight_version") == drawn_by
    for batch, version in zip(batches, drawn_by, strict=True):
        assert torch.equal(batch["old_per_token_logps"], scored(trainer, batch, states[version]))
    # It ends with the training.
    server.start()
    expected = []
    for version in drawn_by:
        trainer.model.load_state_dict(states[version])
        server.publish("again")
        expected.append(server.held)
    # What the second update has left was evaluated, and drew nothing.
    first, second, evaluated, third, *_ = held
    assert [first, second, third] == expected and evaluated not in expected


def test_a_synced_reference_is_of_the_batchs_update(make_played_trainer):
    """As without batches that are drawn ahead: old log-probs alone are of earlier weights."""
    reference = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    reference |= bands(1.0)
    trainer, server = make_played_trainer(rollout_ahead=1, max_steps=4, learning_rate=1e-2, **reference)
    batches, states = record(trainer)
    trainer.train()
    for step, batch in enumerate(batches):
        now, drawn = (scored(trainer, batch, states[version]) for version in (step, max(0, step - 1)))
        assert torch.equal(batch["ref_per_token_logps"], now)
        assert torch.equal(batch["old_per_token_logps"], drawn)
        assert step == 0 or not torch.equal(now, drawn)


def test_weights_are_published_when_nothing_is_in_flight(make_played_trainer):
    trainer, server = make_played_trainer(rollout_ahead=1)
    backend, events = trainer.vllm_generation, []
    backend.sync_weights()
    may_end, spoil = threading.Event(), lambda answer: (may_end.wait(10), events.append("drawn"))
    server.spoils = [spoil]
    publish = server.publish
    server.publish = lambda version: (events.append("published"), publish(version))[1]
    in_flight = backend.launch([[5, 6]] * 4, 4)
    threading.Timer(0.2, may_end.set).start()
    backend.sync_weights()
    assert events == ["drawn", "published"]
    _, completion_ids, _, _ = backend.collect(in_flight, [[5, 6]] * 4, 4)
    assert len(completion_ids) == 4 and in_flight.seconds > 0.1


def ask_late(monkeypatch):
    """Have what is in flight ask the server no sooner than `may_ask` is set, or than it is waited for."""
    start, wait = BackgroundCall.start, BackgroundCall.wait

    def start_later(self, request):
        self.may_ask = threading.Event()
        start(self, lambda: self.may_ask.wait(60) and request())

    def wait_for_what_may_ask(self, *args):
        if self.is_started:
            self.may_ask.set()
        wait(self, *args)

    monkeypatch.setattr(BackgroundCall, "start", start_later)
    monkeypatch.setattr(BackgroundCall, "wait", wait_for_what_may_ask)


def test_reordered_prompts_are_drawn_in_their_turn(make_played_trainer, caplog):
    trainer, server = make_played_trainer(rollout_ahead=1, max_steps=3)
    # Something else orders them.
    trainer._get_train_sampler, sampler = lambda *dataset: trainer._sampler(*dataset), trainer._get_train_sampler
    made = []

    def other_order(*dataset):
        made.append(sampler(*dataset))
        made[-1].generator = torch.Generator().manual_seed(len(made))
        return made[-1]

    trainer._sampler = other_order
    trainer.train()
    assert trainer.state.global_step == 3 and logged(trainer, "rollout/age_updates") == [0, 0, 0]
    assert "The prompts are not those that were drawn ahead" in caplog.text


@pytest.mark.parametrize(("num_processes", "num_repeats", "accumulation"), [(1, 2, 1), (2, 3, 2)])
def test_the_next_prompts_are_those_of_the_loader(num_processes, num_repeats, accumulation):
    dataset = Dataset.from_dict({"prompt": [f"{number}" for number in range(11)]})
    share, num_generations = 4, 2

    def sampler(repeat_count):
        size = share * num_processes // num_generations
        return RepeatSampler(dataset, num_generations, size, repeat_count, shuffle=True, seed=3)

    for rank in range(num_processes):
        # The loader's, iterated once for each epoch.
        batches = BatchSamplerShard(BatchSampler(sampler(num_repeats), share, False), num_processes, rank)
        coming = NextPrompts(sampler(num_repeats), dataset, num_repeats, accumulation, num_processes, rank)
        seen = num_updates = 0
        for epoch in range(3):
            order = list(batches)
            for micro_batch, indices in enumerate(order):
                assert coming.number_at(epoch, micro_batch) == seen + micro_batch // num_repeats
                if micro_batch % num_repeats == 0:
                    number = coming.number_at(epoch, micro_batch)
                    assert coming.prompts(number) == [dataset[index]["prompt"] for index in indices]
                    assert coming.updates_before(number) == num_updates + micro_batch // accumulation
            seen += len(order) // num_repeats
            num_updates += -(-len(order) // accumulation)


@pytest.mark.slow
@needs_engine_numerics
@pytest.mark.xdist_group("warm_servers")
def test_a_servers_log_probs_are_of_the_drawing_weights(tmp_path, monkeypatch, warm):
    """Between evaluations, which publish other weights."""
    options = {"bf16": True, "numerics": "exact", "learning_rate": 1e-2, "rollout_ahead": 1, "max_steps": 8}
    options |= {"per_device_eval_batch_size": 4, "eval_strategy": "steps", "eval_steps": 3} | warm.serve(monkeypatch)
    trainer = make_vllm_trainer(tmp_path, "qwen3", **options)
    backend = trainer.vllm_generation
    backend.sync_weights()
    # Long enough to be aborted on the way.
    backend.max_completion_length, usual = 100, backend.max_completion_length
    in_flight = backend.launch([[5, 6]] * 1024, 4)
    time.sleep(0.2)
    backend.vllm_client.control("/pause?mode=abort")
    with pytest.raises(EngineLost, match="completions short: it was told to abort them") as cut:
        backend.collect(in_flight, [[5, 6]] * 1024, 4)
    assert cut.value.is_recoverable
    backend.vllm_client.control("/resume")
    backend.max_completion_length = usual
    batches, states = record(trainer)
    trainer.train()
    assert logged(trainer, "rollout/age_updates") == [0, 2, 2, 2]
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0] * 4 == logged(trainer, "mismatch/abs_logp_mean")
    assert set(logged(trainer, "eval_mismatch/abs_logp_max")) == {0.0}
    assert min(logged(trainer, "staleness/abs_logp_mean")) > 0
    # All tokens, by masters of that update that were quantized anew.
    for number, batch in enumerate(batches):
        at = scored(trainer, batch, states[max(0, 2 * (number - 1))])
        mask = batch["completion_mask"].bool()
        assert torch.equal(at[mask], batch["sampling_per_token_logps"][mask])
        assert number == 0 or not torch.equal(scored(trainer, batch, states[2 * number])[mask], at[mask])
