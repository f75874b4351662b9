"""Names and values of options, before anything is loaded."""

import os
import subprocess
import sys
from argparse import ArgumentParser

import pytest

from trl_qarl.cli import main
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.scripts import bench, options, train, vllm_serve
from trl_qarl.scripts.options import Option, check, check_yaml, options_of, options_of_train, spell


OPTIONS = {"scheme": Option(("w4a16", "fp8")), "group_size": Option(), "schemes": Option(("w4a16", "fp8"), True)}


def test_options_read_from_sources_are_those_of_the_parsers():
    from accelerate.commands.launch import launch_command_parser

    parser = train.make_parser()
    real = options_of(parser, []) | options_of(launch_command_parser(), [])
    names = {name.replace("-", "_") for name in real}
    found = options_of_train()
    assert found.keys() - names <= {*options.OTHERS}
    # `no_` is the second form of a boolean option, which `check` knows without a list.
    assert {name for name in names - found.keys() if not (name.startswith("no_") and name[3:] in found)} == set()
    for name in ("objective", "dtype"):
        assert found[name].choices == options_of(parser, [])[name].choices
    # A mapping is none of the names.
    assert found["scheme"].choices == (*SCHEMES,)
    check(["--scheme", '{"_default": "w4a16"}'], found)
    with pytest.raises(ValueError, match="`--scheme w4a61` is none of .*Did you mean `w4a16`"):
        check(["--scheme", "w4a61"], found)


def test_nothing_is_refused_where_a_source_has_moved(monkeypatch):
    monkeypatch.setitem(options.CLASSES, "trl/no_such_file.py", "GRPOConfig")
    assert options_of_train() is None


@pytest.mark.parametrize("word", ["--group-size", "--group_size", "--group-size=32"])
def test_either_spelling_is_taken(word):
    assert spell(["--scheme", "fp8", word], OPTIONS)[2] == word.replace("-", "_").replace("__", "--")
    check([word, "32"], OPTIONS)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shceme", "fp8"], "Unknown option `--shceme`. Did you mean `--scheme`?"),
        (["--gruop-size=3"], "Unknown option `--gruop-size`. Did you mean `--group_size`?"),
        (["--zzz"], "Unknown option `--zzz`."),
        (["--scheme", "W4A16"], "`--scheme W4A16` is none of w4a16, fp8. Did you mean `w4a16`?"),
        (["--scheme=fp88"], "`--scheme fp88` is none of w4a16, fp8. Did you mean `fp8`?"),
        (["--schemes", "fp8", "fp4"], "`--schemes fp4` is none of w4a16, fp8. Did you mean `fp8`?"),
        (["--zzz", "--scheme", "x"], "Unknown option `--zzz`. `--scheme x` is none of w4a16, fp8."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_name_or_value_is_refused_with_what_was_meant(argv, message):
    with pytest.raises(ValueError) as error:
        check(argv, OPTIONS)
    assert str(error.value) == message


@pytest.mark.parametrize("argv", [["--scheme", "fp8", "folder"], ["--group", "32"], ["--no_group_size"], ["--", "-1"]])
def test_what_argparse_takes_is_let_through(argv):
    check(argv, OPTIONS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shceme: fp8", "Unknown option `shceme`. Did you mean `scheme`?"),
        ("scheme: fp4", "`scheme: fp4` is none of w4a16, fp8. Did you mean `fp8`?"),
        ("- scheme", "holds a list"),
        ("scheme: [", "is not YAML"),
    ],
)
def test_wrong_yaml_is_refused(text, message, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        check_yaml(str(tmp_path / "run.yaml"), OPTIONS)
    assert "run.yaml" in str(error.value) and message in str(error.value)


def test_options_of_a_subcommand_are_its_own():
    parser = bench.make_parser()
    assert "sequence_length" in options_of(parser, ["learner"])
    assert "sequence_length" not in options_of(parser, ["--json", "x", "decode"])
    assert options_of(parser, []) == {}


def test_server_takes_our_options_in_both_spellings_and_leaves_the_rest_to_vllm(monkeypatch):
    calls = []
    monkeypatch.setattr(vllm_serve, "main", lambda args, rest: calls.append((args.group_size, rest)) or 0)
    for spelling in ("--group-size", "--group_size"):
        main(["vllm-serve", "--model", "m", spelling, "32", "--max-model-len", "64", "--no-trust-remote-code"])
    assert calls == [(32, ["--max-model-len", "64", "--no-trust-remote-code"])] * 2
    with pytest.raises(SystemExit, match="2"):
        main(["vllm-serve", "--model", "m", "--sheme", "fp8"])


@pytest.mark.vllm
def test_no_option_of_vllm_is_taken_for_a_slip_of_ours(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setattr(vllm_serve, "main", lambda args, rest: 0)
    names = options_of(make_arg_parser(FlexibleArgumentParser()), [])
    assert len(names) > 100
    ours = {
        name.lstrip("-") for action in vllm_serve.make_parser("vllm-serve")._actions for name in action.option_strings
    }
    theirs = [f"--{name}" for name in names if name.replace("-", "_") not in ours and name not in ours]
    assert len(theirs) > 90
    assert main(["vllm-serve", "--model", "m", *theirs]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--shceme", "fp8"], "Did you mean `--scheme`?"),
        (["train", "--scheme", "W4A16"], "Did you mean `w4a16`?"),
        (["train"], ""),
        (["export", "--outptu-dir", "x"], "Did you mean `--output_dir`?"),
        (["bench", "learner", "--token", "3", "--repeat-s", "2"], "Did you mean `--repeats`?"),
        (["trian"], "Did you mean `train`?"),
    ],
    ids=" ".join,
)
def test_wrong_command_line_ends_at_once_without_torch(argv, message):
    code = f"import sys\nfrom trl_qarl.cli import main\ntry:\n    status = main({argv})\nexcept SystemExit as stop:\n"
    code += "    status = stop.code\nassert not {'torch', 'trl', 'accelerate', 'transformers'} & sys.modules.keys()\n"
    result = subprocess.run([sys.executable, "-c", f"{code}sys.exit(status)"], capture_output=True, text=True)
    assert result.returncode == 2 and message in result.stderr, result.stderr
    assert not message or "trl-qarl: error:" in result.stderr


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


def test_option_with_dashes_is_taken_with_underscores():
    parser = ArgumentParser()
    parser.add_argument("--a-b")
    assert spell(["--a_b", "1"], options_of(parser, [])) == ["--a-b", "1"]
