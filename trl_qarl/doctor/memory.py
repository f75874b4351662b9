"""
Memory of a training on each GPU, and of its machine, calculated from the shapes of a model by the formulas of
docs/sharding.md: exact for the state, fitted to the memory of tensors on a CPU for activations, within 10 % in total.
Kernels, attention and the allocator of a GPU need additional memory.
"""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ..adapters.tensors import base_of, is_adapter_folder
from ..checkpoint.load import check_release, skeleton
from ..checkpoint.record import check_config
from ..checks.model import problem_of_kind
from ..optimizers.eight_bits import block_of
from ..options import optimizer_name
from ..quantization.inventory import Inventory
from ..quantization.names import layer_of
from ..quantization.plan import QuantPlan
from ..quantization.storage import num_elements
from ..quantization.swap import low_bit_bytes, prepare_model
from ..sync.publisher import largest_chunk


LAUNCHES = ("ddp", "fsdp2", "fsdp2_offload")
"""Launches, the fastest first."""

RESIDENT = ("masters", "optimizer", "low-bit weights", "kept weights", "weight sync", "engine")
"""Parts of a GPU's memory that are there during a rollout."""

TILE = (4096, 32768)
"""Tokens and vocabulary entries in a tile of TRL's logits (`trl.kernels.chunked_logprob`)."""

OPTIMIZERS = ("muon", "muon_8bit", "adamw_torch_fused", "adamw_torch", "adamw_torch_8bit")


@dataclass(frozen=True)
class MemorySettings:
    """
    Settings of a run that determine its memory, in addition to the model. `optim` is one of [`OPTIMIZERS`];
    `num_tokens` is the number of tokens of a micro-batch, prompts and completions; `engine_bytes` is the memory of a
    colocated engine on each GPU; `lora_rank` is the rank of adapters on all linear layers over a frozen base, 0
    without adapters; `accumulates` means that gradients of several micro-batches are added up without
    `sync_each_batch`; `rollout_ahead` is 1 if batches are drawn ahead, whose weights are kept; `gradient_bytes` is
    2 with `gradient_dtype="bfloat16"`.
    """

    num_gpus: int
    optim: str = "muon"
    num_tokens: int = 4096
    engine_bytes: int = 0
    lora_rank: int = 0
    accumulates: bool = False
    rollout_ahead: int = 0
    gradient_bytes: int = 4


