import json
import os
import signal
import subprocess
import sys

import pytest
import yaml
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from testing_utils import refused
from trl_qarl import __version__
from trl_qarl.cli import COMMANDS, build_launch_args, main
from trl_qarl.scripts import train, vllm_serve


@pytest.fixture
def launched(monkeypatch):
    """Parsed arguments of every `accelerate launch`, which does not run."""
    calls = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", calls.append)
    return calls


def test_help_loads_no_heavy_package():
    code = """
import contextlib, io, json, sys
from trl_qarl.cli import main
for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            status = main(argv)
        except SystemExit as stop:
            status = stop.code or 0
    loaded = sorted({"torch", "transformers", "trl", "datasets", "accelerate", "vllm", "numpy"} & sys.modules.keys())
    print(json.dumps([status, output.getvalue(), loaded]))
"""
    argvs = [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS if name != "train")]
    command = [sys.executable, "-c", code, json.dumps(argvs)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    for argv, (status, output, loaded) in zip(argvs, map(json.loads, result.stdout.splitlines()), strict=True):
        assert (status, loaded) == (0, []), argv
        assert output.startswith(f"trl-qarl {__version__}" if argv == ["--version"] else "usage: trl-qarl"), argv


def test_train_without_options_says_how_it_is_used(launched, capsys):
    assert main(["train"]) == 2 and "usage: trl-qarl train" in capsys.readouterr().err and launched == []


def test_server_options_are_taken_in_both_spellings(monkeypatch):
    calls = []
    monkeypatch.setattr(vllm_serve, "main", lambda args, rest: calls.append((args.group_size, rest)) or 0)
    for spelling in ("--group-size", "--group_size"):
        main(["vllm-serve", "--model", "m", spelling, "32", "--max-model-len", "64", "--no-trust-remote-code"])
    assert calls == [(32, ["--max-model-len", "64", "--no-trust-remote-code"])] * 2


def test_paths_begin_with_the_home_directory(monkeypatch):
    """A shell leaves `~` as it is after `=`."""
    monkeypatch.setenv("HOME", "/home/user")
    calls = []
    monkeypatch.setattr(vllm_serve, "main", lambda args, rest: calls.append((args.model, args.token_file, rest)) or 0)
    main(["vllm-serve", "--model=~/m", "--token_file", "~/token", "--chat-template=~/t"])
    assert calls == [("/home/user/m", "/home/user/token", ["--chat-template=/home/user/t"])]


def test_reader_that_has_gone_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Unbuffered, argparse itself would ignore the error.
    environment.pop("PYTHONUNBUFFERED", None)
    command = [sys.executable, "-m", "trl_qarl.cli"]
    result = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_launch_in_other_precision_is_refused_before_it_starts(launched, train_argv, tmp_path, capsys):
    file = tmp_path / "launch.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "NO", "mixed_precision": "bf16", "use_cpu": True}))
    command = ["train", *train_argv, "--accelerate_config", str(file)]
    assert "with `mixed_precision: bf16`" in refused(capsys, *command, "--bf16", "false") and launched == []
    assert main([*command, "--bf16", "true"]) == 0
    assert main([*command, "--bf16", "false", "--mixed_precision", "no"]) == 0
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_options_reach_the_script_and_accelerate(launched, tmp_path, train_argv):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"scheme": "w8a8", "exclude_modules": ["o_proj"], "num_processes": 3}))
    kebab = [word.replace("_", "-") if word.startswith("--") else word for word in train_argv]
    own = ["--num-machines", "1", f"--config={config}", "--export-dir=none", "--scheme", "fp8"]
    assert main(["train", *kebab, *own]) == 0
    (args,) = launched
    assert (args.num_processes, args.num_machines) == (3, 1)
    parse, argv = train.make_parser().parse_args_and_config, args.training_script_args
    script_args, training_args, _, _ = parse(argv, fail_with_unknown_args=False)
    assert (script_args.export_dir, training_args.max_completion_length) == ("none", 4)
    # The command line comes before the file.
    assert (training_args.scheme, training_args.exclude_modules) == ("fp8", ["o_proj"])


@pytest.mark.parametrize(
    ("launch_args", "num_cpus", "added"),
    [([], 4, ["--num_cpu_threads_per_process", "4"]), ([], None, []), (["--num_processes", "2"], 4, [])],
)
def test_one_process_on_a_cpu_gets_all_threads(launch_args, num_cpus, added):
    launch = [*added, *launch_args, "--module", "trl_qarl.scripts.train"]
    assert build_launch_args(["--scheme", "fp8"], launch_args, num_cpus) == [*launch, "--scheme", "fp8"]


