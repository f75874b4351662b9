"""The generation batch in progress beside a checkpoint: taken up, or dropped where batches have another shape."""

import logging

import pytest
import torch

from testing_utils import stop_at
from testing_utils.trainings import arguments, make


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"steps_per_generation": 8},
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


@pytest.mark.slow
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
