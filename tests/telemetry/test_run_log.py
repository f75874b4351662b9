import json
import math

import pytest

from testing_utils import make_problems, make_trainer
from trl_qarl.telemetry.run_log import to_row


def make(*args, **kwargs):
    return make_trainer(*args, eval_dataset=make_problems(4), **kwargs)


def read(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_numbers_that_json_lacks_become_null():
    row = to_row(3, 1.5, {"a": math.nan, "b": math.inf, "c": 0.5, "d": None, "e": 2})
    assert row == {"step": 3, "time": 1.5, "a": None, "b": None, "c": 0.5, "d": None, "e": 2}


def test_every_logged_row_is_in_the_file(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)
    trainer.train()
    rows = read(tmp_path / "metrics.jsonl")
    assert len(rows) == len(trainer.state.log_history) == 5
    for row, logged in zip(rows, trainer.state.log_history, strict=True):
        assert {k: v for k, v in row.items() if k != "time"} == {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in logged.items()
        }
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 4]
    assert sorted(row["time"] for row in rows) == [row["time"] for row in rows]
    # Another run of this trainer.
    trainer.evaluate()
    trainer.train()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 4]
    assert read(tmp_path / "metrics.previous.jsonl")[:-1] == rows


def test_half_a_row_of_a_killed_run_spoils_no_other(tiny_model, tmp_path):
    make(tiny_model, tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')
    make(tiny_model, tmp_path, max_steps=3).train(resume_from_checkpoint=True)
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 2, 3, 3]


@pytest.mark.slow
def test_parts_of_a_step_are_timed(tiny_model, tmp_path):
    make(tiny_model, tmp_path, max_steps=4, gradient_accumulation_steps=2, steps_per_generation=4).train()
    rows = [row for row in read(tmp_path / "metrics.jsonl") if "loss" in row]
    assert len(rows) == 4
    for row in rows:
        parts = [row["step/forward_backward_seconds"]]
        if row["step"] % 2:
            parts += [row["rollout/seconds"], row["step/scoring_seconds"]]
        assert min(parts) > 0 and row["step/optimizer_seconds"] > 0
        # TRL's own time of the step, which is without the optimizer.
        assert sum(parts) == pytest.approx(row["step_time"], rel=0.05, abs=0.02)


def test_run_file_says_what_was_run(tiny_model, tmp_path):
    make(tiny_model, tmp_path, loss_type="grpo", quantize_learner=False, seed=7, max_steps=1).train()
    run = json.loads((tmp_path / "run.json").read_text())
    versions, options = run.pop("versions"), run.pop("options")
    assert options["num_generations"] == 4 and options["learning_rate"] == 1e-3 and "beta" not in options
    assert run == {
        "loss_type": "grpo",
        "scheme": "w4a16",
        "quantize_learner": False,
        "numerics": "fast",
        "group_size": 128,
        "seed": 7,
        "model": tiny_model,
        "reward_funcs": ["spread"],
        "num_problems": 16,
        "num_processes": 1,
        "max_steps": 1,
    }
    assert {"python", "trl-qarl", "torch", "transformers", "trl"} <= versions.keys()
