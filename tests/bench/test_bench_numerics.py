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


@pytest.mark.parametrize("reason", [None, "this processor has no AVX512"])
def test_bench_alignment_has_a_row_with_engine_numerics_where_the_learner_has_the_kernels(
    reason, tmp_path, monkeypatch, capsys
):
    import torch
    from transformers import AutoModelForCausalLM

    from testing_utils import make_tiny_model
    from trl_qarl.bench.alignment import _can_use_engine_numerics
    from trl_qarl.numerics import cpu

    monkeypatch.setattr(cpu, "reason_against", lambda: reason)
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, "llama"), dtype=torch.bfloat16)
    assert _can_use_engine_numerics(model, torch.bfloat16) == (reason is None)
    assert not _can_use_engine_numerics(model, torch.float32)
    said = capsys.readouterr().out
    assert said == ("" if reason is None else f"No row with engine numerics: {reason}.\n")


def test_bench_alignment_samples_answers_of_the_asked_length_until_there_are_enough_tokens(tmp_path):
    from testing_utils import make_tiny_model
    from trl_qarl.bench.alignment import _sample

    class Client:
        """A server's client, whose answers end where they must."""

        def generate(self, prompts, max_tokens):
            rows = [[*range(max_tokens)] for _ in prompts]
            return {"completion_ids": rows, "logprobs": [[[-1.0] for _ in row] for row in rows]}

    samples = _sample(Client(), make_tiny_model(tmp_path, "llama"), 200, 5)
    assert [len(tokens) for _, tokens, _ in samples] == [5] * 48


def test_a_summary_of_alignment_has_a_row_for_each_group_size():
    from trl_qarl.bench.alignment import summarize_alignment

    rows = [
        {"dtype": "bfloat16", "scheme": "w4a16", "group size": size, "learner": learner, "tokens": 9, "mean": mean}
        for size, mean in ((128, 0.25), (32, 0.5))
        for learner in ("quantized", "quantized, engine numerics")
    ]
    summary = summarize_alignment(rows)
    assert [(row["group size"], row["fast: mean"], row["engine: mean"]) for row in summary] == [
        (128, 0.25, 0.25),
        (32, 0.5, 0.5),
    ]
