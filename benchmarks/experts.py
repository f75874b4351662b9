"""Times of the experts of one layer, forward and backward, and what their low-bit form weighs; the table of docs/moe.md."""

import time

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from trl_qarl.quantization.experts import QuantizedExperts
from trl_qarl.quantization.schemes import get_scheme


# Of Qwen3-30B-A3B with an eighth of its experts.
HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS, REPEATS = 2048, 768, 16, 4, 512, 2


def seconds(function) -> float:
    """Return the shortest of some calls, after one that warms up."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS)
    config._experts_implementation = "grouped_mm"
    plain = Qwen3MoeExperts(config)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    billions = sum(parameter.numel() for parameter in plain.parameters()) / 1e9
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOPK)

    def step(module, rows):
        rows = rows.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            module(rows, ids, weights).float().sum().backward()
        module.zero_grad()

    variants = {"transformers, grouped_mm, in float32": (plain, x.float())}
    for name in ("w4a16", "w8a8", "fp8"):
        layer = QuantizedExperts.from_experts(plain, get_scheme(name), torch.bfloat16)
        variants[name] = layer, x
    dense = QuantizedExperts.from_experts(plain, get_scheme("w4a16"), torch.bfloat16)
    dense.use_quantized_forward = False
    variants["not quantized, in bf16"] = dense, x
    base = seconds(lambda: step(dense, x))
    print("| experts | forward + backward | ratio | quantizing | GB per billion weights |\n|---|---|---|---|---|")
    for name, (module, rows) in variants.items():
        taken = base if module is dense else seconds(lambda module=module, rows=rows: step(module, rows))
        made, size = "-", "-"
        if module not in (plain, dense):
            start = time.perf_counter()
            forms = [weight.quantize(weight.master().detach()) for weight in module.quantized_weights.values()]
            made = f"{(time.perf_counter() - start) / billions:.1f} s per billion"
            size = f"{sum(form.num_bytes for form in forms) / 1e9 / billions:.3f}"
            module.forget()
        print(f"| {name} | {taken:.2f} s | {taken / base:.2f} | {made} | {size} |", flush=True)


if __name__ == "__main__":
    main()
