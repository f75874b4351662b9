"""Names, fingerprints and kernels of the layers of a model in vLLM."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import RoutedExperts

from ..wire.fingerprint import fingerprints


__all__ = [
    "dtype_and_shape",
    "engine_name",
    "half_loaded_modules",
    "kernels_in_use",
    "live_fingerprints",
    "noisy_buffers",
    "owned_names",
    "sources_of_modules",
    "tied_names",
]


def live_fingerprints(model: nn.Module) -> dict[str, str]:
    """Fingerprints of all parameters and buffers of a model in its kernels' format, by their names in it."""
    tensors = {
        f"{prefix}.{leaf}" if prefix else leaf: tensor
        for prefix, layer in model.named_modules()
        for leaf, tensor in (*layer._parameters.items(), *layer._buffers.items())
        if tensor is not None
    }
    # A tensor can have several names.
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    values = fingerprints((name, tensors[name]) for name in first.values())
    return {name: values[first[id(tensor)]] for name, tensor in tensors.items()}


def dtype_and_shape(value: str) -> str:
    """Dtype and shape of a fingerprint."""
    return value.rpartition(" ")[0]


def tied_names(model: nn.Module) -> Iterator[tuple[str, str]]:
    """
    Names of parameters that are another one's tensor, and that one's name. A module that is there under several names,
    as a router is in the block and in what runs its experts, counts once.
    """
    first: dict[int, str] = {}
    for prefix, layer in model.named_modules():
        for leaf, parameter in layer._parameters.items():
            name = f"{prefix}.{leaf}" if prefix else leaf
            if parameter is not None and first.setdefault(id(parameter), name) != name:
                yield name, first[id(parameter)]


def owned_names(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Each parameter of a model in checkpoint format, and the names in a checkpoint that fill it, in their order."""
    # A model of pictures and text may leave it to its language model.
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
            if parameter is not None and isinstance(layer, RoutedExperts):
                yield f"{prefix}.{name}", [f"{parent}.{_stacked_name(layer, name)}"]
            elif parameter is not None:
                parts = packed.get(leaf, [leaf])
                names = [".".join(part for part in (parent, module, name) if part) for module in parts]
                yield f"{prefix}.{name}" if prefix else name, names


def noisy_buffers(model: nn.Module) -> list[str]:
    """
    Names of the buffers that dummy loading has filled with noise. The scales of attention have defaults, and quantized
    layers make their own.
    """
    return [
        f"{prefix}.{leaf}" if prefix else leaf
        for prefix, layer in model.named_modules()
        if not is_deferred_attention_layer(layer) and getattr(layer, "quant_method", None) is None
        for leaf, buffer in layer._buffers.items()
        if buffer is not None and leaf not in layer._non_persistent_buffers_set
    ]


def engine_name(model: nn.Module, name: str) -> str:
    """Return what [`owned_names`] calls a name in a checkpoint."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    # `packed_modules_mapping` says which shards are stacked into one parameter.
    if mapper.orig_to_new_stacked:
        mapper = replace(mapper, orig_to_new_stacked={})
    return mapper._map_name(name) or name


def half_loaded_modules(owned: Mapping[str, list[str]], arrived: set[str]) -> list[str]:
    """
    Return for which modules a part of what fills them ([`owned_names`]) has arrived: vLLM reloads a module from that,
    and the rest is uninitialized, not kept.
    """
    modules: dict[str, set[str]] = {}
    for path, names in owned.items():
        modules.setdefault(path.rpartition(".")[0], set()).update(names)
    return [
        f"{module}: the learner sent {sorted(names & arrived)}, but not {sorted(names - arrived)}"
        for module, names in modules.items()
        if names & arrived and names - arrived
    ][:5]


def sources_of_modules(owned: Mapping[str, list[str]], originals: Mapping[str, str]) -> dict[str, list[str]]:
    """Names in a checkpoint of what fills each module, of [`owned_names`] and what [`engine_name`] calls the
    `originals`."""
    sources: dict[str, list[str]] = {}
    for path, parts in owned.items():
        of_module = sources.setdefault(path.rpartition(".")[0], [])
        of_module += [originals[part] for part in parts if part in originals]
    return sources


def _stacked_name(layer: RoutedExperts, name: str) -> str:
    """The name under which vLLM's loader takes the matrices of all experts at once for its parameter `w13_*` or
    `w2_*`."""
    gate_up = "w13" if layer.ckpt_gate_proj_name == "w1" else "gate_up_proj"
    matrix, _, rest = name.partition("_weight")
    return (gate_up if matrix == "w13" else layer.ckpt_down_proj_name) + rest


def kernels_in_use(model: nn.Module) -> dict[str, int]:
    """Class names of the kernels that run linear layers and experts, and how many layers each runs."""
    counts: dict[str, int] = {}
    for layer in model.modules():
        scheme = getattr(layer, "scheme", None)
        if isinstance(layer, RoutedExperts):
            kernel = getattr(layer.quant_method, "experts_cls", None) or type(layer.quant_method)
        elif scheme is not None:
            kernel = type(getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None) or scheme)
        else:
            continue
        counts[kernel.__name__] = counts.get(kernel.__name__, 0) + 1
    return counts
