"""The base model of an adapter: loading, freezing, merging and fingerprints."""

import hashlib
import logging
from collections.abc import Mapping, Set
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME
from trl.trainer.utils import create_model_from_path

from ..checkpoint.export import is_export
from ..checkpoint.load import (
    dequantizing,
    holds_shards,
    is_low_bit_checkpoint,
    keep_masters_precise,
    load_frozen_model,
    load_masters,
    load_shards,
    reading_partial_blocks,
)
from ..checkpoint.scales import keep_scales
from ..quantization.experts import QuantizedExperts
from ..quantization.inventory import Inventory, layer_format, layers_outside_decoder, reasons_to_skip, split_experts
from ..quantization.linear import QuantizedLinear
from ..quantization.names import adapted_layers, base_model
from ..quantization.plan import QuantPlan, get_plan
from ..quantization.schemes import QuantScheme
from ..quantization.swap import SwapReport, assign_schemes, freeze_model, report_frozen, swap_layers
from ..quantization.tensors import LowBitTensor
from .tensors import is_adapter_folder


if TYPE_CHECKING:
    from peft import PeftConfig


logger = logging.getLogger(__name__)


def load_policy(name_or_path: str, peft_config: Any, model_init_kwargs: dict[str, Any]) -> nn.Module:
    """Load the policy for `model="..."`: a folder with an adapter, on the base that it names, to continue training; a
    low-bit checkpoint as masters, or as the base of an adapter, without a high-precision copy; a checkpoint of FSDP2;
    other models like TRL. Masters keep the scales of the low-bit checkpoint with which their training began."""
    if is_adapter_folder(name_or_path):
        return load_adapter(name_or_path, model_init_kwargs, is_trainable=True)
    if is_low_bit_checkpoint(name_or_path, model_init_kwargs.get("revision")):
        if peft_config is None:
            if is_export(Path(name_or_path)):
                message = "%s is an export, whose weights are rounded: to continue its training, pass the masters that `save_model` wrote."
                logger.warning(message, name_or_path)
            return load_masters(name_or_path, **_given(model_init_kwargs, {"revision", *_OPTIONS}))
        _as_linear(peft_config)
        return load_base(name_or_path, model_init_kwargs)
    if holds_shards(name_or_path):
        model = load_shards(name_or_path, **_given(model_init_kwargs, _OPTIONS))
    else:
        model = _load_dense(name_or_path, model_init_kwargs)
    if peft_config is None:
        keep_scales(model, name_or_path, model_init_kwargs.get("revision"))
    return model


_OPTIONS = frozenset(["trust_remote_code", "attn_implementation"])


def _given(kwargs: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name in names and value is not None}


def _load_dense(name_or_path: str, model_init_kwargs: dict[str, Any]) -> PreTrainedModel:
    options = dequantizing(name_or_path, model_init_kwargs.get("revision"))
    with reading_partial_blocks() if options else nullcontext():
        model = create_model_from_path(name_or_path, **model_init_kwargs | options)
    if options:
        keep_masters_precise(model)
        # transformers dequantizes to bfloat16 whatever `dtype` says (integrations/mxfp4.py).
        model.to(model.dtype)
    return model


def load_base(name_or_path: str, model_init_kwargs: dict[str, Any]) -> PreTrainedModel:
    """Return the base model, in the precision of its checkpoint: low-bit without masters, or high."""
    # TRL would choose a missing `device_map`, which several processes must not have.
    kwargs = {name: value for name, value in model_init_kwargs.items() if value is not None or name == "device_map"}
    if not is_low_bit_checkpoint(name_or_path, kwargs.get("revision")):
        return _load_dense(name_or_path, kwargs)
    kwargs.pop("device_map", None)
    return load_frozen_model(name_or_path, **kwargs)


def load_adapter(folder: str | Path, model_init_kwargs: dict[str, Any], is_trainable: bool) -> nn.Module:
    """Load the adapter in `folder` with its base as a `PeftModel`. The revision of the base is that of the adapter's
    configuration, unless `model_init_kwargs` has another one than `"main"`. `ValueError` is raised if it names no
    base."""
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(str(folder))
    if not config.base_model_name_or_path:
        raise ValueError(f"{folder}/{ADAPTER_CONFIG_NAME} does not name its base (base_model_name_or_path). Add it.")
    if config.revision is not None and model_init_kwargs.get("revision") in (None, constants.DEFAULT_REVISION):
        # The command line always gives one.
        model_init_kwargs = {**model_init_kwargs, "revision": config.revision}
    model = load_base(config.base_model_name_or_path, model_init_kwargs)
    return PeftModel.from_pretrained(model, folder, config=_as_linear(config), is_trainable=is_trainable)