def shapes_of(model: str, trust_remote_code: bool, argument: str) -> PreTrainedModel:
    """Return a model without its weights. If there is no such model, `ValueError` names `argument`."""
    if is_adapter_folder(model):
        raise ValueError(f"{argument} {model} is an adapter. Name its base, {base_of(model)!r}.")
    try:
        check_config(model)
        # A folder may name code on the Hub, for which transformers would ask even if no one answers.
        is_local = Path(model).is_dir()
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=is_local)
        cls = getattr(transformers, (config.architectures or [""])[0], None)
        if cls is not None and (problem := problem_of_kind(cls.__name__, cls, config)):
            raise ValueError(problem)
        check_release(model, getattr(config, "quantization_config", None))
        return skeleton(config, trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        # A class may need a package, such as timm for the tower of Gemma 3n.
        raise ValueError(f"{argument} {model}: {' '.join(str(error).split())}") from error


def parts_of_memory(
    model: nn.Module, plan: QuantPlan, runs: Sequence[MemorySettings], exclude_modules=None
) -> list[dict[str, dict[str, int]]]:
    """Return the bytes of each part on each GPU, by launch, for each of `runs`, trainings of a language model on the
    meta device, which is quantized in place. Parts whose names begin with `"host "` are in the memory of the machine,
    for all of its processes. Errors are those of [`prepare_model`], and `ValueError` for an unknown optimizer."""
    for run in runs:
        if run.optim not in OPTIMIZERS:
            raise ValueError(f"optim={run.optim!r} is not known here. Choose from {', '.join(OPTIMIZERS)}.")
    chunk = largest_chunk(model, torch.bfloat16)
    report = prepare_model(model, plan, exclude_modules=exclude_modules, scale_dtype=torch.bfloat16)
    return [{launch: _parts(model, report.low_bit_bytes, chunk, run, launch) for launch in LAUNCHES} for run in runs]


def served_bytes(model: nn.Module, low_bit_bytes: int) -> int:
    """Return the bytes of the weights of a quantized `model` in an engine, without keys and values."""
    return low_bit_bytes + 2 * (num_elements(model.parameters()) - num_elements(_quantized(model)))


def on_gpu(parts: dict[str, int], is_asleep: bool = False) -> int:
    """Return the bytes of `parts` on a GPU at once; an engine that `is_asleep` in updates has none of them then."""
    parts = {name: size for name, size in parts.items() if not name.startswith("host ")}
    training = sum(parts.values())
    if not is_asleep:
        return training
    return max(training - parts["engine"], sum(parts[name] for name in RESIDENT))


def on_host(parts: dict[str, int]) -> int:
    """Return the bytes of `parts` in the memory of the machine."""
    return sum(size for name, size in parts.items() if name.startswith("host "))


def _parts(model: nn.Module, low_bit_bytes: int, chunk: int, run: MemorySettings, launch: str) -> dict[str, int]:
    config = model.config.get_text_config()
    size, quantized = num_elements(model.parameters()), num_elements(_quantized(model))
    if run.lora_rank:
        shapes = _shapes_of_adapter(model, run.lora_rank)
        # Muon treats no factor of an adapter as a matrix.
        state, total = sum(_state(shape, run.optim, False, False) for shape in shapes), sum(map(math.prod, shapes))
        # Weights of a frozen base are not kept.
        held, kept = size - quantized + total, 4 * total
    else:
        state, total = _state_of_all(model, run.optim), size
        held, kept = size, 4 * (size - quantized) + low_bit_bytes
    is_sharded, is_offloaded = launch != "ddp", launch == "fsdp2_offload"
    shards = run.num_gpus if is_sharded else 1
    state_of_training = {
        "masters": 4 * held,
        "gradients": run.gradient_bytes * total,
        "optimizer": state,
        "low-bit weights": low_bit_bytes,
        "kept weights": run.rollout_ahead * kept,
    }
    # One process loads all weights before FSDP2 divides them. The others quantize as many for an adapter.
    num_loading = 1 if is_sharded else run.num_gpus
    loaded = 4 * num_loading * size
    if run.lora_rank:
        loaded += (run.num_gpus - num_loading) * low_bit_bytes
    if is_offloaded:
        parts = dict.fromkeys(state_of_training, 0)
        parts |= {f"host {name}": size for name, size in state_of_training.items()}
        of_masters, of_others = _rounding(model, shards, run)
        parts["host rounding"] = of_masters + of_others
        parts["host loading"] = max(0, loaded - sum(state_of_training.values()) + 4 * held - of_others)
    else:
        parts = {name: size // shards for name, size in state_of_training.items()}
        parts["host loading"] = loaded
    if run.accumulates:
        # FSDP2 adds up in float32 before it divides.
        parts["gradients"] = (4 if is_sharded else run.gradient_bytes) * total
    tokens, hidden, width = run.num_tokens, config.hidden_size, 2 if is_sharded else 4
    inner = getattr(config, "intermediate_size", 4 * hidden)
    # FSDP2 computes everything in 16 bits.
    layer = tokens * (24 * hidden + 12 * inner if is_sharded else 16 * hidden + 22 * inner)
    # The backward of `trl.trainer.utils.add_fused_lm_head` has one tile of the logits at a time.
    vocabulary = config.vocab_size
    logits = 2 * min(tokens, TILE[0]) * TILE[1] + 2 * min(vocabulary, TILE[1]) * hidden
    logits += 0 if run.lora_rank else 4 * vocabulary * hidden
    if is_offloaded:
        parts |= _crossing(model, low_bit_bytes, layer, shards, run)
        logits += 2 * vocabulary * hidden - parts["gathered"] - parts["crossing"]
    elif is_sharded:
        parts["gathered"] = _gathered(model, low_bit_bytes, has_gradients=not run.lora_rank)
    parts["activations"] = width * config.num_hidden_layers * tokens * hidden + layer
    parts["logits"] = max(logits - layer, 0)
    parts["weight sync"] = chunk
    parts["engine"] = run.engine_bytes
    return parts


def _shapes_of_adapter(model: nn.Module, rank: int) -> list[tuple[int, int]]:
    head = model.get_output_embeddings()
    linears = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head}
    return [shape for w in linears.values() for shape in ((rank, w.shape[1]), (w.shape[0], rank))]


def _state_of_all(model: nn.Module, optim: str) -> int:
    head = model.get_output_embeddings()
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m is not head} - embeddings
    return sum(
        _state(p.shape, optim, id(p) in matrices, id(p) in embeddings or p.ndim > 2) for p in model.parameters()
    )


