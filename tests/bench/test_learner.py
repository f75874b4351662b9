import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_model
from trl_qarl.adapters.base import prepare_base
from trl_qarl.bench.adapters import held_bytes
from trl_qarl.bench.engines import fill_up, make_chats
from trl_qarl.bench.learner import format_table, prepare_variants, run_benchmark
from trl_qarl.cli import main
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.swap import prepare_model, quantized_layers


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("mode", ["learner", "decode"])
def test_bench_prints_one_row_per_scheme_and_size(mode, tiny_model, tmp_path, capsys):
    path = tmp_path / "bench.json"
    options = {"model_name_or_path": tiny_model, "num_layers": 1, "repeats": 1, "json": path}
    if mode == "learner":
        options["sequence_length"] = 8
    argv = [token for name, value in options.items() for token in (f"--{name}", str(value))]
    assert main(["bench", mode, *argv, "--tokens", "8", "80", "--schemes", "w4a16", "w8a8"]) == 0
    result = json.loads(path.read_text())
    assert [(row["scheme"], row["tokens"]) for row in result["rows"]] == [
        (scheme, tokens) for tokens in (8, 80) for scheme in (None, "w4a16", "w8a8")
    ]
    output = capsys.readouterr().out
    assert output.count("| nn.Linear |") == 2
    assert output.startswith("forward of" if mode == "decode" else "forward + backward of")
    assert "torch" in result["machine"]
    for row in result["rows"]:
        assert row["step_seconds"] > 0
        assert sum(row["kernels"].values()) == (0 if row["scheme"] is None else 7)
        assert row["scheme"] is not None or row["step_ratio"] == row["linear_ratio"] == 1


def test_variants_share_their_master_weights_and_keep_no_gradient(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    variants, reports = prepare_variants(model, ["w4a16", "fp8"])
    for name in ("w4a16", "fp8"):
        assert len(quantized_layers(variants[name])) == len(reports[name].converted) == 14
        assert all(a is b for a, b in zip(model.parameters(), variants[name].parameters(), strict=True))
    assert not quantized_layers(model)
    run_benchmark(variants, reports, [16], repeats=1)
    assert all(parameter.grad is None for parameter in model.parameters())


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


def test_extra_memory_counts_the_tensors_that_are_held(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    result = run_benchmark(*prepare_variants(model, ["w4a16", "w8a8"]), [128], repeats=1)
    extra = {row["scheme"]: row.get("extra_memory") for row in result["rows"]}
    assert extra[None] is None
    # 4 of 16 bits, one bf16 scale per 128 weights, and 8 bytes per layer for the count of flipped codes.
    assert extra["w4a16"] == pytest.approx(1 / 4 + 1 / 128, abs=1e-3)
    # 8 of 16 bits and one float32 scale per row of 128 or 256.
    assert 1 / 2 + 2 / 256 < extra["w8a8"] < 1 / 2 + 2 / 128 + 1e-3
    assert "aten::linear" in format_table(result)


def test_bench_under_autocast_keeps_float32_master_weights(tiny_model, capsys):
    argv = ["--model_name_or_path", tiny_model, "--autocast", "--tokens", "16", "--repeats", "1", "--schemes", "w4a16"]
    assert main(["bench", "learner", *argv]) == 0
    assert "bfloat16, float32 master weights" in capsys.readouterr().out


def test_prompts_are_filled_up_to_a_length(tiny_model):
    from transformers import AutoTokenizer

    chats = make_chats(2)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for length, expected in (
        (300, 300),
        (10, len(tokenizer.apply_chat_template(chats[1], add_generation_prompt=True)["input_ids"])),
    ):
        prompt = tokenizer.apply_chat_template(fill_up(tiny_model, chats, length)[1], add_generation_prompt=True)
        assert len(prompt["input_ids"]) == expected
