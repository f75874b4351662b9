"""
Prints the table of `docs/sharding.md` of which models fit on which GPUs: `python benchmarks/what_fits.py`. With
`--fill docs/sharding.md`, writes the table into that page.

The numbers are those of `trl-qarl estimate` with `--scheme w4a16 --tokens 4096 --vllm_gpu_memory_utilization 0`, with
and without `--use_peft`. Shapes are from the models' configurations at https://huggingface.co/Qwen.
"""

import argparse
import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.shapes import SHAPES
from trl_qarl.doctor.memory import MemorySettings, on_gpu, parts_of_memory
from trl_qarl.quantization.plan import get_plan


MODELS = {
    "Qwen3-1.7B": SHAPES["qwen3-1.7b"],
    "Qwen3-8B": SHAPES["qwen3-8b"],
    "Qwen3-32B": SHAPES["qwen3-8b"]
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "Qwen3-30B-A3B": SHAPES["qwen3-8b"]
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}
NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "fsdp2_offload": "host"}
GPUS, MEMORY = (1, 2, 4, 8), (24, 48, 80, 141)


def shapes_of(name: str):
    """Return a model without weights."""
    config = dict(MODELS[name])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))


def sizes(name: str, num_gpus: int, lora_rank: int) -> dict[str, int]:
    """Return the GB needed on each GPU, rounded up, by kind of launch."""
    settings = MemorySettings(num_gpus, lora_rank=lora_rank)
    (parts,) = parts_of_memory(shapes_of(name), get_plan("w4a16"), [settings])
    return {launch: -int(-on_gpu(of) // 10**9) for launch, of in parts.items()}


def row(name: str, num_gpus: int) -> str:
    """Return a row: the GB that a model needs on each GPU, and the first kind of launch that fits each size of GPU."""
    cells = [name if num_gpus == GPUS[0] else "", str(num_gpus)]
    for lora_rank in (0, 16):
        found = sizes(name, num_gpus, lora_rank)
        cells.append(", ".join(map(str, found.values())))
        for memory in MEMORY:
            cells.append(next((NAMES[launch] for launch, size in found.items() if size <= memory), "-"))
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    """Return the whole table."""
    head = ["model", "GPUs", "GB", *(f"{memory}" for memory in MEMORY)]
    head += ["GB, LoRA", *(f"{memory}" for memory in MEMORY)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(row(name, num_gpus) for name in MODELS for num_gpus in GPUS)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fill", type=Path, metavar="PAGE", help="write the table between the page's markers")
    page = parser.parse_args().fill
    if page is None:
        print(table(), end="")
        return
    pattern = r"(<!-- what fits -->\n).*?(<!-- end -->)"
    page.write_text(re.sub(pattern, lambda match: match[1] + table() + match[2], page.read_text(), flags=re.S))


if __name__ == "__main__":
    main()
