import json
import math
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from testing_utils import make_problems, make_trainer, stop_at
from trl_qarl.telemetry.run_log import _fingerprint_of_model, to_row


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


@pytest.mark.slow
def test_every_generation_batch_has_a_row_whatever_is_logged(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, max_steps=4, logging_steps=4)
    trainer.evaluate()
    trainer.train()
    batches = read(tmp_path / "batches.jsonl")
    # Two generation batches of two updates each.
    assert [batch["step"] for batch in batches] == [1, 3]
    (row,) = [row for row in read(tmp_path / "metrics.jsonl") if "loss" in row]
    for name in ("reward", "mismatch/abs_logp_mean", "mismatch/abs_logp_max", "mismatch/k3/q1", "quant/sqnr"):
        values = [batch[name] for batch in batches]
        assert row[name] == pytest.approx(sum(values) / 2)
    # A mismatch of a few roundings of float32 may be the same twice.
    assert batches[0]["reward"] != batches[1]["reward"]
    make(tiny_model, tmp_path, max_steps=1).train()
    assert len(read(tmp_path / "batches.jsonl")) == 1 and len(read(tmp_path / "batches.previous.jsonl")) == 2


def test_run_file_says_what_was_run(tiny_model, tmp_path):
    make(tiny_model, tmp_path, loss_type="grpo", quantize_learner=False, seed=7, max_steps=1).train()
    run = json.loads((tmp_path / "run.json").read_text())
    versions, options = run.pop("versions"), run.pop("options")
    assert len(run.pop("model_sha256")) == 64
    assert options["num_generations"] == 4 and options["max_completion_length"] == 8 and "save_strategy" not in options
    assert not options.keys() & run.keys() and not any("seed" in name or "dir" in name for name in options)
    assert run == {
        "loss_type": "grpo",
        "scheme": "w4a16",
        "grids": ["int4-signed"],
        "quantize_learner": False,
        "numerics": "fast",
        "group_size": 128,
        "seed": 7,
        "model": tiny_model,
        "reward_funcs": ["spread"],
        "num_problems": 16,
        "num_processes": 1,
        "use_vllm": False,
        "learning_rate": 1e-3,
        "max_steps": 1,
    }
    assert {"python", "trl-qarl", "torch", "transformers", "trl"} <= versions.keys()


@pytest.mark.slow
def test_a_run_file_tells_copies_from_changed_weights(tiny_model, tmp_path):
    copy, changed = (shutil.copytree(tiny_model, tmp_path / name) for name in ("copy", "changed"))
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    found = []
    for model in (tiny_model, copy, changed):
        output = tmp_path / f"of-{Path(model).name}"
        make(str(model), output, max_steps=1).train()
        found.append(json.loads((output / "run.json").read_text())["model_sha256"])
    assert found[0] == found[1] != found[2] and re.fullmatch("[0-9a-f]{64}", found[0])


def test_a_fingerprint_has_configuration_and_weights_only(tiny_model, tmp_path, monkeypatch):
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    (copy / "training_args.bin").write_bytes(b"of a run")
    assert _fingerprint_of_model(str(copy)) == _fingerprint_of_model(tiny_model) != {}
    monkeypatch.chdir(copy)
    # A model made in memory, whose name is not this folder's.
    assert _fingerprint_of_model("") == {}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.safetensors").touch()
    assert _fingerprint_of_model(".") == {}


@pytest.mark.slow
def test_resumed_run_appends(tiny_model, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    make(tiny_model, tmp_path, callbacks=[stop_at(2)], **saving).train()
    before = read(tmp_path / "metrics.jsonl")
    make(tiny_model, tmp_path, **saving).train(resume_from_checkpoint=True)
    rows = read(tmp_path / "metrics.jsonl")
    assert rows[: len(before)] == before
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
