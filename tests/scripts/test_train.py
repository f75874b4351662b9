"""`trl-qarl train`: the script that a launcher starts, from its options to the policy that it writes."""

import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from trl import GRPOConfig
from trl.rewards import accuracy_reward

from testing_utils import refused
from testing_utils.trainings import assert_equal
from trl_qarl import QaRLConfig
from trl_qarl.checkpoint import marker
from trl_qarl.checkpoint.export import is_export
from trl_qarl.checkpoint.files import OUTPUT_LOCK, hold
from trl_qarl.checks.problems import raise_problems
from trl_qarl.cli import main
from trl_qarl.options import own_options
from trl_qarl.scripts import train


def run_training(argv):
    """Run the training script in this process, as `accelerate launch` runs it in another."""
    train.main(*train.make_parser().parse_args_and_config(argv, fail_with_unknown_args=False))


def test_train_help_lists_the_main_options_and_ours(capsys):
    assert main(["train", "--help"]) == 0
    output = capsys.readouterr().out
    shown = {word[2:] for word in re.findall(r"^  (--\w+)", output, re.MULTILINE)}
    assert shown == {*train.MAIN_OPTIONS, *own_options(QaRLConfig, GRPOConfig), "no_quantize_learner"}
    assert {"scheme", "loss_type", "vllm_token_file"} <= shown


@pytest.mark.parametrize("option", ["--help-all", "--help_all"])
def test_train_help_all_lists_options_of_trl_and_transformers(option, capsys):
    assert main(["train", option]) == 0
    output = capsys.readouterr().out
    assert all(option in output for option in ("--scheme", "--num_generations", "--learning_rate", "--dataset_name"))


