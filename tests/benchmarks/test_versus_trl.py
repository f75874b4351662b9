"""The comparison with TRL's trainer: what it counts, and a small one from end to end."""

import json
import runpy
from pathlib import Path

import pytest


BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "versus_trl.py"))


def batch(seconds, reward=0.0, **parts):
    return {"seconds": seconds, "reward": reward, "parts": parts, "length": 10, "gigabytes": 1.0, "mismatch": 0.0}


def test_a_part_is_counted_without_the_parts_inside_it(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    watch = BENCHMARK["Stopwatch"]()
    with watch.part("outer"):
        now[0] += 1
        with watch.part("inner"):
            now[0] += 10
        now[0] += 2
    assert watch.seconds == {"outer": 3, "inner": 10}


def test_the_first_batch_is_not_counted_and_medians_are_those_of_the_others():
    batches = [batch(99, update=50), batch(4, update=1), batch(2, update=3), batch(3, update=2)]
    row = BENCHMARK["summarize"]("w4a16", {"sampler": "vLLM", "numerics": "engine"}, batches, 6)
    assert (row["seconds"], row["least"], row["most"], row["parts"]["update"]) == (3, 2, 4, 2)
    assert row["tokens_per_second"] == 20 and row["gain_per_minute"] is None


def test_the_gain_of_the_reward_is_its_slope_over_minutes_of_training():
    assert BENCHMARK["gain_per_minute"]([batch(30, reward=0.1 * i) for i in range(8)]) == pytest.approx(0.2)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_contenders_take_turns_on_the_same_tokens(tmp_path, capsys):
    sizes = ["--sequences", "4", "--prompts", "2", "--new_tokens", "6", "--batches", "2"]
    files = ["--output", str(tmp_path / "rows.json"), "--picture", str(tmp_path / "rows.png")]
    rows = BENCHMARK["main"](["--contenders", "TRL", "w8a8", "--shapes", "tiny", "--without_vllm", *sizes, *files])
    assert [row["name"] for row in rows] == ["TRL", "w8a8"]
    for row in rows:
        assert row["sampler"] == "transformers" and row["gigabytes"] > 0
        # The median of sums is near the sum of medians.
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"], rel=0.2)
        assert min(row["parts"][part] for part in ("rollout", "scoring", "update", "optimizer")) > 0
        assert 4 < row["tokens_per_second"] * row["seconds"] < 4 * 6 + 1e-6
    assert rows[0]["tokens_per_second"] * rows[0]["seconds"] == pytest.approx(4 * 6)
    assert "| TRL | transformers |" in capsys.readouterr().out
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
