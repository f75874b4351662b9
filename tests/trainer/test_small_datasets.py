"""Trainings on few prompts: from Python and from the command line, by the door that a user takes."""

import json
import logging

import pytest

from testing_utils import TRAINING, make_problems, spread
from trl_qarl import QaRLConfig, QaRLTrainer
from trl_qarl.scripts import train


def trainer_of(model, folder, dataset, **options):
    """A trainer with our default of eight updates for each generation batch, unless `options` give another."""
    usual = {name: value for name, value in TRAINING.items() if name not in ("steps_per_generation", "max_steps")}
    args = QaRLConfig(str(folder), **(usual | {"max_completion_length": 4} | options))
    return QaRLTrainer(model, spread, args, dataset)


@pytest.mark.parametrize(
    ("num_rows", "options", "steps", "num_updates"),
    [
        (7, {"max_steps": 10}, 7, 10),
        (7, {"num_train_epochs": 1}, 7, 7),
        (3, {"num_train_epochs": 2}, 3, 6),
        (1, {"max_steps": 2}, 1, 2),
        # Fewer prompts than one update: batches of a part of it.
        (3, {"max_steps": 1, "gradient_accumulation_steps": 4}, 2, 1),
        (7, {"num_train_epochs": 1, "steps_per_generation": 2}, 2, 6),
    ],
)
def test_a_training_on_few_prompts_makes_updates(tiny_model, tmp_path, num_rows, options, steps, num_updates):
    trainer = trainer_of(tiny_model, tmp_path, make_problems(num_rows), **options)
    assert trainer.args.steps_per_generation == steps
    assert trainer.args.generation_batch_size == 4 * steps
    trainer.train()
    assert trainer.state.global_step == num_updates


def test_lowered_steps_and_left_over_prompts_are_logged(tiny_model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "trl_qarl"):
        trainer_of(tiny_model, tmp_path, make_problems(7), gradient_accumulation_steps=2, max_steps=1)
    (text,) = [record.message for record in caplog.records if record.name == "trl_qarl.checks.batches"]
    assert "steps_per_generation=6 in place of the default 16: the dataset has 7 prompts" in text
    assert "1 of 7 prompts are left over in each epoch: a generation batch has 6" in text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "trl_qarl"):
        assert trainer_of(tiny_model, tmp_path, make_problems(16), max_steps=1).args.steps_per_generation == 8
    assert not [record for record in caplog.records if record.name == "trl_qarl.checks.batches"]


def test_the_default_rises_again_with_a_larger_dataset(tiny_model, tmp_path):
    args = trainer_of(tiny_model, tmp_path, make_problems(3), max_steps=1).args
    QaRLTrainer(tiny_model, spread, args, make_problems(16))
    assert (args.steps_per_generation, args.generation_batch_size) == (8, 32)


@pytest.mark.parametrize(
    ("num_rows", "options", "message"),
    [
        (
            7,
            {"steps_per_generation": 8},
            "7 prompts, and steps_per_generation=8 .*needs 8 .*Give steps_per_generation=7",
        ),
        (7, {"generation_batch_size": 64}, "steps_per_generation=16 .generation_batch_size=64. needs 16"),
        (1, {"per_device_train_batch_size": 8}, "1 prompt, and the smallest generation batch needs 2 .*Lower `per_d"),
    ],
)
def test_a_dataset_that_fills_no_batch_is_refused(tiny_model, tmp_path, num_rows, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(tiny_model, tmp_path, make_problems(num_rows), max_steps=10, **options)


def test_a_stream_trains_if_it_fills_a_batch(tiny_model, tmp_path):
    trainer = trainer_of(tiny_model, tmp_path, make_problems(8).to_iterable_dataset(), max_steps=9)
    trainer.train()
    assert trainer.state.global_step == 9
    short = trainer_of(tiny_model, tmp_path / "short", make_problems(3).to_iterable_dataset(), max_steps=9)
    with pytest.raises(RuntimeError, match="made no update: no generation batch of 8 prompts was complete"):
        short.train()


def run_command(train_argv, tmp_path, num_rows, **options):
    """Do in this process what `trl-qarl train` does on a file of so many rows."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_problems(num_rows)))
    options = {"dataset_name": str(tmp_path / "rows.jsonl"), **options}
    argv = [*train_argv, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    train.main(*train.make_parser().parse_args_and_config(argv, fail_with_unknown_args=False))


def test_the_command_trains_and_exports_seven_prompts(train_argv, tmp_path, capsys, caplog):
    run_command(train_argv, tmp_path, 7, max_steps=10, save_strategy="no")
    assert "exported to" in capsys.readouterr().out and "steps_per_generation=7 in place of" in caplog.text
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert max(row["step"] for row in rows) == 10


def test_the_command_fails_if_nothing_was_trained(train_argv, tmp_path, capsys):
    with pytest.raises(RuntimeError, match="The training made no update"):
        run_command(train_argv, tmp_path, 3, dataset_streaming="true")
    assert "exported" not in capsys.readouterr().out and not (tmp_path / "run" / "w4a16").exists()
    with pytest.raises(SystemExit, match="2"):
        run_command(train_argv, tmp_path, 3, steps_per_generation=4)
    assert "steps_per_generation=4 (generation_batch_size=16) needs 4" in capsys.readouterr().err
