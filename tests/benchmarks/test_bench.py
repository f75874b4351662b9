"""`python -m benchmarks.bench`: what its rows say, and options that contradict each other."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.adapters import held_bytes
from bench.alignment import _sample, summarize_alignment
from bench.command import make_parser, run
from bench.learner import format_table, prepare_variants, run_benchmark
from trl_qarl.adapters.base import prepare_base
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.swap import prepare_model


def bench(*argv):
    run(make_parser().parse_args([*map(str, argv)]))


@pytest.mark.parametrize("mode", ["learner", "decode"])
def test_there_is_one_row_for_each_scheme_and_size(mode, tiny_model, tmp_path, capsys):
    path = tmp_path / "bench.json"
    options = ["--num_layers", 1, "--repeats", 1, "--tokens", 8, 80, "--schemes", "w4a16", "w8a8", "--json", path]
    bench(mode, "--model_name_or_path", tiny_model, *options)
    result = json.loads(path.read_text())
    assert [(row["scheme"], row["tokens"]) for row in result["rows"]] == [
        (scheme, tokens) for tokens in (8, 80) for scheme in (None, "w4a16", "w8a8")
    ]
    assert capsys.readouterr().out.count("| nn.Linear |") == 2
    assert "torch" in result["machine"]
    for row in result["rows"]:
        assert row["step_seconds"] > 0
        assert sum(row["kernels"].values()) == (0 if row["scheme"] is None else 7)
        assert row["scheme"] is not None or row["step_ratio"] == row["linear_ratio"] == 1


def test_extra_memory_counts_the_tensors_that_are_held(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    variants, reports = prepare_variants(model, ["w4a16", "w8a8"])
    assert all(a is b for a, b in zip(model.parameters(), variants["w4a16"].parameters(), strict=True))
    result = run_benchmark(variants, reports, [128], repeats=1)
    extra = {row["scheme"]: row.get("extra_memory") for row in result["rows"]}
    assert extra[None] is None
    # 4 of 16 bits, one bf16 scale per 128 weights, and 8 bytes per layer for the count of flipped codes.
    assert extra["w4a16"] == pytest.approx(1 / 4 + 1 / 128, abs=1e-3)
    # 8 of 16 bits and one float32 scale per row of 128 or 256.
    assert 1 / 2 + 2 / 256 < extra["w8a8"] < 1 / 2 + 2 / 128 + 1e-3
    assert "aten::linear" in format_table(result)


def test_an_adapter_is_held_without_masters_and_their_optimizer_state(tiny_model):
    peft = pytest.importorskip("peft")
    full = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    report = prepare_model(full, "w4a16", scale_dtype=torch.bfloat16)
    assert held_bytes(full) == sum(p.nbytes for p in full.parameters()) + 32 * 4 * 2 + report.low_bit_bytes
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    prepare_base(adapted, get_scheme("w4a16"), keep_masters=False, exclude_modules=None, scale_dtype=torch.bfloat16)
    factors = [p for p in adapted.parameters() if p.requires_grad]
    num_bytes = sum(p.nbytes for p in factors)
    assert held_bytes(full) - held_bytes(adapted) == report.master_bytes - num_bytes
    optimizer = torch.optim.AdamW(factors)
    adapted(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    # A gradient and two moments each, and a counter of steps.
    assert held_bytes(adapted, optimizer) - held_bytes(adapted) == 3 * num_bytes + 4 * len(factors)


@pytest.mark.vllm
def test_numerics_times_both_on_alternate_batches(tiny_model, tmp_path, capsys):
    kernels = pytest.importorskip("trl_qarl.numerics.cpu")
    if reason := kernels.reason_against():
        pytest.skip(reason)
    path = tmp_path / "bench.json"
    model = ["--model_name_or_path", tiny_model, "--rollout", "transformers", "--schemes", "w4a16", "--repeats", 1]
    sizes = ["--tokens", 8, "--new_tokens", 4, "--sequence_length", 100]
    bench("numerics", *model, *sizes, "--json", path)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["sequences"] == 8 and row["length"] == 100
    for part in ("whole", "rollout", "scoring", "forward and backward"):
        assert row[f"{part}, fast s"] > 0 and row[f"{part}, engine / fast"] > 0
        assert len(row[f"{part}, least and most"]) == 2
    assert "publish, fast s" not in row


def test_alignment_samples_answers_of_the_asked_length_until_there_are_enough_tokens(tiny_model):
    class Client:
        """A server's client, whose answers end where they must."""

        def generate(self, prompts, max_tokens):
            rows = [[*range(max_tokens)] for _ in prompts]
            return {"completion_ids": rows, "logprobs": [[[-1.0] for _ in row] for row in rows]}

    samples = _sample(Client(), tiny_model, 200, 5)
    assert [len(tokens) for _, tokens, _ in samples] == [5] * 48


def test_a_summary_of_alignment_has_a_row_for_each_group_size():
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


@pytest.mark.parametrize(
    "argv",
    [
        ["learner", "--group_size", "48"],
        ["learner", "--tokens", "0"],
        ["learner", "--model_name_or_path", "./no_such_model"],
        ["learner", "--shapes", "tiny", "--model_name_or_path", "x"],
        ["publish", "--num_layers", "2"],
        ["publish", "--sizes", "0.1", "--shapes", "tiny"],
        ["publish", "--in_process", "--megabits", "20"],
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_be_is_named_in_one_line(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench(*argv)
    error = capsys.readouterr().err
    assert error.startswith("trl-qarl: error: ") and argv[1].lstrip("-") in error or argv[2] in error
