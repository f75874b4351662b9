import json

import pytest

from trl_qarl.cli import main


@pytest.mark.vllm
def test_bench_numerics_times_both_on_alternate_batches(tiny_model, tmp_path, capsys):
    kernels = pytest.importorskip("trl_qarl.numerics.cpu")
    if reason := kernels.reason_against():
        pytest.skip(reason)
    path = tmp_path / "bench.json"
    argv = ["--model_name_or_path", tiny_model, "--rollout", "transformers", "--schemes", "w4a16", "--repeats", "1"]
    assert (
        main(
            [
                "bench",
                "numerics",
                *argv,
                "--tokens",
                "8",
                "--new_tokens",
                "4",
                "--sequence_length",
                "100",
                "--json",
                str(path),
            ]
        )
        == 0
    )
    (row,) = json.loads(path.read_text())["rows"]
    assert row["sequences"] == 8 and row["length"] == 100
    for part in ("whole", "rollout", "scoring", "forward and backward"):
        assert row[f"{part}, fast s"] > 0 and row[f"{part}, engine / fast"] > 0
        assert len(row[f"{part}, least and most"]) == 2
    assert "publish, fast s" not in row
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "numerics", "--tokens", "6"])
    assert "give multiples of 4" in capsys.readouterr().err
