from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from testing_utils.trainings import config
from trl_qarl.forward import Batch
from trl_qarl.quantization.swap import prepare_model
from trl_qarl.telemetry import recorder as module
from trl_qarl.telemetry.recorder import Recorder


class Clock:
    """Seconds that pass where the test says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def wait(self, seconds):
        self.now += seconds


def make_recorder(model=None, num_processes=1, **options):
    """A recorder without a trainer; each of the processes measures the same."""
    args = config("unused", **options)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        is_main_process=True,
        gather=lambda tensor: torch.cat([tensor.reshape(-1)] * num_processes),
        reduce=lambda tensor, reduction="sum": tensor * num_processes,
    )
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    model = nn.Identity() if model is None else model
    return Recorder(args, accelerator, model, metrics), metrics


def make_batch(num_sequences=4, num_tokens=6):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(num_sequences, num_tokens, generator=generator)
    ids = torch.arange(num_sequences * num_tokens).view(num_sequences, num_tokens)
    return {
        "prompt_ids": ids[:, :2],
        "prompt_mask": torch.ones_like(ids[:, :2]),
        "completion_ids": ids,
        "completion_mask": torch.ones_like(ids),
        "advantages": torch.tensor([1.0, -1.0, 2.0, 0.0])[:num_sequences],
        "old_per_token_logps": old,
        "sampling_per_token_logps": old + 0.1,
    }


def observe(recorder, output, publication):
    recorder.observe_rollout(publication)
    recorder.observe_mismatch(output, Batch.of(output))


def test_seconds_of_a_part_exclude_nested_parts(monkeypatch):
    clock, (recorder, _) = Clock(monkeypatch), make_recorder()
    for _ in range(2):
        with recorder.time("outer"):
            clock.wait(1)
            with recorder.time("middle"):
                clock.wait(10)
                with recorder.time("inner"):
                    clock.wait(100)
                with recorder.time("inner"):
                    clock.wait(200)
            clock.wait(2)
    assert [recorder.pop_seconds(part) for part in ("outer", "middle", "inner")] == [6, 20, 600]
    assert recorder.pop_seconds("outer") == 0
    with recorder.time("outer"):
        clock.wait(1)
        with pytest.raises(KeyError), recorder.time("inner"):
            clock.wait(10)
            raise KeyError
    assert (recorder.pop_seconds("outer"), recorder.pop_seconds("inner")) == (1, 0)


def test_a_turn_is_measured_by_its_time(monkeypatch):
    clock, (recorder, metrics) = Clock(monkeypatch), make_recorder()
    with recorder.time("rollout"):
        clock.wait(2)
    recorder.observe_turn([[1, 2, 3], [4]], recorder.pop_seconds("rollout"))
    assert metrics["train"] == {"rollout/seconds": [2], "rollout/tokens_per_second": [2], "rollout/mean_length": [2]}


def test_looping_and_garbled_shares_cover_all_processes():
    recorder, metrics = make_recorder(num_processes=3)
    recorder.observe_completions([[7] * 16, [1, 2]], ["fine", [{"content": "a\ufffdb"}]])
    assert metrics["train"] == {"rollout/repetition_share": [0.5], "rollout/garbled_share": [0.5]}


def test_batches_at_several_bits_are_logged_apart():
    recorder, metrics = make_recorder()
    for bits, reward in ((4.0, 0.75), (3.0, 0.25)):
        metrics["train"]["reward"].append(reward)
        observe(recorder, make_batch(), {"quant/bits": bits})
    logged = metrics["train"]
    assert (logged["reward/4_bits"], logged["reward/3_bits"]) == ([0.75], [0.25])
    assert logged["mismatch/abs_logp_mean/3_bits"] == logged["mismatch/abs_logp_mean"][1:]
    assert logged["quant/bits"] == [4.0, 3.0]


def test_the_rejected_share_is_the_share_of_zero_weights():
    recorder, metrics = make_recorder(loss_type="grpo")
    metrics["train"]["reward"].append(0.0)
    batch = make_batch() | {"importance_sampling_ratio": torch.tensor([[0.0], [1.0], [0.0], [2.0]])}
    observe(recorder, batch, {})
    assert metrics["train"]["mismatch/rejected_share"] == [0.5]


def test_a_step_within_backward_is_measured_as_one_after_it(monkeypatch):
    """DeepSpeed's engine steps before transformers calls anyone."""
    clock = Clock(monkeypatch)
    model = nn.Sequential(nn.Linear(128, 8))
    prepare_model(model, "w8a8")
    recorder, metrics = make_recorder(model)

    class Engine(nn.Module):
        def step(self):
            with torch.no_grad():
                model[0].weight += 0.1
            clock.wait(5)

    engine = Engine()
    for _ in range(2):
        with recorder.time("forward_backward"), recorder.steps_within(engine):
            clock.wait(7)
            engine.step()
        recorder.on_pre_optimizer_step(None, None, None)
        clock.wait(1)
        recorder.on_optimizer_step(None, None, None)
        assert recorder.pop_seconds("forward_backward") == 7
    assert "step" not in vars(engine)
    logged = metrics["train"]
    assert logged["step/optimizer_seconds"] == [6, 6]
    assert logged["quant/code_flip_rate"][1] > 0.5 and min(logged["quant/update_to_step"]) > 1
