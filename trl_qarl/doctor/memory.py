"""
Memory of a training on each GPU, calculated from the shapes of a model, by the formulas of docs/sharding.md: exact for
the state, fitted to the memory of tensors on a CPU for activations, within 10 % in total. Kernels, attention and the
allocator of a GPU need additional memory.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ..checkpoint.load import skeleton
from ..quantization.inventory import Inventory
from ..quantization.names import layer_of
from ..quantization.plan import QuantPlan
from ..quantization.swap import prepare_model
from ..rollout.publisher import largest_chunk


LAUNCHES = ("ddp", "fsdp2")
"""Launches, the simplest first."""

TILE = (4096, 32768)
"""Tokens and vocabulary entries in a tile of TRL's logits (`trl.kernels.chunked_logprob`)."""

OPTIMIZERS = ("muon", "adamw_torch_fused", "adamw_torch", "adamw_torch_8bit")


@dataclass(frozen=True)
class Run:
    """
    Settings of a run that determine its memory, in addition to the model. `optim` is one of [`OPTIMIZERS`];
    `num_tokens` is the number of tokens of a micro-batch, prompts and completions; `engine_bytes` is the memory of a
    colocated engine on each GPU; `lora_rank` is the rank of adapters on all linear layers over a frozen base, 0
    without adapters; `accumulates` means that gradients of several micro-batches are added up without
    `sync_each_batch`; `rollout_ahead` is 1 if batches are drawn ahead, whose weights are kept.
    """

    num_gpus: int
    optim: str = "muon"
    num_tokens: int = 4096
    engine_bytes: int = 0
    lora_rank: int = 0
    accumulates: bool = False
    rollout_ahead: int = 0


def shapes_of(model: str, trust_remote_code: bool, argument: str) -> PreTrainedModel:
    """Return a model without its weights, from its configuration. If there is no such model, `ValueError` names
    `argument`."""
    try:
        # A folder may name code on the Hub, for which transformers would ask even if no one answers.
        is_local = Path(model).is_dir()
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=is_local)
        return skeleton(config, trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"{argument} {model}: {' '.join(str(error).split())}") from error


def parts_of_memory(model: nn.Module, plan: QuantPlan, run: Run, exclude_modules=None) -> dict[str, dict[str, int]]:
    """Return the bytes of each part on each GPU, by launch, for the training of a language model on the meta device,
    which is quantized in place. Errors are those of [`prepare_model`], and `ValueError` for an unknown optimizer."""
    return parts_of_runs(model, plan, [run], exclude_modules)[0]


def parts_of_runs(model: nn.Module, plan: QuantPlan, runs: list[Run], exclude_modules=None) -> list[dict[str, Any]]:
    """Return [`parts_of_memory`] for each of several runs."""
    for run in runs:
        if run.optim not in OPTIMIZERS:
            raise ValueError(f"optim={run.optim!r} is not known here. Choose from {', '.join(OPTIMIZERS)}.")
    chunk = largest_chunk(model, torch.bfloat16)
    report = prepare_model(model, plan, exclude_modules=exclude_modules, scale_dtype=torch.bfloat16)
    return [{launch: _parts(model, report.low_bit_bytes, chunk, run, launch) for launch in LAUNCHES} for run in runs]


def served_bytes(model: nn.Module, low_bit_bytes: int) -> int:
    """Return the bytes of the weights of a quantized `model` in an engine, without keys and values."""
    quantized = sum(weight.numel() for weight in _quantized(model))
    return low_bit_bytes + 2 * (sum(parameter.numel() for parameter in model.parameters()) - quantized)


