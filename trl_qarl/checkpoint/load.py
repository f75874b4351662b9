"""
Loads a low-bit checkpoint, such as one of [`~trl_qarl.checkpoint.export.export_checkpoint`], as a model whose
quantized layers hold only codes and scales, without a high-precision copy.
"""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from copy import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    FineGrainedFP8Config,
    GenerationConfig,
    Mxfp4Config,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from ..quantization.experts import DOWN, QuantizedExperts
from ..quantization.fixed_scales import fix_scales, held_scale, weight_name
from ..quantization.formats.registry import CHECKPOINT_NAMES
from ..quantization.inventory import Inventory
from ..quantization.names import base_state_dict, find_checkpoint_names, is_adapted, method_of
from ..quantization.schemes import SCHEMES, QuantScheme
from ..quantization.swap import quantize_layer, restore_model
from ..quantization.tensors import LowBitTensor
from ..replacing import replaced
from ..wire.describe import scheme_of_group
from ..wire.protocol import tensor_name
from . import gptq
from .record import read_json


logger = logging.getLogger(__name__)

DEQUANTIZED = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
"""Options with which transformers loads releases in high precision, by their `quant_method`: E4M3 codes with a scale
for each block, as of DeepSeek-V3, and gpt-oss' experts."""

_LOW_BIT = ("compressed-tensors", "gptq")

SHARDS_FOLDER = "pytorch_model_fsdp_0"
"""Folder of a checkpoint in which accelerate writes FSDP2's parts of the model."""


def is_low_bit_checkpoint(name_or_path: str, revision: str | None = None) -> bool:
    """Return whether a folder, or a model on the Hub, is a checkpoint of compressed-tensors or of GPTQ."""
    return is_low_bit(_quantization_of(name_or_path, revision))


def dequantizing(name_or_path: str, revision: str | None = None) -> dict[str, Any]:
    """Return the arguments with which transformers loads a release in one of the formats of [`DEQUANTIZED`] in high
    precision on any device; none for other checkpoints."""
    options = DEQUANTIZED.get(method_of(_quantization_of(name_or_path, revision)))
    return {"quantization_config": options(dequantize=True)} if options else {}


def reading_partial_blocks() -> AbstractContextManager[None]:
    """Return a context in which transformers also expands matrices whose last blocks are smaller than the others,
    such as DeepSeek-V3's of 576 rows: it divides rows by the number of scales, and raises, or takes those of others
    (5.17)."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    theirs = Fp8Dequantize._dequantize_one

    def dequantize(self: Any, codes: torch.Tensor, scales: torch.Tensor, output_dtype: Any = None) -> torch.Tensor:
        sizes, (rows, columns) = self.hf_quantizer.quantization_config.weight_block_size, codes.shape[-2:]
        # Codes in FP4 are two to a byte.
        if sizes and codes.is_floating_point():
            short = [-rows % sizes[0], -columns % sizes[1]]
            if tuple(scales.shape[-2:]) == ((rows + short[0]) // sizes[0], (columns + short[1]) // sizes[1]):
                codes = nn.functional.pad(codes.float(), (0, short[1], 0, short[0]))
        return theirs(self, codes, scales, output_dtype)[..., :rows, :columns]

    return replaced(Fp8Dequantize, _dequantize_one=dequantize)


def keep_masters_precise(model: nn.Module) -> None:
    """Have a model that transformers expanded from a quantized release be saved in high precision: the conversions by
    which it was loaded, reverted, would quantize the masters (5.17)."""
    conversions = getattr(model, "_weight_conversions", None) or ()
    if any(hasattr(each, "hf_quantizer") for one in conversions for each in getattr(one, "operations", ())):
        model._weight_conversions = None


def _quantization_of(name_or_path: str, revision: str | None) -> dict[str, Any] | None:
    path = cached_file(
        name_or_path, "config.json", revision=revision or "main", _raise_exceptions_for_missing_entries=False
    )
    return None if path is None else read_json(Path(path)).get("quantization_config")


def is_low_bit(described: Any) -> bool:
    """Return whether a `quantization_config` is that of a checkpoint of compressed-tensors or GPTQ."""
    return method_of(described) in _LOW_BIT


def check_release(name_or_path: str, described: Any) -> None:
    """Raise `ValueError` if no training can start from a checkpoint with this `quantization_config`, if any."""
    method = method_of(described)
    if is_low_bit(described):
        _schemes_of(name_or_path, described)
    elif described is not None and method not in DEQUANTIZED:
        raise ValueError(
            f"{name_or_path} is quantized with quant_method={method!r}. Training starts from {', '.join((*_LOW_BIT, *DEQUANTIZED))} with symmetric codes, or "
            "from a checkpoint in high precision: name the model that was quantized."
        )


def _schemes_of(name_or_path: str, described: Any) -> list[tuple[list[str], QuantScheme]]:
    """Return targets and scheme of each group of a low-bit checkpoint, or of gpt-oss' experts."""
    method = method_of(described)
    groups = gptq.config_groups(described) if method == "gptq" else described.get("config_groups", {})
    if method == "mxfp4":
        groups = {"group_0": {"targets": ["Linear"], "weights": SCHEMES["mxfp4a16"].weight_args(32)}}
    # A layer's scales tell its group size.
    schemes = [(group["targets"], scheme_of_group(name, group)) for name, group in groups.items()]
    if any(not group["weights"].get("symmetric", True) for group in groups.values()):
        raise ValueError(
            f"{name_or_path} is a checkpoint with zero points (`symmetric: false`), which are unsupported. Start from "
            "the high-precision checkpoint, or quantize it again with a symmetric scheme such as W4A16."
        )
    # compressed-tensors has two names for it.
    if any(group["weights"].get("actorder") in ("group", "dynamic", True) for group in groups.values()):
        raise ValueError(
            f"{name_or_path} was quantized with reordered columns (act-order), which no kernel here supports. Quantize it again with "
            "`desc_act=False`, or in llm-compressor `actorder='static'`."
        )
    if not schemes or any(scheme is None for _, scheme in schemes):
        raise ValueError(
            f"{name_or_path} is a low-bit checkpoint with other schemes than {[*SCHEMES][:-1]} and their group sizes: it has "
            f"{'; '.join(map(_described, groups.values())) or 'none'}. Start from the high-precision checkpoint."
        )
    return [(targets, scheme) for targets, scheme in schemes if scheme is not None]


