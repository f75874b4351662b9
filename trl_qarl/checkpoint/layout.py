"""Names and layout of the low-bit policy in compressed-tensors' format, for engines, disk and Hub."""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..models import IN_FLOAT32, is_router
from ..quantization.experts import DOWN, QuantizedExperts, is_released_form
from ..quantization.formats.registry import format_of
from ..quantization.inventory import Inventory, LayerWeights, fails_in_transformers, layers_outside_decoder
from ..quantization.names import CheckpointNames
from ..quantization.plan import fused_layers
from ..quantization.schemes import SCHEMES, QuantScheme
from ..quantization.storage import shapes_of, storage_of, whole
from ..quantization.tensors import LowBitTensor
from ..wire.describe import group_name
from ..wire.protocol import is_parameter, stacked_name, tensor_name


def iter_checkpoint_layers(
    model: nn.Module, dtype: torch.dtype, stacks_experts: bool = False, to_main: bool = False
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """
    Yield the tensors of the low-bit policy under their names in a checkpoint, one layer at a time, on the model's
    device. Tensors that are not quantized are in `dtype`, or in float32 ([`~trl_qarl.models.IN_FLOAT32`]); of tied
    tensors only the first is included. With sharded masters every process has to go through all layers; with `to_main`
    the tensors of processes other than the main one may have no values and be on the meta device. With
    `stacks_experts` the matrices of a layer's experts form one tensor with a
    [`~trl_qarl.wire.protocol.stacked_name`]: 6 tensors instead of 1,152 for 128 experts.
    """
    seen: set[Hashable] = set()
    inventory = Inventory.of(model)
    for layer in inventory.walk():
        yield list(_checkpoint_tensors(layer, dtype, seen, inventory.names, stacks_experts, to_main))


def _checkpoint_tensors(
    layer: LayerWeights, dtype, seen, names: CheckpointNames, stacks_experts: bool, to_main: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    quantized = layer.quantized
    for name, tensor in layer.tensors.items():
        if name in quantized:
            tensor = quantized[name].whole_low_bit(to_main)
        if isinstance(tensor, LowBitTensor):
            matrices = names.experts.get(name) or [names.of_tensor(name).removesuffix(".weight")]
            if name in names.experts and is_released_form(tensor.scheme):
                codes, scales = tensor.parts()
                if stacks_experts:
                    yield from _stacked(matrices, {"weight": codes, "weight_scale": scales})
                else:
                    codes, scales = (part.unflatten(0, (len(matrices), -1)).detach() for part in (codes, scales))
                    yield f"{names.of_tensor(name)}_blocks", codes.unflatten(-1, (-1, 16))
                    yield f"{names.of_tensor(name)}_scales", scales
                continue
            if stacks_experts and name in names.experts:
                yield from _stacked(matrices, tensor.checkpoint_tensors())
                continue
            for matrix, low_bit in zip(matrices, tensor.row_blocks(len(matrices)), strict=True):
                for key, value in low_bit.checkpoint_tensors().items():
                    if key != "weight_shape" or not is_parameter(matrix):
                        yield tensor_name(matrix, key), value.detach()
            continue
        # All sharded tensors, and those on the meta device, have the same address.
        is_placed = storage_of(tensor).is_whole and not tensor.is_meta
        identity = (tensor.data_ptr(), tensor.shape) if is_placed else id(tensor)
        if identity in seen:
            continue
        seen.add(identity)
        kept = torch.float32 if name.endswith(IN_FLOAT32) else dtype
        value = whole(tensor, kept if tensor.is_floating_point() else None, to_main).detach()
        matrices = names.experts.get(name)
        if matrices and stacks_experts:
            if (
                value.ndim == 3
                and layer.modules[name.rpartition(".")[0]].is_transposed
                and not is_parameter(matrices[0])
            ):
                value = value.mT
            yield from _stacked(matrices, {"bias" if name.endswith("_bias") else "weight": value.flatten(0, 1)})
        elif matrices and name not in names.tensors:
            yield from zip((f"{n}.weight" for n in matrices), value.flatten(0, 1).chunk(len(matrices)), strict=True)
        else:
            yield names.of_tensor(name), value


def _stacked(matrices: list[str], tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors `(E, ...)` of a parameter of experts, with the rows of an expert's matrices in order."""
    num_experts = int(matrices[-1].rsplit(".", 2)[1]) + 1
    for key, value in tensors.items():
        if key == "weight_shape":
            if is_parameter(matrices[0]):
                continue
            shape = value // value.new_tensor([len(matrices), 1])
            value = shape.repeat(num_experts, len(matrices) // num_experts, 1)
        else:
            value = value.unflatten(0, (num_experts, -1))
        yield stacked_name(matrices, key), value.detach()


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise `ValueError` if a tensor of the low-bit policy is not finite, with its name and row. A master that is not
    finite makes the scale of its group so."""
    for name, tensor in tensors:
        if tensor.dtype is torch.uint8 and name.endswith(("_scale", "_scales")):
            # Powers of two, of which 255 is NaN.
            is_finite = tensor != 255
        elif tensor.is_floating_point() and (tensor.itemsize > 1 or name.endswith("_scale")):
            # A sum of numbers that are all finite may overflow, but one of others is never finite; on a CPU it takes a
            # thirtieth of the time.
            if tensor.itemsize > 1 and tensor.sum().isfinite():
                continue
            is_finite = tensor.float().isfinite() if tensor.itemsize == 1 else tensor.isfinite()
        else:
            continue
        if not is_finite.all():
            place = (~is_finite).nonzero()[0].tolist()
            rows = place[:-1] or place
            raise ValueError(
                f"{name}: row {', '.join(map(str, rows))} is not finite ({tensor[tuple(place)].item()}), so a master of this layer is NaN or "
                "infinite. Start again from an earlier checkpoint, with a lower `learning_rate` or `max_grad_norm`."
            )


def iter_checkpoint_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of [`iter_checkpoint_layers`] one by one, sharded ones with values in the main process."""
    return chain.from_iterable(iter_checkpoint_layers(model, dtype, to_main=True))


def quantization_config(inventory: Inventory) -> dict[str, Any]:
    """Return the `quantization_config` for a model's `config.json`, as defined by compressed-tensors, with a group for
    each scheme and group size, or that of gpt-oss' releases; empty if nothing is quantized. `ValueError` is raised
    where layers that vLLM holds as one matrix have several global scales."""
    formats, names = inventory.formats, inventory.names
    if not formats:
        return {}
    scales = inventory.global_scales
    for fused in fused_layers(scales):
        group = {name: scales[name] for name in fused}
        if len(set(group.values())) > 1:
            raise ValueError(
                f"The global scales {group} differ, but vLLM holds these layers in one matrix and would apply one scale to all. Prepare "
                "the model as a whole (`prepare_model`)."
            )
    by_format: dict[tuple[QuantScheme, int | None], list[str]] = defaultdict(list)
    for name, (scheme, group_size) in formats.items():
        by_format[scheme, group_size].append(name)
    # compressed-tensors refuses an expression that matches another module, such as `proj` in towers of Qwen2.5-VL, a
    # convolution, or `q_proj` in those of Gemma 4, which contains a linear layer.
    others = {name for name, module in inventory.modules.items() if name and not isinstance(module, nn.Linear)}
    layers = [*formats, *sorted(others - formats.keys())]
    groups = {}
    for index, ((scheme, group_size), members) in enumerate(by_format.items()):
        groups[group_name(index, scheme)] = {
            "targets": ["Linear"] if len(by_format) == 1 else _targets(members, layers, names),
            "weights": scheme.weight_args(group_size),
            "input_activations": scheme.activation_args,
            "output_activations": None,
            "format": scheme.container.checkpoint_format,
        }
    ignore = [
        each
        for name, module in inventory.modules.items()
        if _is_matrix(name, module) and name not in formats
        for each in names.of_both(name)
    ]
    # vLLM's classes call and fuse layers of towers otherwise.
    ignore += [f"re:(.*\\.)?{re.escape(part)}\\..*" for part in _unquantized_towers(inventory)]
    experts = [layer for layer in inventory.layers.values() if isinstance(layer, QuantizedExperts)]
    if any(is_released_form(layer.scheme) for layer in experts):
        # Readers of gpt-oss' releases know the form; the groups are for this package.
        return {"quant_method": "mxfp4", "modules_to_not_convert": ignore, "config_groups": groups}
    checkpoint_formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": checkpoint_formats.pop() if len(checkpoint_formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _unquantized_towers(inventory: Inventory) -> list[str]:
    """Return the names within the model of the modules next to the language model that have no quantized layer."""
    names = {next(part for part in name.split(".") if part != "model") for name in layers_outside_decoder(inventory)}
    return sorted(name for name in names if not any(name in layer.split(".") for layer in inventory.formats))


def _is_matrix(name: str, module: nn.Module) -> bool:
    """Return whether engines may treat a module as a linear layer; routers of transformers are not `nn.Linear`."""
    if isinstance(module, nn.Linear):
        return True
    return is_router(name) and len(shapes_of(module).get("weight", ())) == 2


def loads_in_transformers(inventory: Inventory) -> bool:
    """Return whether transformers can read the checkpoint. For experts it supports only FP8 codes and packed codes
    (5.17), and in models whose checkpoints stack them only those of gpt-oss' releases."""
    if any(fails_in_transformers(inventory.model, name, scheme) for name, (scheme, _) in inventory.formats.items()):
        return False
    return all(
        is_released_form(layer.scheme)
        or (
            format_of(layer.scheme.container).experts_in_transformers
            and f"{name}.{DOWN}" not in inventory.names.tensors
        )
        for name, layer in inventory.layers.items()
        if isinstance(layer, QuantizedExperts)
    )


def _targets(members: list[str], layers: Iterable[str], names: CheckpointNames) -> list[str]:
    # A last component that occurs only in this group matches all of its layers with this name.
    chosen = set(members)
    shared = {leaf for name in layers if name not in chosen for leaf in _leaves(name, names)}
    # transformers uses the group with "experts" in an expression for all experts.
    # vLLM gives the layers of MiniMax-M2 transformers' names, not the checkpoint's.
    experts = {each for name in members if (prefix := _prefix_of_experts(name, names)) for each in (prefix, name)}
    whole = [f"re:{each}\\.[0-9]+\\..*" for each in sorted({*map(_expression, experts)})]
    linears = [name for name in members if not _prefix_of_experts(name, names)]
    own = {leaf for name in linears if not (leaf := _leaf(name)).isdigit()} - shared
    whole += [f"re:.*\\.{re.escape(leaf)}$" for leaf in sorted(own)]
    return whole + [each for name in linears if _leaf(name) not in own for each in names.of_both(name)]


def _expression(name: str) -> str:
    """Return an expression for a name. vLLM's classes of pictures and text call `model.language_model` otherwise
    (`language_model.model`), and leave expressions as they are."""
    _, inside, rest = name.partition("language_model.")
    return f".*{re.escape(rest)}" if inside else re.escape(name)


def _leaf(name: str) -> str:
    """Return the last component of a name; of a layer in a list, that of the list with its number."""
    return re.search(r"[^.]+(\.\d+)*$", name)[0]  # pyrefly: ignore[unsupported-operation]


def _leaves(name: str, names: CheckpointNames) -> set[str]:
    """Return the last components of a layer's names in a checkpoint; for experts, those of their matrices."""
    experts = [of for parameter, of in names.experts.items() if parameter.rpartition(".")[0] == name]
    return {matrix.rpartition(".")[2] for matrices in experts for matrix in matrices} or {_leaf(name)}


def _prefix_of_experts(name: str, names: CheckpointNames) -> str | None:
    """Return the prefix of the names of a layer's experts in a checkpoint; `None` for a linear layer."""
    matrices = names.experts.get(f"{name}.{DOWN}")
    return matrices[0].rsplit(".", 2)[0] if matrices else None


def problem_of_mixture(inventory: Inventory, schemes: Mapping[str, QuantScheme]) -> str | None:
    """Return the reason why vLLM cannot run the experts of a model, or `None`, also for a model without experts.
    `schemes` has those of layers that are yet to be quantized, by name."""
    for path, module in inventory.experts.items():
        scheme = schemes.get(path, getattr(module, "scheme", None))
        if scheme is not None and is_released_form(scheme) and module.is_transposed:
            continue
        if scheme is not None and not _has_compared_experts(scheme):
            known = [known.name for known in SCHEMES.values() if _has_compared_experts(known)]
            return (
                f"experts ({path!r}) with scheme {scheme.name!r} are untested in vLLM. Tested are {['bf16', *known]}."
            )
        if scheme is not None and module.has_bias and scheme.container.checkpoint_format != "pack-quantized":
            return (
                f"experts ({path!r}) have biases, for which vLLM has no parameters with scheme {scheme.name!r} "
                "(compressed_tensors_moe). Use 'w4a16'."
            )
    return None


def _has_compared_experts(scheme: QuantScheme) -> bool:
    return scheme.is_quantized and scheme.activation in format_of(scheme.container).experts_in_vllm