def _state(shape: Sequence[int], optim: str, is_matrix: bool, is_rare: bool) -> int:
    """Return the bytes of an optimizer's state of a parameter; parts of one that `is_rare` may have no gradient."""
    number = math.prod(shape)
    if optim == "adamw_torch_8bit":
        return 2 * number
    if not optim.startswith("muon"):
        return 8 * number
    block = block_of(shape, number) if optim == "muon_8bit" else None
    # A code, and a scale for each block.
    bytes_of_moment = 4 * number if block is None else number + 4 * (number // block)
    return bytes_of_moment if is_matrix else bytes_of_moment + (4 * number if is_rare else bytes_of_moment)


def _crossing(
    model: nn.Module, low_bit_bytes: int, layer_bytes: int, shards: int, run: MemorySettings
) -> dict[str, int]:
    """
    Return the bytes that a layer has in its backward with masters on the host, and those above them and its
    activations, `layer_bytes`, at the worst moment of a backward. FSDP2 gives up what it has gathered of a unit before
    its gradients leave: added up in float32, which stays until the next unit's leave, and the sum's shard, rounded if
    gradients have 16 bits; with several processes it holds the last gradient in 16 bits meanwhile (torch 2.13). The
    embedding's leave while the head is gathered again, if a forward without gradients came before.
    """
    layers, outside = _sizes_of_layers(model, low_bit_bytes)
    codes, layer = max(layers, default=(0, 0))
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, head = (0 if each is None else each.weight.numel() for each in ends)
    if run.lora_rank:
        # Masters cross, are rounded, and gathered.
        largest = max(embedding, head)
        arriving = 2 * largest + 6 * largest // shards - layer_bytes - 2 * codes
        return {"gathered": 2 * codes, "crossing": max(2 * outside, arriving)}
    gathered = 2 * codes + 2 * layer
    is_tied = len({each.weight for each in ends if each is not None}) == 1

    def leaving(number: int) -> int:
        return 4 * number + (4 if run.gradient_bytes == 4 else 6) * number // shards + 2 * number * (shards > 1)

    waiting = 4 * (head + layer if is_tied else max(head, layer))
    leaves = max(leaving(head), leaving(layer), leaving(embedding) + 2 * head * (shards > 1 and not is_tied))
    return {"gathered": gathered, "crossing": max(waiting, leaves - gathered - layer_bytes)}


def _rounding(model: nn.Module, shards: int, run: MemorySettings) -> tuple[int, int]:
    """Return the bytes of host memory beyond pinned masters, and beyond gradients and low-bit weights, for all
    processes. Each process pins as many rows of a tensor as the largest shard has, and torch pins powers of two (2.13,
    https://github.com/vllm-project/vllm/issues/56410)."""
    weights = {id(weight.parameter): weight for _, weight in Inventory.of(model).weights()}

    def beyond(num_bytes: int, num_rows: int) -> int:
        largest = num_bytes * -(-num_rows // shards) // num_rows
        return shards * (1 << (largest - 1).bit_length()) - num_bytes

    of_masters = of_others = 0
    for parameter in model.parameters():
        num_rows, number, weight = parameter.shape[:1].numel(), parameter.numel(), weights.get(id(parameter))
        if run.lora_rank:
            # Beside those of an adapter, nothing is trained. Codes and scales are rows of bytes.
            of_masters += beyond(4 * number if weight is None else low_bit_bytes(weight), num_rows)
            continue
        of_masters += beyond(4 * number, num_rows)
        of_others += beyond(run.gradient_bytes * number, num_rows)
        if weight is not None:
            codes = number * weight.scheme.container.num_bits // 8
            sizes = codes, low_bit_bytes(weight) - codes
            of_others += (1 + run.rollout_ahead) * sum(beyond(size, num_rows) for size in sizes)
    return of_masters, of_others


def _quantized(model: nn.Module) -> list[torch.Tensor]:
    return [weight.parameter for _, weight in Inventory.of(model).weights()]


def _sizes_of_layers(model: nn.Module, low_bit_bytes: int) -> tuple[list[tuple[int, int]], int]:
    """Return gathered bytes and number of weights of each decoder layer, and the number of other weights."""
    quantized = {id(weight): weight for weight in _quantized(model)}
    num_quantized = num_elements(quantized.values())
    layers: dict[str, tuple[int, int]] = {}
    outside = 0
    for name, parameter in model.named_parameters():
        layer, number = layer_of(name), parameter.numel()
        if not layer.rpartition(".")[2].isdigit():
            outside += number
            continue
        bytes_of_weight = number * low_bit_bytes / num_quantized if id(parameter) in quantized else 2 * number
        held, count = layers.get(layer, (0, 0))
        layers[layer] = held + int(bytes_of_weight), count + number
    return [*layers.values()], outside


def _gathered(model: nn.Module, low_bit_bytes: int, has_gradients: bool) -> int:
    layers, outside = _sizes_of_layers(model, low_bit_bytes)
    codes, number = max(layers, default=(0, 0))
    head = model.get_output_embeddings()
    gradients = 2 * number + (2 * head.weight.numel() if head is not None else 0)
    return 2 * codes + 2 * outside + (gradients if has_gradients else 0)


def memory_of_machine() -> int:
    """Return the bytes of memory that this machine, or its container, has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        # "max" without a limit.
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def check_host_memory(args: Any, model: Any, peft_config: Any) -> None:
    """Raise `ValueError` if FSDP2 is to keep masters in host memory, and this machine has too little for them. A
    `model` that is loaded already is not looked at."""
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() != "true" or not isinstance(model, str):
        return
    try:
        own_code = (args.model_init_kwargs or {}).get("trust_remote_code", args.trust_remote_code)
        shapes = shapes_of(model, bool(own_code), "model")
    except ValueError:
        # Loading it reports this.
        return
    optim = optimizer_name(args)
    run = MemorySettings(
        args.world_size,
        # Of others the state is counted too small.
        optim if optim in OPTIMIZERS else "adamw_torch_8bit",
        lora_rank=getattr(peft_config, "r", 0),
        rollout_ahead=args.rollout_ahead,
        gradient_bytes=2 if args.gradient_dtype == "bfloat16" else 4,
    )
    small = replace(run, optim="muon_8bit", gradient_bytes=2)
    found = parts_of_memory(shapes, args.plan, [run, small], args.exclude_modules)
    share = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)) / args.world_size
    needed, smaller = (share * on_host(parts["fsdp2_offload"]) / 1e9 for parts in found)
    available = memory_of_machine() / 1e9
    if needed > available:
        parts = {n: size for n, size in found[0]["fsdp2_offload"].items() if n.startswith("host ") and size}
        named = ", ".join(f"{name.removeprefix('host ')} {share * size / 1e9:.1f}" for name, size in parts.items())
        raise ValueError(
            f"fsdp_offload_params: true needs {needed:.1f} GB of host memory ({named}), and this machine has {available:.1f} GB. With "
            f"optim='muon_8bit' and gradient_dtype='bfloat16' it needs {smaller:.1f} GB; LoRA needs less, and more machines share it."
        )


def launch_configuration(launch: str, num_gpus: int) -> dict[str, Any]:
    """Return the content of a file for `accelerate launch --config_file`: TRL's, with settings of this launch."""
    is_sharded = launch != "ddp"
    name = "fsdp2" if is_sharded else "multi_gpu" if num_gpus > 1 else "single_gpu"
    configuration = yaml.safe_load((files("trl") / f"accelerate_configs/{name}.yaml").read_text())
    configuration["num_processes"] = num_gpus
    if is_sharded:
        configuration["fsdp_config"]["fsdp_offload_params"] = launch == "fsdp2_offload"
        configuration["fsdp_config"]["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
    return configuration