def auto_class(config: PreTrainedConfig) -> type:
    """Return the auto class that loads a generating model, of text, of pictures and text, or of sound too. That of
    text would load Qwen3.5 without its tower."""
    with_tower = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
    return next((auto for auto in with_tower if type(config) in auto._model_mapping), AutoModelForCausalLM)


def skeleton(
    config: PreTrainedConfig, trust_remote_code: bool = False, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Return the model of a configuration without its weights, on the meta device; one of a low-bit checkpoint with
    layers as in high precision."""
    described = getattr(config, "quantization_config", None)
    if is_low_bit(described) or method_of(described) in DEQUANTIZED:
        config = copy(config)
        del config.quantization_config
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trust_remote_code, **options)


def weight_files(folder: str | Path) -> list[Path]:
    """Return the files with a folder's weights, those that transformers would load: `model.safetensors`, else the
    shards that its index names; none without either. `ValueError` names a missing shard."""
    folder = Path(folder)
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if missing := [path.name for path in files if not path.is_file()]:
        raise ValueError(f"{folder} lacks {missing[0]!r}, which its {index.name} names. Copy or export it again.")
    return files


def load_frozen_model(
    name_or_path: str,
    dtype: torch.dtype | str | None = "float32",
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """
    Load a low-bit checkpoint, or a release of gpt-oss, a folder or a name on the Hub, as a model in the state after
    [`~trl_qarl.quantization.swap.prepare_model`] and [`~trl_qarl.quantization.swap.freeze_model`]. Tensors that are
    not quantized are in `dtype`, with `"auto"` in the checkpoint's; the other options are those of `from_pretrained`.

    `ValueError` is raised if the checkpoint has schemes that this package does not have, or lacks tensors.
    """
    folder = Path(name_or_path)
    if not folder.is_dir():
        folder = Path(snapshot_download(name_or_path, revision=revision))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    described = config.quantization_config
    del config.quantization_config
    is_gptq, is_mxfp4 = (method_of(described) == method for method in ("gptq", "mxfp4"))
    schemes = _schemes_of(name_or_path, described)
    dtype = config.dtype if dtype in ("auto", None) else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    options = {"attn_implementation": attn_implementation} if attn_implementation else {}
    cls = getattr(transformers, (config.architectures or [""])[0], None)
    # Buffers are computed, as checkpoints do not contain them.
    with init_empty_weights(include_buffers=False):
        if cls is None:
            options["trust_remote_code"] = trust_remote_code
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
        else:
            model = cls._from_config(config, dtype=dtype, **options)
    tensors = {name: tensor for path in weight_files(folder) for name, tensor in load_file(path).items()}
    if not tensors:
        raise ValueError(f"{folder} has neither model.safetensors nor its index. Export it again.")
    if described.get("kv_cache_scheme"):
        logger.warning(
            "%s stores keys and values in low bits (kv_cache_scheme). Here, and in exports, they stay in high precision.",
            name_or_path,
        )
        tensors = {name: t for name, t in tensors.items() if not name.endswith(("attn.k_scale", "attn.v_scale"))}
    if is_gptq:
        tensors = gptq.as_compressed_tensors(tensors, described)
    if is_mxfp4:
        tensors = dict(_one_by_one(tensors))
    _fill(model, folder, tensors, schemes, dtype)
    _complete(model, folder, str(name_or_path), "Export it again.")
    return model.requires_grad_(False).eval()


def _complete(model: PreTrainedModel, folder: Path, name_or_path: str, remedy: str) -> None:
    """Tie the weights of a model that was filled from a folder, and set what `from_pretrained` sets. `ValueError` is
    raised if the folder lacks tensors."""
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"{name_or_path} lacks {len(missing)} tensors, such as {missing[0]!r}. {remedy}")
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config._name_or_path = model.name_or_path = name_or_path


def _one_by_one(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of gpt-oss' release, with codes and scales of each expert under vLLM's names."""
    leaves = {"gate_up_proj": "w13", "down_proj": "w2", "blocks": "weight_packed", "scales": "weight_scale"}
    for name, tensor in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        matrix, _, kind = leaf.rpartition("_")
        if matrix in leaves and kind in leaves:
            for expert, part in enumerate(tensor.flatten(2) if kind == "blocks" else tensor):
                yield f"{prefix}.{expert}.{leaves[matrix]}_{leaves[kind]}", part
        else:
            yield name, tensor


def _described(group: dict[str, Any]) -> str:
    """Return a group of a `quantization_config` as text."""
    parts = []
    for part in ("weights", "input_activations"):
        if args := group.get(part):
            size = f" of {args['group_size']}" if args.get("group_size") else ""
            # Of weights all scales are fixed.
            fixed = " with fixed scales" if part != "weights" and not args.get("dynamic") else ""
            parts.append(f"{part} in {args['type']}{args['num_bits']} per {args['strategy']}{size}{fixed}")
    return " and ".join(parts)


def holds_shards(folder: str | Path) -> bool:
    """Return whether a folder holds masters only in the parts that FSDP2's processes saved, which transformers does
    not read."""
    return Path(folder, SHARDS_FOLDER, ".metadata").is_file() and not weight_files(folder)


@torch.no_grad()
def load_shards(folder: str | Path, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
    """Load a checkpoint of FSDP2 with `SHARDED_STATE_DICT` as a model with whole masters, in one process, with
    `options` of transformers' `from_config`. `ValueError` is raised if it lacks tensors."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    options |= {"trust_remote_code": trust_remote_code, "dtype": torch.float32}
    with init_empty_weights(include_buffers=False):
        model = auto_class(config).from_config(config, **options)
    reader = dcp.FileSystemReader(Path(folder, SHARDS_FOLDER))
    saved = {name.removeprefix("model.") for name in reader.read_metadata().state_dict_metadata}
    state = {name: torch.empty_like(t, device="cpu") for name, t in model.state_dict().items() if name in saved}
    dcp.load({"model": state}, storage_reader=reader, no_dist=True)
    model.load_state_dict(state, strict=False, assign=True)
    _complete(model, Path(folder), str(folder), "Take an earlier checkpoint.")
    return model


@torch.no_grad()
def load_masters(name_or_path: str, **options: Any) -> PreTrainedModel:
    """
    Load a low-bit checkpoint, such as one of GPTQ, AutoRound or quantization-aware training, as a model in float32 for
    training: its masters are the checkpoint's weights, and `prepare_model` keeps the checkpoint's scales
    ([`trl_qarl.quantization.fixed_scales`]). Schemes and group sizes are logged. `options` and errors are those of
    [`load_frozen_model`]; NVFP4 raises `ValueError` too.
    """
    model = load_frozen_model(name_or_path, **options)
    scales = {}
    layers = Inventory.of(model).layers
    settings = dict.fromkeys((layer.scheme.name, layer.group_size) for layer in layers.values())
    for name, layer in layers.items():
        for leaf, weight in layer.quantized_weights.items():
            scales[weight_name(name, leaf)] = held_scale(weight)
            shape = (layer.num_experts, -1) if isinstance(layer, QuantizedExperts) else (-1,)
            masters = weight.low_bit_weight().dequantize(torch.float32)
            setattr(layer, leaf, nn.Parameter(weight.source.stored(masters.unflatten(0, shape))))
    restore_model(model)
    fix_scales(model, scales)
    groups = " and ".join(f"scheme={name!r}, group_size={size}" for name, size in settings)
    logger.info("%s: masters with fixed scales of %s", name_or_path, groups)
    return model.requires_grad_(True)


@torch.no_grad()
def load_renamed(model: nn.Module, folder: str | Path) -> None:
    """
    Load, in place, tensors of masters on disk that have another name there than in the model: experts of a mixture,
    tensors around them, and models of pictures, which transformers saves under names of an earlier release.
    transformers' Trainer only looks for the model's names, and skips other tensors with a warning (5.17). `ValueError`
    is raised if experts are stored under unknown names.
    """
    files = {name: path for path in weight_files(folder) for name in _names_in(path)}
    if is_adapted(model) or not files:
        return
    inventory = Inventory.of(model)
    names = find_checkpoint_names(inventory.model, inventory.modules, is_release=False)
    stacked = inventory.stacked_experts.keys() | names.experts.keys()
    for name, tensor in base_state_dict(inventory.model).items():
        if name in files:
            continue
        parts, places = [names.of_tensor(name)], [tensor]
        if name in names.experts and name not in names.tensors:
            parts = [f"{matrix}.weight" for matrix in names.experts[name]]
            places = tensor.flatten(0, 1).chunk(len(parts))
        if all(part in files for part in parts):
            for part, place in zip(parts, places, strict=True):
                with safe_open(files[part], "pt") as file:
                    place.copy_(file.get_tensor(part))
        elif name in stacked:
            raise ValueError(
                f"{folder} holds {name!r} under no name that is known here, and transformers would not load these experts. Start a "
                "new run from its weights: pass it as `model` instead of `resume_from_checkpoint`."
            )


def _names_in(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _scheme_of(name: str, schemes: list[tuple[list[str], QuantScheme]], folder: Path) -> QuantScheme:
    """Return the scheme of a layer, matched as in compressed-tensors: first names, then expressions, then classes."""
    for fits in (
        lambda target: target == name,
        lambda target: target.startswith("re:") and re.match(target[3:], name),
        lambda target: target == "Linear",
    ):
        for targets, scheme in schemes:
            if any(fits(target) for target in targets):
                return scheme
    raise ValueError(f"{folder} holds low-bit tensors of {name!r}, which no group of its configuration targets.")


def _fill(
    model: PreTrainedModel,
    folder: Path,
    tensors: dict[str, torch.Tensor],
    schemes: list[tuple[list[str], QuantScheme]],
    dtype: torch.dtype,
) -> None:
    if reordered := [name for name in tensors if name.endswith(".weight_g_idx")]:
        raise ValueError(
            f"{folder} was quantized with reordered columns (actorder: group), given by {reordered[0]!r}. No kernel here supports "
            "that. Quantize it again with `actorder='static'`."
        )
    suffix = "weight_scale"
    scales = {name.removesuffix(suffix).removesuffix("."): t for name, t in tensors.items() if name.endswith(suffix)}
    low_bit = {
        name: {leaf: tensors.pop(of) for leaf in CHECKPOINT_NAMES if (of := tensor_name(name, leaf)) in tensors}
        for name in scales
    }
    inventory = Inventory.of(model)
    # Releases of models of pictures, and exports, have the names of earlier releases of transformers.
    known = [find_checkpoint_names(inventory.model, inventory.modules, is_release) for is_release in (True, False)]
    names = known[0]
    in_model = {of: name for each in known for name, of in each.tensors.items()}
    dense = {in_model.get(n, n): t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    unexpected = model.load_state_dict(dense, strict=False, assign=True).unexpected_keys
    if unexpected:
        raise ValueError(f"{folder} holds tensors that {type(model).__name__} does not have: {unexpected[:3]}.")

    for name, module in inventory.quantizable.items():
        parts = {
            leaf: names.experts[f"{name}.{leaf}"]
            for leaf, _ in module.named_parameters(recurse=False)
            if f"{name}.{leaf}" in names.experts and not leaf.endswith("_bias")
        }
        stored = [parts[DOWN][0]] if parts else [name, *(each.of_tensor(name) for each in known)]
        if not (first := next(filter(low_bit.__contains__, stored), None)):
            continue
        scheme = _scheme_of(first, schemes, folder)
        # The dtype of scales is the engine's, unless the container prescribes one.
        scale_dtype = scales[first].dtype if scheme.container.scale_dtype is None else model.config.dtype
        layer = quantize_layer(module, scheme, scale_dtype)
        for leaf, matrices in (parts or {"weight": [first]}).items():
            missing = [matrix for matrix in matrices if matrix not in low_bit]
            if missing:
                raise ValueError(
                    f"{folder} lacks {missing[0]!r} and holds other experts of {name!r}. Export it again."
                )
            read = [LowBitTensor.from_checkpoint(low_bit.pop(matrix), layer.scheme, dtype) for matrix in matrices]
            layer.quantized_weights[leaf].hold(LowBitTensor.stack(read))
        model.set_submodule(name, layer)
    if low_bit:
        raise ValueError(
            f"{folder} holds low-bit tensors that {type(model).__name__} does not have: {[*low_bit][:3]}."
        )