def _parts(model: nn.Module, low_bit_bytes: int, chunk: int, run: Run, launch: str) -> dict[str, int]:
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head}
    matrices = sum(weight.numel() for key, weight in linears.items() if key not in embeddings)
    total = held = sum(parameter.numel() for parameter in model.parameters())
    if run.lora_rank:
        # Muon treats no factor of an adapter as a matrix.
        matrices, total = 0, run.lora_rank * sum(sum(weight.shape) for weight in linears.values())
        held += total - sum(weight.numel() for weight in _quantized(model))
    state = dict.fromkeys(OPTIMIZERS, 8 * total)
    state |= {"muon": 4 * matrices + 8 * (total - matrices), "adamw_torch_8bit": 2 * total}
    is_sharded = launch == "fsdp2"
    shards = run.num_gpus if is_sharded else 1
    parts = {
        "masters": 4 * held // shards,
        "gradients": 4 * total // (1 if run.accumulates else shards),
        "optimizer": state[run.optim] // shards,
        "low-bit weights": low_bit_bytes // shards,
    }
    others = total if run.lora_rank else total - sum(weight.numel() for weight in _quantized(model))
    # Weights of a frozen base are not kept.
    kept = 4 * others + (0 if run.lora_rank else low_bit_bytes)
    parts["kept weights"] = run.rollout_ahead * kept // shards
    if is_sharded:
        parts["gathered"] = _gathered(model, low_bit_bytes, has_gradients=not run.lora_rank)
    tokens, hidden, width = run.num_tokens, config.hidden_size, 2 if is_sharded else 4
    inner = getattr(config, "intermediate_size", 4 * hidden)
    layer = tokens * (16 * hidden + 22 * inner)
    parts["activations"] = width * config.num_hidden_layers * tokens * hidden + layer
    # The backward of `trl.trainer.utils.add_fused_lm_head` has one tile of the logits at a time.
    vocabulary = config.vocab_size
    logits = 2 * min(tokens, TILE[0]) * TILE[1] + 2 * min(vocabulary, TILE[1]) * hidden
    logits += 0 if run.lora_rank else 4 * vocabulary * hidden
    parts["logits"] = max(logits - layer, 0)
    parts["weight sync"] = chunk
    parts["engine"] = run.engine_bytes
    return parts


def _quantized(model: nn.Module) -> list[torch.Tensor]:
    return [w.parameter for layer in Inventory.of(model).layers.values() for w in layer.quantized_weights.values()]


def _gathered(model: nn.Module, low_bit_bytes: int, has_gradients: bool) -> int:
    quantized = {id(weight) for weight in _quantized(model)}
    num_quantized = sum(p.numel() for p in model.parameters() if id(p) in quantized)
    layers: dict[str, list[int]] = {}
    outside = 0
    for name, parameter in model.named_parameters():
        layer, number = layer_of(name), parameter.numel()
        if not layer.rpartition(".")[2].isdigit():
            outside += number
            continue
        bytes_of_weight = number * low_bit_bytes / num_quantized if id(parameter) in quantized else 2 * number
        sizes = layers.setdefault(layer, [0, 0])
        sizes[0], sizes[1] = sizes[0] + int(bytes_of_weight), sizes[1] + 2 * number
    largest = max(layers.values(), default=[0, 0])
    head = model.get_output_embeddings()
    gradients = largest[1] + (2 * head.weight.numel() if head is not None else 0)
    return 2 * largest[0] + 2 * outside + (gradients if has_gradients else 0)


def launch_configuration(launch: str, num_gpus: int, is_loaded_by_all: bool = False) -> dict[str, Any]:
    """Return the content of a file for `accelerate launch --config_file` on one machine: TRL's file, with settings of
    this launch. With `is_loaded_by_all` each process has to load the weights, to quantize an adapter's base or to
    choose global scales before FSDP2 shards them."""
    name = "fsdp2" if launch == "fsdp2" else "multi_gpu" if num_gpus > 1 else "single_gpu"
    configuration = yaml.safe_load((files("trl") / f"accelerate_configs/{name}.yaml").read_text())
    configuration["num_processes"] = num_gpus
    if launch == "fsdp2":
        configuration["fsdp_config"]["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
        configuration["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = not is_loaded_by_all
    return configuration
