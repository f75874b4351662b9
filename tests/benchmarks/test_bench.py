"""The developers' scripts in `benchmarks/` run, and their tables are those of the code."""

import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from bench.command import make_parser, run
from testing_utils import start_engines_quickly
from trl_qarl.quantization import schemes
from trl_qarl.quantization.tensors import LowBitTensor
from trl_qarl.study.grid import build_command, cell_name, expand_grid, load_grid


ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
pieces = runpy.run_path(str(BENCHMARKS / "gpu.py"))


@pytest.mark.parametrize(
    "command",
    [
        "learner --tokens 8",
        "decode --tokens 8",
        "numerics --rollout transformers --new_tokens 4 --sequence_length 100",
    ],
)
def test_bench_writes_rows_for_each_scheme(command, tiny_model, tmp_path):
    mode, *options = command.split()
    path = tmp_path / "bench.json"
    options += ["--model_name_or_path", tiny_model, "--repeats", "1", "--schemes", "w4a16", "--json", str(path)]
    if mode == "numerics" and (reason := pytest.importorskip("trl_qarl.numerics.cpu").reason_against()):
        pytest.skip(reason)
    run(make_parser().parse_args([mode, *options]))
    result = json.loads(path.read_text())
    assert result["machine"] and result["rows"]
    assert mode == "numerics" or [row["scheme"] for row in result["rows"]] == [None, "w4a16"]


def test_a_wrong_option_of_bench_is_named_in_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        run(make_parser().parse_args(["learner", "--group_size", "48"]))
    assert capsys.readouterr().err.startswith("trl-qarl: error: ")


def test_every_piece_of_the_gpu_day_is_understood_and_names_tests_that_exist():
    parser = make_parser()
    for command, *arguments in (*pieces["gpu_pieces"]().values(), *pieces["dry_pieces"]().values()):
        if command == "bench":
            parser.parse_args(arguments)
        for argument in arguments:
            path, _, name = argument.partition("::")
            if path.startswith("tests/"):
                assert f"def {name}" in (ROOT / path).read_text() and "mark.gpu" in (ROOT / path).read_text()


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_gpu_day_runs_dry_and_goes_on_where_it_was(tmp_path, monkeypatch):
    envs = pytest.importorskip("vllm.envs")
    kinds = ("env", "learner", "decode", "alignment", "rollout")
    names = [name for name in pieces["dry_pieces"]() if name.partition("-")[0] in kinds]
    start_engines_quickly(monkeypatch)
    # vLLM keeps there what it knows of the classes of models.
    monkeypatch.setenv("VLLM_CACHE_ROOT", envs.VLLM_CACHE_ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry_run", "--out", str(work), *names])
    pieces["main"]()
    rows = [json.loads(line) for line in (work / "rows.jsonl").read_text().splitlines()]
    assert {row["piece"] for row in rows} == {*names} - {"env"}
    subprocess.run(["tar", "-czf", out / "results.tar.gz", "-C", work, "."], check=True)
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(out)}
    command = ["bash", str(BENCHMARKS / "gpu.sh"), "--dry_run", *names]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout.split("\n")[:-1] == [f"{name}: done" for name in names]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_contenders_against_trl_take_turns_on_the_same_tokens(tmp_path):
    main = runpy.run_path(str(BENCHMARKS / "versus_trl.py"))["main"]
    sizes = ["--sequences", "4", "--prompts", "2", "--new_tokens", "6", "--batches", "2"]
    files = ["--output", str(tmp_path / "rows.json"), "--picture", str(tmp_path / "rows.png")]
    rows = main(["--contenders", "TRL", "w8a8", "--shapes", "tiny", "--without_vllm", *sizes, *files])
    assert [row["name"] for row in rows] == ["TRL", "w8a8"]
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make"), [("grids", "table"), ("choose", "choices")])
def test_the_table_of_schemes_is_what_the_command_writes(name, make):
    grids = runpy.run_path(str(BENCHMARKS / "grids.py"))
    page = grids["PAGE"].read_text()
    assert grids["fill"](page, name, grids[make]()) == page, f"run `python benchmarks/grids.py {name}`"


@pytest.fixture
def put_back(monkeypatch):
    """Put back what `decoding.py` replaces."""
    monkeypatch.setattr(DynamicLayer, "update", DynamicLayer.update)
    monkeypatch.setattr(LowBitTensor, "dequantize", LowBitTensor.dequantize)
    yield
    AttentionInterface.register("sdpa", sdpa_attention_forward)


def test_a_cell_of_the_long_study_runs(put_back, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "study")
    chain_sums, long_study = map(importlib.import_module, ("chain_sums", "long_study"))
    chain_sums.make_model().save_pretrained(tmp_path)
    chain_sums.make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(chain_sums, "num_new_tokens", lambda steps: 12)
    monkeypatch.setattr(schemes, "SCHEMES", dict(schemes.SCHEMES))
    options = "--max_steps 2 --num_scored 4 --num_prompts 2 --error_share 1 --objective tbpo --quantize_learner false"
    folders = ["--model", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["long_study.py", *options.split(), "--float32", "--places", *folders])
    long_study.main()
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert set(scores) == {"greedy", "sampled", "unquantized greedy"}


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "study").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_grid_of_the_study_gives_commands(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_grid(path)
    cells = expand_grid(config)
    assert cells and all(build_command(config, cell, Path("outputs") / cell_name(cell)) for cell in cells)
