import sys

import pytest

from trl_qarl.cli import main
from trl_qarl.study.grid import build_command, cell_name, check_evaluation, expand_grid


def test_grid_is_the_product_in_the_order_of_the_axes():
    cells = expand_grid({"train": {}, "grid": {"seed": [0, 1], "quantize_learner": [True, False], "scheme": ["fp8"]}})
    assert [cell_name(cell) for cell in cells] == [
        "QaRL-fp8-seed0",
        "QaRL-fp8-seed1",
        "rollout-only-fp8-seed0",
        "rollout-only-fp8-seed1",
    ]
    assert list(cells[0]) == ["quantize_learner", "scheme", "seed"]


@pytest.mark.parametrize("quantize_learner", [[True, False], [False, True], [False]], ids=str)
def test_bf16_has_one_cell_whatever_the_learner_does(quantize_learner):
    grid = {"quantize_learner": quantize_learner, "objective": ["tbpo"], "scheme": ["bf16", "w4a16"], "seed": [0, 1]}
    cells = expand_grid({"train": {}, "grid": grid})
    names = {True: "QaRL", False: "rollout-only"}
    expected = {f"{names[value]}-tbpo-w4a16" for value in quantize_learner} | {"bf16-tbpo"}
    assert {cell_name(cell) for cell in cells} == {f"{name}-seed{seed}" for name in expected for seed in (0, 1)}
    assert len(cells) == 2 * len(expected)


def test_cells_are_taken_as_listed():
    cells = [
        {"seed": 3, "scheme": "bf16"},
        {"quantize_learner": False, "objective": "grpo"},
        {"scheme": "w4a16", "lora_mode": "merged", "seed": 0},
        {"objective": "my.losses:Mine"},
    ]
    expanded = expand_grid({"train": {}, "cells": cells})
    assert expanded == cells
    names = ["bf16-seed3", "rollout-only-grpo", "w4a16-lora_merged-seed0", "my.losses:Mine"]
    assert [cell_name(cell) for cell in expanded] == names


def test_train_options_become_one_command_line(tmp_path):
    train = {
        "learning_rate": 1e-5,
        "reward_funcs": ["a.b", "c"],
        "use_vllm": True,
        "beta": None,
        "optim_args": {"x": 1},
    }
    command = build_command({"train": train}, {"scheme": "fp8", "seed": 2}, tmp_path, resume=True)
    assert command[:4] == [sys.executable, "-m", "trl_qarl.cli", "train"]
    assert command[4:] == [
        *("--learning_rate", "1e-05", "--reward_funcs", "a.b", "c", "--use_vllm", "True", "--optim_args", '{"x": 1}'),
        *("--scheme", "fp8", "--seed", "2", "--output_dir", str(tmp_path), "--resume_from_checkpoint", "True"),
    ]
    assert "--resume_from_checkpoint" not in build_command({"train": train}, {"seed": 2}, tmp_path)


def test_command_fills_placeholders_and_leaves_other_braces(tmp_path):
    config = {"command": ["{python}", "--x={seed}-{scheme}", '{"a": 1}', "{resume_from_checkpoint}", 5]}
    command = build_command(config, {"scheme": "fp8", "seed": 2}, tmp_path)
    assert command == [sys.executable, "--x=2-fp8", '{"a": 1}', "false", "5"]
    for cell, expected in (({"scheme": "bf16"}, "true"), ({"quantize_learner": False}, "false")):
        assert build_command({"command": ["{quantize_learner}"]}, cell, tmp_path) == [expected]


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "is not YAML"), ("- 1", "must be a mapping"), ("", "must be a mapping")]
)
def test_file_that_is_no_grid_is_one_line(tmp_path, capsys, text, message):
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    for name, expected in (("grid.yaml", message), ("missing.yaml", "No such file")):
        with pytest.raises(SystemExit, match="2"):
            main(["compare", str(tmp_path / name)])
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line


@pytest.mark.parametrize(
    "text", ["", "{}", "3", '{"greedy": 1}', '{"greedy": {"correct": 3, "total": 2}}', '{"greedy": {"correct": "1"}}']
)
def test_evaluation_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match="must be"):
        check_evaluation(text)
