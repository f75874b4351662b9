"""
Times the experts of one layer, forward and backward, and measures the size of their low-bit form, for the tables of
benchmarks/experts.md. With the argument `grouped`, compares one product for all experts with one product per expert.
"""

import sys
import time

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from trl_qarl.quantization import experts
from trl_qarl.quantization.experts import QuantizedExperts
from trl_qarl.quantization.gemm import has_fast_bf16
from trl_qarl.quantization.schemes import get_scheme


# Shapes of Qwen3-30B-A3B with an eighth of its experts.
HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS, REPEATS = 2048, 768, 16, 4, 512, 2


def seconds(function) -> float:
    """Return the shortest time of `REPEATS` calls, after a warm-up."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def make_experts(num_experts: int, hidden: int, intermediate: int) -> Qwen3MoeExperts:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=num_experts)
    config._experts_implementation = "grouped_mm"
    plain = Qwen3MoeExperts(config)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return plain


def compare_grouped(num_experts: int, topk: int, tokens: int, hidden: int, intermediate: int) -> None:
    """Print processor seconds of forward and backward in `w4a16`, medians of three runs that take turns."""
    layer = QuantizedExperts.from_experts(
        make_experts(num_experts, hidden, intermediate), get_scheme("w4a16"), torch.bfloat16
    )
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16 if has_fast_bf16() else torch.float32, requires_grad=True)
    ids = torch.stack([torch.randperm(num_experts)[:topk] for _ in range(tokens)])
    weights = torch.rand(tokens, topk)
    taken = {"one by one": [], "grouped": []}
    for _ in range(4):
        for name in taken:
            experts.is_grouping_faster = lambda *arguments, name=name: name == "grouped"
            start = time.process_time()
            layer(x, ids, weights).float().sum().backward()
            taken[name].append(time.process_time() - start)
            layer.zero_grad()
    one, grouped = (sorted(times[1:])[1] for times in taken.values())
    sizes = f"{num_experts} experts, {topk} active, {tokens} tokens, {hidden} x {intermediate}"
    print(
        f"{sizes}, {x.dtype}: one by one {one:.3f} s, grouped {grouped:.3f} s, ratio {grouped / one:.2f}", flush=True
    )


def main() -> None:
    if sys.argv[1:] == ["grouped"]:
        for sizes in ((8, 2, 256, 256, 128), (64, 8, 256, 1024, 512)):
            compare_grouped(*sizes)
        return
    plain = make_experts(EXPERTS, HIDDEN, INTERMEDIATE)
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
            size = f"{sum(part.nbytes for form in forms for part in form.parts()) / 1e9 / billions:.3f}"
            module.forget()
        print(f"| {name} | {taken:.2f} s | {taken / base:.2f} | {made} | {size} |", flush=True)


if __name__ == "__main__":
    main()
