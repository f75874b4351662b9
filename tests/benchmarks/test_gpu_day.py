"""The script for a day on a GPU, with tiny shapes on this machine, and what it would run there."""

import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.command import make_parser
from bench.engines import START_SECONDS
from testing_utils import start_engines_quickly


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


def pack(folder, out):
    """What an interrupted day has left."""
    with tarfile.open(out / "results.tar.gz", "w:gz") as archive:
        archive.add(folder, arcname=".")


def unpack(out, folder):
    with tarfile.open(out / "results.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("name", ["gpu_pieces", "dry_pieces"])
def test_every_piece_is_a_command_that_is_understood(name):
    parser = make_parser()
    for piece, (command, *arguments) in pieces[name]().items():
        assert command in ("bench", "env", "pytest")
        if command == "bench":
            args = parser.parse_args(arguments)
            assert args.shapes and args.shapes in (
                "tiny" if name == "dry_pieces" else piece.replace("-", "-qwen3-", 1)
            )


def test_the_day_has_every_scheme_of_both_sizes_and_the_dry_run_every_kind():
    kinds = {name.partition("-")[0] for name in pieces["gpu_pieces"]()} - {"tests"}
    assert len({*pieces["gpu_pieces"]()}) == 1 + 3 + 21 + 36
    assert kinds == {name.partition("-")[0] for name in pieces["dry_pieces"]()}
    for size in ("1.7b", "8b"):
        for scheme in ("w4a16", "w8a8", "fp8"):
            assert sum(f"-{size}-{scheme}" in name for name in pieces["gpu_pieces"]()) == 6


@pytest.mark.nightly
def test_every_test_for_a_gpu_is_in_one_piece_and_products_come_first():
    files = [
        path for path in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text() and path != Path(__file__)
    ]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-n", "0", *map(str, files)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    tests = re.findall(r"^tests/\S+::\S+$", found, re.MULTILINE)
    assert len(tests) > 100
    argvs = {name: argv for name, argv in pieces["gpu_pieces"]().items() if argv[0] == "pytest"}
    chosen = {name: [] for name in argvs}
    for test in tests:
        needs_vllm = "test_gpu.py" not in test or "colocated" in test
        for name, argv in argvs.items():
            place = next(argument for argument in argv if argument.startswith("tests/"))
            word = argv[argv.index("-k") + 1] if "-k" in argv else ""
            is_named = word.removeprefix("not ") in test
            if test.startswith(place) and is_named != word.startswith("not ") and not (needs_vllm and "-m" in argv):
                chosen[name].append(test)
    assert sorted(test for group in chosen.values() for test in group) == sorted(tests)
    assert all(chosen.values()), [name for name, group in chosen.items() if not group]
    assert [*pieces["gpu_pieces"]()][:3] == ["env", "tests-products", "tests-grouped"]
    # One engine or two in a process.
    assert max(len(group) for name, group in chosen.items() if name not in ("tests-products", "tests-grouped")) <= 2


def test_a_server_has_less_time_to_start_than_a_piece_has():
    limit = int(re.search(r"LIMIT:-(\d+)", (ROOT / "benchmarks/gpu.sh").read_text())[1])
    assert START_SECONDS < limit < 600


def test_an_unknown_piece_and_a_piece_that_fails_are_named(tmp_path):
    result = run(tmp_path, "no-such-piece")
    assert result.returncode == 2 and "['no-such-piece'] are none of env, tests-products, " in result.stderr
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "env.done").touch()
    pack(tmp_path / "done", tmp_path)
    # Two seconds are not enough for any of them.
    result = run(tmp_path, "env", "decode-1.7b-w4a16", LIMIT="2")
    assert result.returncode == 1 and "env: done" in result.stdout and "not done: decode-1.7b-w4a16" in result.stderr
    left = unpack(tmp_path, tmp_path / "left")
    assert {path.name for path in left.iterdir()} == {"env.done", "decode-1.7b-w4a16.log"}


@pytest.mark.nightly
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
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry_run", "--out", str(work), *names])
    pieces["main"]()
    rows = rows_of(work)
    assert {row["piece"] for row in rows} == {*names} - {"env"}
    for row in rows:
        assert (
            row["versions"]["torch"] and row["hardware"] and row["command"].startswith("python -m benchmarks.bench ")
        )
    tables = (work / "tables.md").read_text()
    assert all(f"## {row['piece']}\n" in tables for row in rows)
    pack(work, out)
    result = run(out, "--dry_run", *names)
    assert result.stdout.split("\n")[:-1] == [f"{name}: done" for name in names]
    # A borrowed machine gives back few files.
    assert {path.name for path in out.iterdir()} == {"results.tar.gz", "tables.md"}
    assert (out / "tables.md").read_text() == tables and rows_of(unpack(out, tmp_path / "again")) == rows


def test_random_shapes_are_those_of_the_models(tmp_path, monkeypatch):
    from transformers import AutoConfig, AutoTokenizer

    from bench.engines import make_prompts
    from bench.shapes import SHAPES, SIZES, has_weights, make_config, write_random_model

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