def _as_linear(config: "PeftConfig") -> "PeftConfig":
    """Have PEFT treat a layer without masters as an ordinary linear layer instead of one of torchao's."""
    from peft.tuners.lora import Linear

    config._register_custom_module({QuantizedLinear: Linear})
    return config


def prepare_base(
    model: nn.Module, scheme: QuantPlan | QuantScheme, *, keep_masters: bool, is_merged: bool = False, **arguments
) -> SwapReport:
    """Quantize the layers of `model` beneath its adapters, or with `is_merged` together with them, and drop unneeded
    masters unless `keep_masters`. `ValueError` is raised by [`~trl_qarl.quantization.swap.prepare_model`], if a
    low-bit checkpoint has other schemes, and with `is_merged` if an adapted layer stays in high precision."""
    plan, how = get_plan(scheme), {"keep_masters": keep_masters, "is_merged": is_merged}
    return swap_base(model, plan, *assign_base(model, plan, **how, **arguments), arguments.get("scale_dtype"), **how)


def swap_base(
    model: nn.Module,
    plan: QuantPlan,
    schemes: Mapping[str, QuantScheme],
    reasons: Mapping[str, str],
    scale_dtype: torch.dtype | None,
    *,
    keep_masters: bool,
    is_merged: bool,
) -> SwapReport:
    """Replace the layers with `schemes`, which [`assign_base`] has returned for `plan` with these `reasons`."""
    if _is_frozen(model):
        report = report_frozen(model, None if plan.is_uniform else plan)
    else:
        report = swap_layers(model, plan, schemes, reasons, scale_dtype)
        if is_merged:
            # PEFT is optional.
            from .merged import merge_adapters

            merge_adapters(model)
        # The base may be quantized by bitsandbytes instead.
        if plan.is_quantized and not keep_masters:
            report = replace(report, dropped_bytes=freeze_model(model))
    # DDP would broadcast them, which a tensor subclass does not support; each process quantizes the same base.
    names = [name for name, p in model.named_parameters() if isinstance(p, LowBitTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return report


def assign_base(
    model: nn.Module, plan: QuantPlan, *, keep_masters: bool, is_merged: bool, exclude_modules=None, scale_dtype=None
) -> tuple[dict[str, QuantScheme], dict[str, str]]:
    """Return what [`~trl_qarl.quantization.swap.assign_schemes`] does, for the base below adapters that
    [`prepare_base`] would prepare. Nothing is changed, and the errors are those of [`prepare_base`]."""
    if _is_frozen(model):
        if is_merged:
            raise ValueError(
                "lora_mode='merged' quantizes base and adapter together, but the base comes from a low-bit checkpoint: its "
                "masters are gone. Start from the high-precision checkpoint, or use lora_mode='adapter'."
            )
        _check_same_schemes(model, plan, keep_masters, exclude_modules, scale_dtype)
        inventory = Inventory.of(model)
        reasons = dict.fromkeys(inventory.quantizable, "not quantized in the checkpoint")
        return {name: layer.scheme for name, layer in inventory.layers.items()}, reasons
    if not plan.is_quantized:
        # The base may be quantized by bitsandbytes.
        return {}, {}
    schemes, reasons = assign_schemes(model, plan, exclude_modules, scale_dtype)
    if is_merged:
        adapted = {name for name, _ in adapted_layers(model)}
        if plain := sorted(adapted - schemes.keys()):
            raise ValueError(
                f"lora_mode='merged' quantizes base and adapter together, but {len(plain)} of {len(adapted)} adapted layers stay "
                f"in high precision, such as {plain[0]!r}. Leave them out of `target_modules`, or use lora_mode='adapter'."
            )
    return schemes, reasons


def _is_frozen(model: nn.Module) -> bool:
    return any(layer.is_frozen for layer in Inventory.of(model).layers.values())


def keep_adapter_precise(model: nn.Module, loaded: Mapping[str, torch.Tensor]) -> None:
    """Keep adapters on a base of 4 bits in float32 instead of TRL's bfloat16, in which most updates would round to
    nothing. `loaded` has the values of a loaded adapter; other adapters keep their rounded values."""
    if getattr(base_model(model), "is_loaded_in_4bit", False):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = loaded.get(name, parameter.data).to(parameter.device, torch.float32)


def _check_same_schemes(model: nn.Module, plan: QuantPlan, keep_masters: bool, exclude_modules, scale_dtype) -> None:
    if keep_masters:
        raise ValueError(
            "quantize_learner=False needs the base in high precision, but it comes from a low-bit checkpoint. Leave out "
            "`quantize_learner`, or start from the high-precision checkpoint."
        )
    if exclude_modules:
        raise ValueError(
            f"exclude_modules={exclude_modules!r} was given, but a low-bit checkpoint determines which layers are quantized. "
            "Remove it."
        )
    inventory = Inventory.of(model)
    layers = inventory.layers
    head = inventory.model.get_output_embeddings()
    if head is not None and head in layers.values():
        name = next(name for name, layer in layers.items() if layer is head)
        raise ValueError(
            f"The base is a low-bit checkpoint with a quantized output head ({name!r}), but the loss multiplies by the head's weight "
            f"itself. Quantize the base again with ignore=[{name!r}], or start from the high-precision checkpoint."
        )
    # With one scheme, the checkpoint determines which layers have it.
    if plan.is_uniform and plan.schemes:
        ours = dict.fromkeys(layers, plan.schemes[0])
    else:
        candidates = {name: m for name, m in inventory.modules.items() if name in {**layers, **inventory.quantizable}}
        reasons, around = reasons_to_skip(inventory, None), layers_outside_decoder(inventory)
        ours, _ = plan.assign(candidates, reasons, split_experts(candidates), around)
    differing = [name for name in dict.fromkeys([*layers, *ours]) if not _has_scheme(layers, name, ours, scale_dtype)]
    if differing:
        layer = layers.get(differing[0]) or next(iter(layers.values()))
        sizes = {layer.group_size for layer in layers.values()}
        names = "', '".join(dict.fromkeys(layer.scheme.name for layer in layers.values()))
        raise ValueError(
            f"The base is a low-bit checkpoint of scheme '{names}' with group sizes {sorted(map(str, sizes))} and "
            f"scales in {layer.scale_dtype}; this run has scheme={plan.option_value!r}, group_size={plan.group_size} and scales in "
            f"{scale_dtype} (`bf16`), and {len(differing)} layers differ, such as {differing[0]!r}. Use the same, or start from "
            "the high-precision checkpoint."
        )


def _has_scheme(layers, name: str, ours, scale_dtype) -> bool:
    if name not in layers or name not in ours:
        return False
    layer, scheme = layers[name], ours[name]
    is_same_scale = scheme.scale_dtype is not None or layer.scale_dtype == scale_dtype
    is_same_scheme = layer.scheme.name == scheme.name and layer.group_size == layer_format(layer, scheme)[1]
    return is_same_scheme and is_same_scale


@torch.no_grad()
def base_fingerprint(model: nn.Module) -> str:
    """Return 16 hexadecimal digits that differ for another base or scheme: over names, shapes, and scales of
    quantized layers, or, if nothing is quantized, the first row of each layer."""
    digest = hashlib.sha256()
    inventory = Inventory.of(model)
    for layer in inventory.walk():
        for name, linear in layer.linears.items():
            digest.update(f"{name}{tuple(linear.weight.shape)}".encode())
            if isinstance(linear, QuantizedLinear):
                weight = linear.quantized_weights["weight"]
                held = weight.quantize(linear.weight) if linear.holds_adapter else weight.low_bit_weight()
                _add_grid(digest, held)
            elif not inventory.layers:
                # Layers in high precision have 16 bits in an export.
                _add(digest, linear.weight[0].bfloat16())
        for name, weight in layer.quantized.items():
            if isinstance(weight.layer, QuantizedExperts):
                held = weight.low_bit_weight()
                digest.update(f"{name}{tuple(held.scale.shape)}".encode())
                _add_grid(digest, held)
    return digest.hexdigest()[:16]


def _add_grid(digest, weight: LowBitTensor) -> None:
    _add(digest, weight.scale)
    if weight.shared_scale is not None:
        # A base and its double may have the same codes and scales, and differ only in this number.
        digest.update(str(weight.shared_scale).encode())


def _add(digest, tensor: torch.Tensor) -> None:
    digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