def test_error_of_a_reward_function_keeps_its_traceback(train_argv, tmp_path, monkeypatch):
    (tmp_path / "failing_rewards.py").write_text("def fail(**kwargs): raise ValueError('a bug in the reward')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match="a bug in the reward"):
        run_training([*train_argv, "--reward_funcs", "failing_rewards.fail"])


def test_reward_functions_are_looked_up_as_in_trl(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_a_user.py").write_text("def constant(completions): return [1.0] * len(completions)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = [*train.REWARDS, "rewards_of_a_user.constant"]
    model, accuracy, _, _, punishment, constant = train.get_reward_funcs(names, "a/reward-model")
    assert model == "a/reward-model"
    assert accuracy is accuracy_reward
    assert punishment.__name__ == "soft_overlong_punishment_reward"
    assert constant(["", ""]) == [1.0, 1.0]
    with pytest.raises(ValueError, match="'no_such_reward'"):
        train.get_reward_funcs(["testing_utils.no_such_reward"])


def test_a_plan_survives_command_checkpoint_and_export(train_argv, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "low_bit"
    mapping = {"re:.*mlp.*": {"scheme": "w4a16", "group_size": 32}, "re:.*self_attn.*": "w8a8"}
    kept = "re:model[.]layers[.]0[.].*"
    options = ["--scheme", json.dumps(mapping), "--exclude_modules", kept]
    run_training([*train_argv, *options])
    record = json.loads((run / "qarl.json").read_text())
    assert (record["scheme"], record["group_size"], record["exclude_modules"]) == (mapping, None, [kept])
    described = json.loads((run / "run.json").read_text())
    assert (described["scheme"], described["layers"]) == ("w4a16-w8a8", mapping)
    assert described["options"]["exclude_modules"] == [kept]
    card = (run / "w4a16-w8a8" / "README.md").read_text()
    assert "| `scheme` | w4a16-w8a8 |" in card and "datasets:" not in card and str(tmp_path) not in card
    exported = {path.name: load_file(path) for path in (run / "w4a16-w8a8").glob("*.safetensors")}

    run_training([*train_argv, *options, "--max_steps", "3", "--resume_from_checkpoint", str(run / "checkpoint-2")])
    other = ["--scheme", json.dumps(mapping | {"re:.*self_attn.*": "w4a16"}), "--resume_from_checkpoint", "true"]
    with pytest.raises((SystemExit, ValueError)):
        run_training([*train_argv, *other, "--exclude_modules", kept, "--max_steps", "4"])

    capsys.readouterr()
    command = ["export", "--model_name_or_path", str(run / "checkpoint-2"), "--output_dir", str(out)]
    said = refused(capsys, *command, "--exclude_modules", "o_proj")
    assert f"--exclude_modules=['o_proj'] contradicts the ['{kept}'] with which" in said
    # The same plan in other words contradicts nothing.
    assert main([*command, *options]) == 0
    assert "7 linear layers quantized (4 w8a8 per output channel, 3 w4a16 group 32)" in capsys.readouterr().out
    for name, tensors in exported.items():
        assert_equal(load_file(out / name), tensors)


def test_training_ends_with_an_export(train_argv, tmp_path, capsys):
    run_training([*train_argv, "--max_steps", "1", "--bf16", "true"])
    output, folder = capsys.readouterr().out, tmp_path / "run" / "w4a16"
    assert is_export(folder) and (folder / "tokenizer.json").is_file()
    said = rf"Policy \(w4a16\) exported to {folder} \(\d\.\d MiB\). To serve it: vllm serve {folder}\n"
    assert re.search(said, output)

    argv = [*train_argv, "--max_steps", "1", "--export_dir", str(tmp_path / "policy")]
    run_training([*argv, "--scheme", "bf16", "--bf16", "false"])
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == "float32"
    assert not (tmp_path / "run" / "bf16").exists()

    capsys.readouterr()
    run_training([*argv, "--scheme", "w8a8", "--export_dir", "none"])
    assert not (tmp_path / "run" / "w8a8").exists() and "exported" not in capsys.readouterr().out


def test_adapter_training_ends_with_base_and_adapter(train_argv, tmp_path, capsys):
    pytest.importorskip("peft")
    lora = ["--use_peft", "--lora_r", "20", "--lora_alpha", "40", "--lora_target_modules", "all-linear"]
    run_training([*train_argv, "--max_steps", "1", "--learning_rate", "1e-3", *lora])
    output, run = capsys.readouterr().out, tmp_path / "run"
    folder = run / "w4a16"
    assert "frozen: " in output and f"Adapter saved to {run}.\n" in output
    command = f"vllm serve {folder} --enable-lora --max-lora-rank 32 --lora-modules adapter={folder}/adapter\n"
    assert f"Policy (w4a16) exported to {folder}" in output and command in output.replace(" --dtype float32", "")
    saved, exported = (load_file(f / "adapter_model.safetensors") for f in (run, folder / "adapter"))
    assert saved.keys() == exported.keys() and len(saved) == 2 * 2 * 7
    assert all(saved[name].equal(tensor) and tensor.any() for name, tensor in exported.items())
    assert not (run / "model.safetensors").exists() and (folder / "model.safetensors").is_file()


def test_a_push_without_an_export_is_refused(train_argv, hub, capsys):
    options = ["--push_to_hub", "true", "--hub_model_id", "policy", "--export_dir", "none"]
    with pytest.raises(SystemExit, match="2"):
        run_training([*train_argv, *options])
    assert "--export_dir=none with --push_to_hub: " in capsys.readouterr().err


def load(name):
    options = Namespace(dataset_name=str(name), dataset_config=None, dataset_streaming=False)
    return train._load_dataset(options, Namespace(datasets=None))


@pytest.mark.parametrize("name", ["rows.parquet", "rows[1].jsonl", "rows.csv", "split", "splits"])
def test_a_dataset_may_be_a_file_or_saved(tmp_path, name):
    rows = Dataset.from_dict({"prompt": ["1 +", "2 +"]})
    writers = {".parquet": rows.to_parquet, ".jsonl": rows.to_json, ".csv": rows.to_csv}
    saved = DatasetDict({"train": rows}) if name == "splits" else rows
    writers.get(Path(name).suffix, saved.save_to_disk)(tmp_path / name)
    assert load(tmp_path / name)["train"]["prompt"] == rows["prompt"]


def test_a_folder_with_the_name_of_a_builder_is_read(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "rows.jsonl").write_text('{"prompt": "1 + 1 ="}\n')
    monkeypatch.chdir(tmp_path)
    assert load("text")["train"][:] == {"prompt": ["1 + 1 ="]}


def test_an_unresumable_checkpoint_is_one_line(train_argv, capsys):
    run_training([*train_argv, "--max_steps", "1"])
    for options, message in (
        (["--scheme", "fp8", "--resume_from_checkpoint", "last"], "other settings .scheme='w4a16' there, 'fp8' here"),
        (["--resume_from_checkpoint", "nowhere"], "resume_from_checkpoint='nowhere' is not a folder"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit, match="2"):
            run_training([*train_argv, *options])
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trl-qarl: error:")]
        assert re.search(message, line)


def test_a_folder_in_use_is_one_line(train_argv, tmp_path, capsys):
    with hold(tmp_path / "run" / OUTPUT_LOCK), pytest.raises(SystemExit, match="2"):
        run_training([*train_argv, "--export_dir", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and said.count("\n- ") == 2, said
    assert f"- output_dir='{tmp_path}/run' belongs to process {os.getpid()} on " in said


def test_rewards_are_found_beside_the_command_and_in_a_yaml(tmp_path, monkeypatch):
    (tmp_path / "rewards_beside.py").touch()
    with pytest.raises(ValueError, match="'rewards_beside'"):
        raise_problems(train._problems_of_rewards("rewards_beside.mine", None))
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(tmp_path))
    assert [*train._problems_of_rewards("rewards_beside.mine", None)] == []
    monkeypatch.delitem(os.environ, "PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    assert [*train._problems_of_rewards("rewards_beside.mine", None)] == []


@pytest.mark.parametrize(
    ("option", "content", "said"),
    [
        ("--config_file", "a: [", "cannot be read: while parsing"),
        ("--accelerate_config", "!!python/object:os.system {}", "cannot be read: could not determine a constructor"),
        ("--accelerate_config", "", "holds no options"),
    ],
)
def test_a_launch_file_that_cannot_be_read_is_one_line(train_argv, tmp_path, capsys, option, content, said):
    path = tmp_path / "launch.yaml"
    path.write_text(content)
    error = refused(capsys, "train", *train_argv, option, str(path))
    (line,) = [line for line in error.splitlines() if line.startswith("trl-qarl: error:")]
    assert f"{path} {said}" in line


def test_an_interrupted_run_says_how_it_goes_on(tmp_path):
    assert train.how_to_resume(str(tmp_path)) == f"{tmp_path} has no complete checkpoint: the next start begins anew."
    for step in (9, 10, 11):
        marker.begin(tmp_path / f"checkpoint-{step}")
        if step < 11:
            marker.complete(tmp_path / f"checkpoint-{step}")
    said = f"{tmp_path}/checkpoint-10 is complete: go on from it with `--resume_from_checkpoint true`."
    assert train.how_to_resume(str(tmp_path)) == said
