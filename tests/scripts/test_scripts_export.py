"""`trl-qarl export`: what it writes, and which options it takes beside the record of a run."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from testing_utils import make_own_code, refused
from testing_utils.trainings import RECORD, SIGNED
from trl_qarl.cli import main
from trl_qarl.scripts import export


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_one_set_of_masters_is_exported_at_several_bits(bits, tiny_model, tmp_path):
    argv = ["export", "--model_name_or_path", tiny_model, "--dtype", "float32"]
    assert main([*argv, "--output_dir", str(tmp_path / "a"), "--scheme", SIGNED[4], "--bits", str(bits)]) == 0
    assert main([*argv, "--output_dir", str(tmp_path / "b"), "--scheme", SIGNED[bits]]) == 0
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_an_export_is_not_exported_again(tiny_model, tmp_path, capsys):
    four = str(tmp_path / "four")
    main(["export", "--model_name_or_path", tiny_model, "--output_dir", four, "--scheme", SIGNED[4]])
    argv = ["--model_name_or_path", four, "--output_dir", str(tmp_path / "other"), "--bits", "3"]
    assert "is a low-bit checkpoint already" in refused(capsys, "export", *argv)


def test_code_next_to_the_weights_is_served_with_them(tmp_path, capsys):
    """By the command that is printed, as by that of the card."""
    out = tmp_path / "out"
    argv = ["--model_name_or_path", make_own_code(tmp_path), "--trust_remote_code", "--scheme", "w4a16"]
    assert main(["export", *argv, "--output_dir", str(out)]) == 0
    assert f"To serve it: vllm serve {out} --trust-remote-code\n" in capsys.readouterr().out
    assert "\nvllm serve out --trust-remote-code\n" in (out / "README.md").read_text()


def test_folders_are_judged_before_masters_are_read(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export, "_policy_of_masters", lambda *_: pytest.fail("read"))
    argv = ["--model_name_or_path", tiny_model, "--scheme", "w4a16", "--output_dir"]
    assert "holds other weights" in refused(capsys, "export", *argv, tiny_model)
    (tmp_path / "file").touch()
    assert "file is a file. Name another one." in refused(capsys, "export", *argv, str(tmp_path / "file"))
    assert "'' is no folder" in refused(capsys, "export", *argv, "")


def test_half_a_last_line_keeps_the_results_of_a_card(tiny_model, tmp_path):
    masters = shutil.copytree(tiny_model, tmp_path / "masters")
    rows = [json.dumps({"step": step, "reward": step / 8}) for step in range(1, 5)]
    (masters / "metrics.jsonl").write_text("\n".join(["[1]", *rows, '{"step": 5, "rew']))
    argv = ["--model_name_or_path", str(masters), "--output_dir", str(tmp_path / "out"), "--scheme", "w4a16"]
    assert main(["export", *argv]) == 0
    assert "| `reward`, mean of the last 4 logged | 0.3125 |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("scheme", "says"),
    [("w8a16", "this package's kernels: VLLM_CPU_INT4_W4A8=0 python -m vllm.entrypoints"), ("w4a8", "something else")],
)
def test_vllm_cpu_is_named_where_it_computes_the_policy(scheme, says, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trl_qarl.scripts.command_line.installed", lambda name: name == "vllm-cpu")
    main(["export", "--model_name_or_path", tiny_model, "--output_dir", str(tmp_path / "out"), "--scheme", scheme])
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert "The vllm-cpu of this machine" in last or "With the vllm-cpu of this machine" in last
    assert says in last


def merge(options, record):
    argv = ["--model_name_or_path", "run", "--output_dir", "out", *options.split()]
    return export.merge_with_record(export.make_parser("export").parse_args(argv), record, "run")


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ("", {}),
        ("--scheme w4a16", {}),
        ("--group_size 128 --dtype bfloat16", {}),
        (r"--exclude_modules .*\.0\..*", {"exclude_modules": r".*\.0\..*"}),
    ],
)
def test_export_follows_the_record_of_the_run(options, recorded):
    assert merge(options, RECORD | recorded) == RECORD | recorded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--scheme w8a8", "scheme='w8a8'"),
        ("--group_size 32", "group_size=32"),
        ("--exclude_modules o_proj", r"exclude_modules=\['o_proj'\]"),
        ("--dtype float32", "dtype='float32'"),
    ],
)
def test_export_refuses_options_that_contradict_the_record(options, message):
    with pytest.raises(ValueError, match=message):
        merge(options, RECORD)


def test_export_without_record_needs_a_scheme():
    with pytest.raises(ValueError, match="Give `--scheme`"):
        merge("", None)
    settings = {"scheme": "fp8", "group_size": None, "exclude_modules": None, "scale_dtype": "bfloat16"}
    assert merge("--scheme fp8", None) == settings