def test_accelerate_config_names_a_file_of_trl():
    option, path, *_ = build_launch_args([], ["--accelerate_config", "zero2"], None)
    assert option == "--config_file"
    assert path.endswith("zero2.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shceme: fp8", "shceme='fp8': unknown option. Did you mean `scheme`?"),
        ("- scheme", "must contain a YAML mapping"),
        ("scheme: [", 'in "run.yaml"'),
        ("config: other.yaml", "config='other.yaml': one YAML file does not read another"),
        ("accelerator_config: 3", "accelerator_config=3 is of type int. Give a dictionary"),
        ("seed: 1\nseed: 2", "--config='run.yaml' has ['seed'] more than once"),
        ("group-size: 32\ngroup_size: 64", "has ['group_size'] more than once"),
        ("scheme:\n  down_proj: w8a16\n  down_proj: w4a16", "has ['down_proj'] more than once"),
        ("scheme: w4a16 # \ud800", "--config='run.yaml' cannot be read: 'utf-8' codec"),
    ],
)
def test_wrong_yaml_is_refused_before_anything_is_launched(
    launched, train_argv, tmp_path, monkeypatch, capsys, text, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_bytes(text.encode(errors="surrogatepass"))
    error = refused(capsys, "train", *train_argv, "--config", "run.yaml")
    assert "trl-qarl: error: " in error and message in error and launched == []


def test_processes_that_accelerate_would_not_start_are_named(monkeypatch, train_argv, capsys):
    from accelerate.commands import launch

    monkeypatch.setattr(launch, "simple_launcher", launch.simple_launcher)
    said = refused(capsys, "train", *train_argv, "--cpu", "--num_processes", "2", "--ddp_backend", "gloo")
    assert "num_processes=2, and accelerate would start one without several GPUs. Add `--multi_gpu`" in said


def test_the_command_becomes_the_one_process_of_a_launch(monkeypatch, train_argv, tmp_path):
    """In place of accelerate's `simple_launcher`, which waits for it."""
    from accelerate.commands import launch

    (tmp_path / "run.yaml").write_text("env: {OMP_PROC_BIND: close}")
    trained, began = [], []
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(train, "run", lambda argv: trained.append((argv, os.environ["ACCELERATE_MIXED_PRECISION"])))
    monkeypatch.setattr("trl_qarl.cli.become", lambda argv, environment: began.append((argv, environment)))
    monkeypatch.setattr(launch, "simple_launcher", launch.simple_launcher)
    assert main(["train", *train_argv]) == 0
    assert (trained, began) == ([(train_argv, "no")], [])
    # torch has read that when it was imported.
    words = [*train_argv, "--config", str(tmp_path / "run.yaml")]
    main(["train", *words])
    ((argv, environment),) = began
    assert argv == [sys.executable, "-m", "trl_qarl.scripts.train", *words]
    assert environment["OMP_PROC_BIND"] == "close"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SignalException("ended", signal.SIGTERM), 143),
        (SignalException("ended", signal.SIGINT), 130),
        (subprocess.CalledProcessError(3, "python"), 3),
        (ChildFailedError("train", {1: ProcessFailure(1, 7, 3, "<N/A>")}), 3),
        (ChildFailedError("train", {1: ProcessFailure(1, 7, -9, "<N/A>")}), 137),
    ],
)
def test_a_launchers_signal_or_code_is_the_exit_code(monkeypatch, train_argv, error, code):
    def end(args):
        raise error

    monkeypatch.setattr("accelerate.commands.launch.launch_command", end)
    assert main(["train", *train_argv]) == code


@pytest.mark.parametrize("module", ["make_parser", "read_options"])
def test_ctrl_c_while_options_are_read_is_no_traceback(monkeypatch, train_argv, capsys, module):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, module, interrupt)
    try:
        code = main(["train", *train_argv])
    except (SystemExit, KeyboardInterrupt) as end:
        code = getattr(end, "code", None)
    assert code == 130 and "Traceback" not in capsys.readouterr().err


def test_the_command_needs_no_accelerator(launched, train_argv, monkeypatch, caplog):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    index = train_argv.index("--use_cpu")
    assert main(["train", *train_argv[:index], *train_argv[index + 2 :]]) == 0 and len(launched) == 1
    assert not [record for record in caplog.records if record.name.startswith("trl_qarl")]
