import json

import pytest

from testing_utils.recorded_runs import make_run, write_run
from trl_qarl.telemetry.run_files import HISTOGRAM_EDGES


pytest.importorskip("pandas")

from trl_qarl.study.runs import find_holes, read_run, read_runs


def test_run_is_read_with_its_metrics_distributions_and_evaluation(tmp_path):
    path = write_run(tmp_path / "run")
    (path / "evaluation.json").write_text('{"greedy": {"correct": 3, "total": 4}}')
    run = read_run(path)
    assert (run.name, run.last_step, len(run.distributions), run.notes) == ("run", 40, 320, [])
    assert run.evaluation == {"greedy": {"correct": 3, "total": 4}}
    assert len(run.values("reward")) == 40


def test_rows_of_one_step_are_merged(tmp_path):
    rows = [{"step": 1, "reward": 0.5}, {"step": 1, "eval_reward": 0.25}]
    assert read_run(write_run(tmp_path / "run", rows=rows)).rows() == [{"step": 1, "reward": 0.5, "eval_reward": 0.25}]


@pytest.mark.parametrize(
    ("broken", "note"),
    [
        ('{"step": 39, "rew', "metrics.jsonl: 1 unreadable lines"),
        ('{"step": 4{"step": 40, "reward": 2}', "metrics.jsonl: 1 unreadable lines"),
        ("3", "metrics.jsonl: 1 unreadable lines"),
        (None, "last line of metrics.jsonl is incomplete"),
    ],
)
def test_a_line_that_is_no_row_is_left_out_and_noted(tmp_path, broken, note):
    path, row = write_run(tmp_path / "run", rows=[]), '{"step": 40, "reward": 1}\n'
    (path / "metrics.jsonl").write_text(row + '{"step": 41, "rew' if broken is None else f"{broken}\n{row}")
    run = read_run(path)
    assert run.rows() == [{"step": 40, "reward": 1.0}] and note in run.notes[0]


def test_steps_that_a_resumed_run_trained_again_replace_the_earlier_ones(tmp_path):
    rows = [{"step": step, "reward": 0} for step in range(1, 40)] + [{"step": step, "reward": 1} for step in (31, 40)]
    run = read_run(write_run(tmp_path / "run", rows=rows))
    assert list(run.metrics.index) == [*range(1, 32), 40]
    assert run.values("reward")[30] == 0 and run.values("reward")[31] == 1
    assert run.notes == ["The run was resumed: 9 logged steps were trained again, the later values are used."]


def test_values_that_are_not_finite_become_gaps(tmp_path):
    path = write_run(tmp_path / "run", rows=[])
    values = ["null", "NaN", "Infinity", "1e999", "1" + "0" * 400, "0.5", '"text"', "true"]
    lines = [f'{{"step": {step}, "reward": {value}}}\n' for step, value in enumerate(values, 33)]
    (path / "metrics.jsonl").write_text("".join(lines))
    run = read_run(path)
    assert dict(run.values("reward")) == {38: 0.5}
    assert run.irregularities() == ["reward: not finite at steps 33, 34, 35, 36, 37."]


def test_summary_and_evaluation_of_a_step_join_its_row(tmp_path):
    rows = [{"step": 1, "loss": 0.0, "reward": 0.1}, {"step": 1, "eval_reward": 0.2}, {"step": 1, "train_loss": 0.0}]
    run = read_run(write_run(tmp_path / "run", rows=rows, max_steps=1))
    assert run.rows() == [{"step": 1, "loss": 0.0, "reward": 0.1, "eval_reward": 0.2, "train_loss": 0.0}]
    assert not run.notes


def test_run_that_ended_early_is_noted(tmp_path):
    assert read_run(write_run(tmp_path / "run", num_steps=12)).notes == ["The run ended at step 12 of 40."]
    assert read_run(write_run(tmp_path / "other", num_steps=12, max_steps="40")).notes == []


@pytest.mark.parametrize(
    "change",
    [{"edges": [1, 2]}, {"edges": [2 * edge for edge in HISTOGRAM_EDGES]}, {"counts": []}],
)
def test_malformed_distribution_is_left_out_and_noted(tmp_path, change):
    row = {"step": 1, "name": "ratio", "sign": "positive", "edges": HISTOGRAM_EDGES}
    row["counts"] = [1] * (len(HISTOGRAM_EDGES) - 1)
    path = write_run(tmp_path / "run")
    (path / "distributions.jsonl").write_text(f"{json.dumps(row | change)}\n{json.dumps(row)}\n")
    run = read_run(path)
    assert run.distributions == [row]
    assert run.notes == ["distributions.jsonl: 1 unreadable lines are not used (line 1)."]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"greedy": {"correct": 5, "total": 4}}', '{"greedy": {"correct": 0, "total": 0}}']
)
def test_malformed_evaluation_is_left_out_and_noted(tmp_path, text):
    path = write_run(tmp_path / "run")
    (path / "evaluation.json").write_text(text)
    run = read_run(path)
    assert run.evaluation == {} and "evaluation.json is not used" in run.notes[0]


def test_directory_of_compare_is_read_and_its_unusable_cells_are_noted(tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "cell.json").write_text("{}")
    (tmp_path / "unrelated").mkdir()
    runs, notes = read_runs([tmp_path])
    assert [run.name for run in runs] == ["a"]
    assert notes == [f"Left out: {tmp_path / 'b'} has no metrics.jsonl: no step of it was logged."]


def test_runs_of_equal_name_are_told_apart(tmp_path):
    runs, _ = read_runs([write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run", seed=1)])
    assert [run.name for run in runs] == ["x/run", "y/run"]


def test_what_is_missing_or_changed_nothing_is_told():
    rows = [{"step": step, "reward": 1.0, "quant/code_flip_rate": 0.0} for step in (2, 4, 6, 8)]
    rows += [{"step": step, "reward": 1.0, "entropy": 1.0, "quant/code_flip_rate": 0.1} for step in (30, 32)]
    assert make_run("run", {}, rows).irregularities() == [
        "reward: nothing logged between steps 8 and 30.",
        "quant/code_flip_rate: 0 at steps 4, 6, 8.",
    ]


def test_steps_further_apart_than_usual_are_a_hole():
    assert find_holes([1, 3, 5, 7, 31, 33]) == [(7, 31)]
    assert find_holes([1, 10, 20, 30, 35]) == find_holes([1, 40]) == find_holes([]) == []
