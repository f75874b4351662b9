"""Names, fingerprints and kernels of the layers of a model in vLLM."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.model_executor.models.llama4 import Llama4Attention
from vllm.model_executor.models.utils import WeightsMapper

from ..wire.fingerprint import fingerprints
from .linear_kernels import LowBitKernel


def live_fingerprints(model: nn.Module, rows: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the fingerprints of all parameters and buffers of a model in its kernels' format, by name. A parameter in
    `rows` has one for each of these numbers of rows in [`rows_as_loaded`], by [`part_name`]."""
    tensors, keys = {}, {}
    for prefix, layer in model.named_modules():
        for named in (layer.named_parameters, layer.named_buffers):
            for name, tensor in named(prefix, recurse=False, remove_duplicate=False):
                parts = {name: tensor}
                if name in rows:
                    split = rows_as_loaded(layer, name.rpartition(".")[2]).split(rows[name])
                    parts = {part_name(name, i): part for i, part in enumerate(split)}
                tensors |= parts
                keys |= {part: (id(tensor), i) for i, part in enumerate(parts)}
    # A tensor can have several names.
    first = {keys[name]: name for name in reversed(tensors)}
    values = fingerprints((name, tensors[name]) for name in first.values())
    return {name: values[first[keys[name]]] for name in tensors}


def part_name(name: str, index: int) -> str:
    """Return the name of the rows of a parameter that one tensor of a checkpoint fills."""
    return f"{name}[{index}]"


def rows_as_loaded(layer: nn.Module, name: str) -> torch.Tensor | None:
    """Return a large parameter of a layer as it is in a checkpoint, without a copy of more than that layer's rows, or
    `None` if the layer may keep it in another form."""
    kernel = _kernel_of(layer)
    if isinstance(kernel, LowBitKernel):
        return _by_heads(layer, kernel.codes_as_loaded(layer)) if name == kernel.codes_name else None
    is_embedding = type(getattr(layer, "quant_method", None)) is UnquantizedEmbeddingMethod
    return layer.weight.data if is_embedding and name == "weight" else None


def as_in_checkpoints(layer: nn.Module, name: str) -> torch.Tensor:
    """Return a loaded parameter of a layer in the form of a checkpoint: vLLM's loader of gpt-oss transposes the
    matrices of unquantized experts, and others reorder rows ([`mark_rows_by_heads`])."""
    tensor = _by_heads(layer, getattr(layer, name).data)
    is_unquantized = isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)
    return tensor.mT if is_unquantized and isinstance(layer, GptOssRoutedExperts) and tensor.ndim == 3 else tensor


def drop_unused_norms(model: nn.Module) -> None:
    """Remove a norm that checkpoints do not have and nothing reads: vLLM makes one for the output of experts in the
    dense layers of A.X-K1 too (models/AXK1.py)."""
    for layer in model.modules():
        if getattr(layer, "is_layer_sparse", True) is False and hasattr(layer, "post_mlp_layernorm"):
            del layer.post_mlp_layernorm


def mark_rows_by_heads(model: nn.Module) -> None:
    """Mark the layers of `model` whose rows a checkpoint holds head by head, where vLLM has all queries first, and
    those of Llama 4, in which vLLM has the first features of all pairs first."""
    for module in model.modules():
        kind = type(module)
        # By name: from 0.32 on vLLM has none of GPT-NeoX, and runs transformers' class of this name.
        is_by_heads = kind.__name__ in ("BloomAttention", "FalconAttention", "GPTNeoXAttention")
        if is_by_heads and kind.__module__.startswith("vllm."):
            module.query_key_value.has_rows_by_heads = True
        if isinstance(module, Llama4Attention):
            # In an engine with LoRA it is wrapped.
            getattr(module.qkv_proj, "base_layer", module.qkv_proj).size_of_rotated_heads = module.head_dim


