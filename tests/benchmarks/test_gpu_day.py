"""`benchmarks/gpu.py`, the measurements of a GPU in pieces."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from bench.command import make_parser
from testing_utils import start_engines_quickly


ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
pieces = runpy.run_path(str(BENCHMARKS / "gpu.py"))


def test_pieces_of_the_gpu_day_name_commands_and_tests():
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
def test_the_gpu_day_runs_dry_and_resumes(tmp_path, monkeypatch):
    envs = pytest.importorskip("vllm.envs")
    kinds = ("doctor", "learner", "decode", "alignment", "rollout")
    names = [name for name in pieces["dry_pieces"]() if name.partition("-")[0] in kinds]
    start_engines_quickly(monkeypatch)
    # vLLM caches its table of model classes there.
    monkeypatch.setenv("VLLM_CACHE_ROOT", envs.VLLM_CACHE_ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry_run", "--out", str(work), *names])
    pieces["main"]()
    rows = [json.loads(line) for line in (work / "rows.jsonl").read_text().splitlines()]
    assert {row["piece"] for row in rows} == {*names} - {"doctor"}
    subprocess.run(["tar", "-czf", out / "results.tar.gz", "-C", work, "."], check=True)
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(out)}
    command = ["bash", str(BENCHMARKS / "gpu.sh"), "--dry_run", *names]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout.split("\n")[:-1] == [f"{name}: done" for name in names]
