"""The developers' scripts in `benchmarks/` run, and their tables are those of the code."""

import importlib
import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer

from bench.command import make_parser, run


ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


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
    if mode == "numerics" and (reason := pytest.importorskip("trl_qarl.bitwise.cpu").reason_against()):
        pytest.skip(reason)
    run(make_parser().parse_args([mode, *options]))
    result = json.loads(path.read_text())
    assert result["machine"] and result["rows"]
    assert mode == "numerics" or [row["scheme"] for row in result["rows"]] == [None, "w4a16"]


def test_a_wrong_option_of_bench_is_named_in_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        run(make_parser().parse_args(["learner", "--tokens", "0"]))
    assert capsys.readouterr().err == "trl-qarl: error: `--tokens` must be at least 1.\n"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_contenders_against_trl_take_turns_on_the_same_tokens(tmp_path):
    main = runpy.run_path(str(BENCHMARKS / "versus_trl.py"))["main"]
    sizes = ["--sequences", "4", "--prompts", "2", "--new_tokens", "6", "--batches", "2"]
    sizes += ["--prompt_tokens", "30", "--spread"]
    files = ["--output", str(tmp_path / "rows.json"), "--picture", str(tmp_path / "rows.png")]
    rows = main(["--contenders", "TRL", "w8a8", "--shapes", "tiny", "--without_vllm", *sizes, *files])
    assert [row["name"] for row in rows] == ["TRL", "w8a8"]
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows


@pytest.fixture
def put_back(monkeypatch):
    """Put back what `decoding.py` replaces."""
    for name in ("update", "batch_select_indices"):
        monkeypatch.setattr(DynamicLayer, name, getattr(DynamicLayer, name))
    attention = AttentionInterface()["sdpa"]
    yield
    AttentionInterface.register("sdpa", attention)


@pytest.fixture
def study(put_back, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "study")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in ("chain_sums", "long_study", "cells")})


@pytest.mark.parametrize(("objective", "optimizer"), [("tbpo", "muon"), ("gspo", "adamw")])
def test_a_cell_of_the_study_runs(study, tmp_path, monkeypatch, objective, optimizer):
    study.chain_sums.make_model().save_pretrained(tmp_path)
    study.chain_sums.make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(study.chain_sums, "num_new_tokens", lambda steps: 12)
    options = (
        f"--max_steps 2 --num_scored 4 --num_prompts 2 --quantize_learner false --float32 --objective {objective}"
    )
    folders = ["--model", str(tmp_path), "--output_dir", str(tmp_path / "out"), "--optimizer", optimizer]
    study.long_study.train(study.long_study.make_parser().parse_args([*options.split(), *folders]))
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert set(scores) == {"greedy", "sampled", "unquantized greedy"}
    assert len(study.cells.read_course(tmp_path / "out")["reward"]) == 1


def test_every_cell_of_the_study_gives_a_command(study):
    parser = study.long_study.make_parser()
    for name, of_study in study.cells.STUDIES.items():
        commands = [study.cells.command_of(of_study, cell, Path("out")) for cell in of_study.cells()]
        assert len(set(map(tuple, commands))) == len(commands) >= 3
        for command in commands:
            args = parser.parse_args(command[2:])
            assert name == "long" or (ROOT / args.model / "config.json").is_file()


def test_cells_run_once_and_are_collected(study, tmp_path, monkeypatch, capsys):
    pytest.importorskip("scipy")
    results, commands = tmp_path / "study.json", []

    def train(command, **options):
        """Write the files of a cell in its place."""
        commands.append(command)
        folder = Path(command[command.index("--output_dir") + 1])
        rows = [{"step": step, "loss": 0.0, "reward": step / 16} for step in range(1, 17)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "scores.json").write_text('{"greedy": {"correct": 3, "total": 4}}')

    monkeypatch.setattr("subprocess.run", train)
    monkeypatch.setattr(study.cells, "RESULTS", results)
    results.write_text("[]")
    run = ["run", "long", "--output_dir", str(tmp_path / "out"), "--schemes", "bf16", "--seeds", "0", "1"]
    for argv in (run, run, ["collect", "long", str(tmp_path / "out")], ["collect", "long", str(tmp_path / "out")]):
        study.cells.main(argv)
    assert len(commands) == len(json.loads(results.read_text())) == 2
    assert json.loads(results.read_text())[0]["course"]["reward"] == [0.281, 0.781]
    capsys.readouterr()
    study.cells.main(["table", "long"])
    assert capsys.readouterr().out.splitlines()[2] == "| bf16 | bf16, grpo-tis | 2 | 78 ± 0 | 75 ± 0 | - | - |"


def test_the_headline_shows_the_results(study):
    pytest.importorskip("scipy")
    image = pytest.importorskip("PIL.Image")
    headline = importlib.import_module("headline")
    scores = headline.read_scores(json.loads(headline.RESULTS.read_text()))
    with image.open(ROOT / "docs" / "headline.png") as picture:
        assert picture.info["Description"] == repr(scores)
    assert (
        f"4-bit weights: rollout only with GRPO {scores['4-bit weights']['rollout only, GRPO'][0]:.0f} %"
        in (ROOT / "README.md").read_text()
    )