def _by_heads(layer: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a layer in the order of a checkpoint, if the layer is marked, else as they are: for each head
    of keys its queries, key and value, or for Llama 4 the two features of each pair that turns next to each other."""
    if size := getattr(layer, "size_of_rotated_heads", None):
        *rotated, values = tensor.split(layer.output_partition_sizes)
        pairs = [part.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2) for part in rotated]
        return torch.cat([*pairs, values])
    if not hasattr(layer, "has_rows_by_heads"):
        return tensor
    heads = layer.num_kv_heads
    parts = [part.unflatten(0, (heads, -1)) for part in tensor.split(layer.output_sizes)]
    return torch.cat(parts, 1).flatten(0, 1)


def first_names(model: nn.Module) -> dict[str, str]:
    """Return the names of persistent buffers, which checkpoints may hold, and further names of parameters, each with
    the name in [`live_fingerprints`], the first one: in vLLM's Transformers backend a mixture's block and its experts
    have the same router."""
    state, first = model.state_dict(keep_vars=True), {}
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return {name: first[id(state[name])] for name in state.keys() - dict(model.named_parameters())}


def tied_names(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each parameter that shares another one's tensor, and the other's name. A module with several
    names, such as a router that is shared by block and experts, counts once."""
    first: dict[int, str] = {}
    for prefix, layer in model.named_modules():
        for name, parameter in layer.named_parameters(prefix, recurse=False, remove_duplicate=False):
            if first.setdefault(id(parameter), name) != name:
                yield name, first[id(parameter)]


def owned_names(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield each parameter of a model in checkpoint format, with the names in a checkpoint that fill it, in order.
    Parameters that the model's loader maps itself, such as those of experts, have their own name."""
    # In a model of pictures and text, the language model may have the mapping.
    packed = {}
    for module in model.modules():
        packed = (getattr(module, "packed_modules_mapping", None) or {}) | packed
    seen: set[int] = set()
    for prefix, layer in model.named_modules():
        # Attention layers hold cache scales, which have defaults.
        if is_deferred_attention_layer(layer) or id(layer) in seen:
            continue
        seen.add(id(layer))
        parent, _, leaf = prefix.rpartition(".")
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                parts = packed.get(leaf, [leaf])
                names = [".".join(part for part in (parent, module, name) if part) for module in parts]
                yield f"{prefix}.{name}" if prefix else name, names


def mappers_of_names(model: nn.Module) -> list[tuple[str, WeightsMapper]]:
    """Return how vLLM renames the tensors of a checkpoint: the prefix of each model inside `model`, outer ones first,
    and its mapper of the names within."""
    mappers = [
        (f"{prefix}." if prefix else "", module.hf_to_vllm_mapper)
        for prefix, module in model.named_modules()
        if getattr(module, "hf_to_vllm_mapper", None) is not None
    ]
    # `packed_modules_mapping` has the shards that are stacked into one parameter.
    return [(prefix, replace(mapper, orig_to_new_stacked={})) for prefix, mapper in mappers]


def engine_name(mappers: Sequence[tuple[str, WeightsMapper]], name: str) -> str:
    """Return the name in [`owned_names`] for a name in a checkpoint, by [`mappers_of_names`]."""
    for prefix, mapper in mappers:
        if name.startswith(prefix):
            inside = name.removeprefix(prefix)
            name = prefix + (mapper.map_name(inside) or inside)
    return name


def is_unused(model: nn.Module, name: str) -> bool:
    """Return whether a tensor, by [`engine_name`], that is not among those of an engine is of a tower: vLLM makes
    neither layers after the one whose output is read (`vision_feature_layer` of LLaVA) nor their norm, and no tower
    for videos alone (LLaVA-NeXT-Video)."""
    if not supports_multimodal(model):
        return False
    inside = model.get_language_model()
    prefix = next((f"{prefix}." for prefix, module in model.named_modules() if module is inside), "")
    return not name.startswith((prefix, "lm_head."))


def names_by_module(owned: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the names of [`owned_names`] that fill each module."""
    modules: dict[str, list[str]] = {}
    for path, names in owned.items():
        modules.setdefault(path.rpartition(".")[0], []).extend(names)
    return modules


def convolution_copies(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name of each buffer in which a Mamba 2 layer keeps the weight of its convolution for its kernel, the
    buffer, and the weight. On CPUs with bf16 instructions vLLM packs the weight, and the buffer is no longer a view of
    it, so that a reload misses it."""
    for prefix, layer in model.named_modules():
        if (buffer := layer._buffers.get("conv_weights")) is not None:
            weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", layer.conv1d.weight)
            yield f"{prefix}.conv_weights", buffer, weight.view_as(buffer)


def windows(model: nn.Module) -> list[int]:
    """Return the sliding windows of the attention layers of a model, each once, 0 for layers without one."""
    return sorted({layer.sliding_window or 0 for layer in model.modules() if isinstance(layer, Attention)})


def kernels_in_use(model: nn.Module) -> dict[str, int]:
    """Return the class names of the kernels of linear layers and experts, with the number of layers of each."""
    counts: dict[str, int] = {}
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            kernel = getattr(layer.quant_method, "experts_cls", None) or type(layer.quant_method)
        elif (used := _kernel_of(layer)) is not None:
            kernel = type(used)
        else:
            continue
        counts[kernel.__name__] = counts.get(kernel.__name__, 0) + 1
    return counts


def _kernel_of(layer: nn.Module) -> object | None:
    """Return the kernel of a quantized linear layer, or `None`."""
    scheme = getattr(layer, "scheme", None)
    return getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None) or scheme
