"""The script for a day on a GPU, with tiny shapes on this machine, and what it would run there."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from testing_utils import start_engines_quickly
from trl_qarl.cli import main
from trl_qarl.scripts import bench


ROOT = Path(__file__).parents[2]
pieces = runpy.run_path(str(ROOT / "benchmarks/gpu.py"))


def run(out, *arguments, **environment):
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu.sh"), *arguments],
        env=os.environ
        | {"PYTHON": sys.executable, "OUT": str(out), "XDG_CACHE_HOME": str(out / "cache"), **environment},
        capture_output=True,
        text=True,
    )


def rows_of(out):
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["gpu_pieces", "dry_pieces"])
def test_every_piece_is_a_command_that_is_understood(name):
    parser = bench.make_parser("trl-qarl bench")
    for piece, (command, *arguments) in pieces[name]().items():
        if command == "bench":
            args = parser.parse_args(arguments)
            assert args.shapes and args.shapes in (
                "tiny" if name == "dry_pieces" else piece.replace("-", "-qwen3-", 1)
            )


def test_the_day_has_every_scheme_of_both_sizes_and_the_dry_run_every_kind():
    kinds = {name.partition("-")[0] for name in pieces["gpu_pieces"]()} - {"tests"}
    assert kinds == {name.partition("-")[0] for name in pieces["dry_pieces"]()}
    for size in ("1.7b", "8b"):
        for scheme in ("w4a16", "w8a8", "fp8"):
            assert sum(f"-{size}-{scheme}" in name for name in pieces["gpu_pieces"]()) == 6


def test_an_unknown_piece_and_a_piece_that_fails_are_named(tmp_path):
    result = run(tmp_path, "no-such-piece")
    assert result.returncode == 2 and "['no-such-piece'] are none of env, tests, " in result.stderr
    (tmp_path / "env.done").touch()
    # Two seconds are not enough for any of them.
    result = run(tmp_path, "env", "decode-1.7b-w4a16", LIMIT="2")
    assert result.returncode == 1 and "env: done" in result.stdout and "not done: decode-1.7b-w4a16" in result.stderr
    assert not (tmp_path / "decode-1.7b-w4a16.done").exists()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(["env", "learner", "decode", "alignment", "rollout"], id="one process"),
        pytest.param(["publish"], id="a server", marks=pytest.mark.xdist_group("warm_servers")),
    ],
)
def test_the_dry_run_measures_every_kind_and_goes_on_where_it_was(tmp_path, monkeypatch, request, kinds):
    envs = pytest.importorskip("vllm.envs")
    names = [name for name in pieces["dry_pieces"]() if name.partition("-")[0] in kinds]
    assert len(names) == len(kinds)
    # What `gpu.sh` runs, in this process, which has imported what the pieces need; the script itself runs below.
    start_engines_quickly(monkeypatch)
    if kinds == ["publish"]:
        request.getfixturevalue("warm_servers").serve(monkeypatch)
    # What it knows of the classes of models: it imports them in another process to find out.
    monkeypatch.setenv("VLLM_CACHE_ROOT", envs.VLLM_CACHE_ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry_run", "--out", str(tmp_path), *names])
    pieces["main"]()
    rows = rows_of(tmp_path)
    assert {row["piece"] for row in rows} == {*names} - {"env"}
    for row in rows:
        assert row["versions"]["torch"] and row["hardware"] and row["command"].startswith("trl-qarl bench ")
    tables = (tmp_path / "tables.md").read_text()
    assert all(f"## {row['piece']}\n" in tables for row in rows)
    result = run(tmp_path, "--dry_run", *names)
    assert result.stdout.split("\n")[:-1] == [f"{name}: done" for name in names]
    assert rows_of(tmp_path) == rows


def test_random_shapes_are_those_of_the_models(tmp_path, monkeypatch):
    from transformers import AutoConfig, AutoTokenizer

    from trl_qarl.bench.engines import make_prompts
    from trl_qarl.bench.shapes import SHAPES, SIZES, has_weights, make_config, write_random_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    linear = {"smollm2-135m": 106, "qwen3-1.7b": 1409, "qwen3-8b": 6946}
    for name in (*linear, *(f"{size}b" for size in SIZES)):
        config = make_config(name)
        heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        weights = config.hidden_size * (heads + 3 * config.intermediate_size) * config.num_hidden_layers
        if name in linear:
            assert round(weights / 1e6) == linear[name]
        else:
            # With the embeddings, which are the output head too.
            size = (weights + config.vocab_size * config.hidden_size) / 1e9
            assert config.tie_word_embeddings and abs(size / float(name.removesuffix("b")) - 1) < 0.02
    folder = write_random_model("tiny", num_layers=1)
    assert AutoConfig.from_pretrained(folder).num_hidden_layers == 1 and not has_weights(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == SHAPES["tiny"]["vocab_size"] and tokenizer.decode([300, 301]) == "<300><301>"
    assert max(map(max, make_prompts(folder, 4))) < 256


def test_bench_takes_random_shapes(tmp_path, capsys):
    file = tmp_path / "rows.json"
    argv = ["--shapes", "tiny", "--num_layers", "1", "--tokens", "8", "--repeats", "1", "--schemes", "w4a16"]
    assert main(["bench", "learner", *argv, "--json", str(file)]) == 0
    assert "a random qwen3 (1 layers, hidden size 128, vocabulary 512" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["rows"]) == 2
