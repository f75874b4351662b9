"""
Writes two tables into schemes.md: `python benchmarks/grids.py` squared errors, `python benchmarks/grids.py kl` what rounding does to SmolLM2.

The squared error is that of Gaussian weights `(4096, 1024)` with scales in bfloat16, relative to their sum of squares. The divergence is that
of a model with low-bit weights from the model itself, in float32, over answers that the model samples to six questions.
"""

import sys
import tempfile
from pathlib import Path

import torch

from trl_qarl.quantization.schemes import GROUP_SIZES, get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


PAGE = Path(__file__).parent.parent / "docs" / "schemes.md"
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
    ("w3a16", 32),
    ("w3a16-observer", 32),
    ("mxfp4a16", 32),
    ("nvfp4a16", 16),
    ("w8a16", None),
)


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
def divergences() -> str:
    """Table of nats per token from SmolLM2 to itself with low-bit weights."""
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

    def log_probs():
        return [model(ids).logits[0, start - 1 : -1].log_softmax(-1) for ids, start in answers]

    before = log_probs()
    lines = ["| scheme | one scale per | bits per weight | nats per token |", "|---|---|---|---|"]
    for name, group_size in KL_SCHEMES:
        scheme = get_scheme(name, group_size)
        report = prepare_model(model, scheme, scale_dtype=torch.bfloat16)
        weights = [layer.low_bit_weight() for layer in quantized_layers(model).values()]
        bits = 8 * sum(weight.num_bytes for weight in weights) / sum(weight.numel() for weight in weights)
        after = log_probs()
        total = sum((b.exp() * (b - a)).sum() for b, a in zip(before, after, strict=True))
        nats = (total / sum(len(b) for b in before)).item()
        restore_model(model)
        lines.append(f"| `{name}` | {group_size or 'output channel'} | {bits:.2f} | {nats:.3g} |")
        print(lines[-1], report, flush=True)
    print(sum(len(b) for b in before), "tokens")
    return "\n".join(lines)


def fill(page: str, name: str, table: str) -> str:
    """The text of the page with the table of this name written anew."""
    head, mark, rest = page.partition(f"<!-- {name} -->\n")
    _, end, tail = rest.partition("<!-- end -->\n")
    assert mark and end
    return f"{head}{mark}\n{table}\n\n{end}{tail}"


if __name__ == "__main__":
    name, make = ("kl", divergences) if sys.argv[1:] == ["kl"] else ("grids", table)
    written = make()
    PAGE.write_text(fill(PAGE.read_text(), name, written))
