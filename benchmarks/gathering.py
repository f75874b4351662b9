"""
Measures the memory that a process needs beyond its shards for a weight sync of FSDP2-sharded masters, which are
gathered layer by layer, for a server in the main process and for engines in all processes: `torchrun --nproc_per_node
2 benchmarks/gathering.py`, on a CPU under Linux.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from trl_qarl.checkpoint.layout import iter_checkpoint_layers
from trl_qarl.quantization.swap import prepare_model
from trl_qarl.sharding.fsdp2 import shard_low_bit


SHAPES = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 10}


def memory(name: str) -> int:
    """Return the bytes that the kernel reports for this process under `name`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    dist.init_process_group("gloo")
    config = AutoConfig.for_model("qwen3", tie_word_embeddings=True, head_dim=64, num_key_value_heads=8, **SHAPES)
    model = AutoModelForCausalLM.from_config(config).float()
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shard_low_bit(model)
    # The first round also quantizes this process's rows, which stay in memory.
    for to_main in (True, True, True, False, False):
        before, sizes = memory("VmRSS"), []
        Path("/proc/self/clear_refs").write_text("5")
        for layer in iter_checkpoint_layers(model, torch.bfloat16, to_main=to_main):
            sizes.append(sum(tensor.nbytes for _, tensor in layer))
        extra, receiver = memory("VmHWM") - before, "the main process" if to_main else "all"
        print(
            f"process {dist.get_rank()}, to {receiver}: {extra / 1e6:.1f} MB, largest layer {max(sizes) / 1e6:.1f}, all {sum(sizes) / 1e6:.1f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
