"""
Replaces a model's linear layers and experts by quantized ones and back, or by frozen low-bit ones, with a report.

The weight of a *prepared* layer is the master, which the forward quantizes; that of a *converted* one is a frozen
[`LowBitTensor`] in an ordinary `nn.Linear`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .experts import QuantizedExperts, is_released_form
from .fixed_scales import FixedScale, fixed_scales, fixed_schemes, weight_name
from .formats.base import dtype_of_scales
from .formats.registry import format_of
from .gemm import low_bit_linear
from .inventory import (
    Inventory,
    fails_in_transformers,
    layer_format,
    layers_outside_decoder,
    reasons_to_skip,
    split_experts,
)
from .linear import QuantizedLinear
from .names import base_model, method_of
from .plan import QuantPlan, check_fused, fused_layers, get_plan
from .schemes import QuantScheme
from .tensors import LowBitTensor
from .weight import QuantizedLayer, QuantizedWeight


@dataclass(frozen=True)
class SwapReport:
    """
    Result of [`prepare_model`]; mappings are by the names of layers.

    - `converted`: group size of each converted layer; `None` for one scale per output channel.
    - `skipped`: the reason why a linear layer, or module of experts, stays in high precision.
    - `master_bytes`, `bf16_bytes`, `low_bit_bytes`: size of the converted weights as masters, in 16 bits, and in low
      bits with their scales.
    - `dropped_bytes`: size of the masters that [`freeze_model`] has dropped since.
    - `schemes`: scheme of each converted layer.
    - `num_experts`: number of experts in each converted module of experts.
    """

    plan: QuantPlan
    converted: dict[str, int | None] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    master_bytes: int = 0
    bf16_bytes: int = 0
    low_bit_bytes: int = 0
    dropped_bytes: int = 0
    schemes: dict[str, QuantScheme] = field(default_factory=dict)
    num_experts: dict[str, int] = field(default_factory=dict)

    @property
    def layers(self) -> str:
        """Number of quantized layers and experts, as text."""
        experts = f" and {sum(self.num_experts.values())} experts in {len(self.num_experts)} layers"
        return f"{len(self.converted) - len(self.num_experts)} linear layers{experts if self.num_experts else ''}"

    def __str__(self) -> str:
        if not self.plan.is_quantized:
            return f"scheme {self.plan.name}: every layer stays in high precision"
        # The beginning of the line names a single scheme.
        is_mixed = len({scheme.name for scheme in self.schemes.values()}) > 1
        groups = Counter(
            (f"{self.schemes[name].name} " if is_mixed else "")
            + ("per output channel" if size is None else f"group {size}")
            for name, size in self.converted.items()
        )
        parts = ", ".join(f"{count} {group}" for group, count in groups.items())
        low_bit, in_bf16, dropped = (
            f"{size / 2**20:.1f} MiB" for size in (self.low_bit_bytes, self.bf16_bytes, self.dropped_bytes)
        )
        about = f"scheme {self.plan.name}: {self.layers} quantized ({parts})"
        lines = [f"{about}, {low_bit} low-bit against {in_bf16} in bf16"]
        if self.dropped_bytes:
            lines.append(f"frozen: {dropped} of master weights dropped")
        for reason in dict.fromkeys(self.skipped.values()):
            names = [name for name, why in self.skipped.items() if why == reason]
            more = ", ..." if len(names) > 3 else ""
            lines.append(f"left alone: {len(names)} ({reason}): {', '.join(names[:3])}{more}")
        smaller = {of.group_size or 0 for name, of in self.schemes.items() if self.converted[name] != of.group_size}
        for size in sorted(smaller):
            lines.append(f"group_size={size} does not divide every layer; the smaller sizes are above")
        return "\n".join(lines)


def prepare_model(
    model: nn.Module,
    scheme: str | QuantScheme | QuantPlan | Mapping[str, Any],
    *,
    exclude_modules: str | Sequence[str] | None = None,
    scale_dtype: torch.dtype | None = None,
) -> SwapReport:
    """
    Quantize the forward of every linear layer of `model`, and of the experts of a mixture: each is replaced by a
    [`QuantizedLinear`] or [`~trl_qarl.quantization.experts.QuantizedExperts`] with the same parameters.

    Output head, embeddings (with layers that share their weight) and MoE routers are never quantized. Layers around a
    language model, such as those of a vision tower, are quantized only by a pattern that matches only such layers.

    - `scheme`: scheme of every layer, or schemes by patterns of names ([`trl_qarl.quantization.plan`]). `"bf16"`
      converts nothing.
    - `exclude_modules`: layers to leave alone: names, their last components (`"o_proj"`,
      `"layers.0.mlp.down_proj"`), or regular expressions over whole names. A name of a layer is not read as an
      expression.
    - `scale_dtype`: dtype in which the rollout engine runs the model; by default each weight's dtype.

    A model that starts from a quantized checkpoint ([`trl_qarl.quantization.fixed_scales`]) keeps that one's scales,
    group sizes, and layers in high precision.

    `ValueError` is raised for a model that is quantized or prepared already, or was made in inference mode; if nothing
    is left to quantize; if a pattern matches no layer, or only some of a layer's experts; if a scheme cannot quantize
    a layer; and if layers that vLLM fuses do not share a scheme.
    """
    plan = get_plan(scheme)
    return swap_layers(model, plan, *assign_schemes(model, plan, exclude_modules, scale_dtype), scale_dtype)


def swap_layers(
    model: nn.Module,
    plan: QuantPlan,
    schemes: Mapping[str, QuantScheme],
    reasons: Mapping[str, str],
    scale_dtype: torch.dtype | None,
) -> SwapReport:
    """Replace the layers with `schemes`, which [`assign_schemes`] has returned for `plan` with these `reasons`."""
    if not plan.is_quantized:
        return SwapReport(plan)
    candidates = Inventory.of(model).quantizable
    scheme_of = {candidates[name]: scheme for name, scheme in schemes.items()}
    layers = _replace(model, scheme_of, lambda module: quantize_layer(module, scheme_of[module], scale_dtype))
    named = {name: layers[candidates[name]] for name in schemes}
    share_global_scales(named)
    if scales := fixed_scales(model):
        for name, layer in named.items():
            for leaf, weight in layer.quantized_weights.items():
                weight.fixed_scale = scales[weight_name(name, leaf)].scale
        plan = QuantPlan.of_layers(schemes)
    return report_layers(plan, named, reasons)


def assign_schemes(
    model: nn.Module,
    plan: QuantPlan,
    exclude_modules: str | Sequence[str] | None = None,
    scale_dtype: torch.dtype | None = None,
) -> tuple[dict[str, QuantScheme], dict[str, str]]:
    """Return the scheme of each layer that [`prepare_model`] would quantize, and the reason for each other linear
    layer. Nothing is changed, and `model` may be on the meta device. The errors are those of [`prepare_model`]."""
    _check_not_quantized(model)
    if not plan.is_quantized:
        return {}, {}
    inventory = Inventory.of(model)
    candidates = inventory.quantizable
    if not candidates:
        raise ValueError(f"{type(model).__name__} has no nn.Linear layer, so there is nothing to quantize.")
    scales = fixed_scales(model)
    reasons = reasons_to_skip(inventory, exclude_modules)
    if scales:
        reasons = _reasons_with(scales, candidates, reasons)
    schemes, kept = plan.assign(candidates, reasons, split_experts(candidates), layers_outside_decoder(inventory))
    reasons |= kept
    if scales:
        schemes = fixed_schemes(schemes, scales, scale_dtype or next(model.parameters()).dtype)
    schemes = _in_released_form(schemes, candidates, reasons, plan)
    unread = {name for name, scheme in schemes.items() if fails_in_transformers(model, name, scheme)}
    # A plan of patterns may name them. Falcon has no others.
    if plan.is_uniform and not scales and unread != schemes.keys():
        reasons |= dict.fromkeys(unread, "transformers reads its weight to load it")
        schemes = {name: scheme for name, scheme in schemes.items() if name not in unread}
    chosen = {name: candidates[name] for name in schemes}
    if not chosen:
        why = f"{len(candidates)} linear layers, all skipped ({'; '.join(sorted(set(reasons.values())))})"
        if any(isinstance(module, Conv1D) for module in inventory.modules.values()):
            # GPT-2 and its kin.
            why += ". Its `Conv1D` is no linear layer: it stores the weight transposed, which has no low-bit form"
        remedy = f"Relax `exclude_modules`={exclude_modules!r}" if exclude_modules else "Use scheme='bf16'"
        raise ValueError(f"No layer of {type(model).__name__} is left to quantize: {why}. {remedy}.")
    if scales or not plan.is_uniform:
        check_fused(schemes, candidates)
    formats = set()
    for name, module in chosen.items():
        try:
            found = layer_format(module, schemes[name])
        except ValueError as error:
            raise ValueError(f"Layer {name!r}: {error}") from None
        if not isinstance(module, nn.Linear):
            formats.add(found)
    if len(formats) > 1:
        listed = " and ".join(
            f"{scheme.name} in groups of {size}" if size else scheme.name for scheme, size in formats
        )
        raise ValueError(
            f"Experts of different layers have {listed}: transformers applies the format of one layer to all. Give all experts the same."
        )
    return schemes, reasons


def _in_released_form(
    schemes: dict[str, QuantScheme], layers: Mapping[str, nn.Module], reasons: dict[str, str], plan: QuantPlan
) -> dict[str, QuantScheme]:
    """Return `schemes` without those of linear layers next to experts in gpt-oss' released form, and add the reason to
    `reasons`. `ValueError` is raised if a pattern asks for them."""
    linears = [name for name in schemes if isinstance(layers[name], nn.Linear)]
    if not linears or not any(is_released_form(schemes[name]) for name in schemes.keys() - set(linears)):
        return schemes
    if not plan.is_uniform:
        raise ValueError(
            f"scheme: {linears[0]!r} is {schemes[linears[0]].name!r}, next to experts in the form in which gpt-oss is released, whose other layers are in "
            "high precision. Give them no scheme, such as {'re:.*experts': 'mxfp4a16'}, or all layers 'w4a16'."
        )
    reasons |= dict.fromkeys(linears, "in high precision in releases")
    return {name: scheme for name, scheme in schemes.items() if name not in linears}


def _reasons_with(
    scales: Mapping[str, FixedScale], layers: Iterable[str], reasons: Mapping[str, str]
) -> dict[str, str]:
    """Return the reasons of `layers` that stay in high precision in a model with fixed `scales`. `ValueError` is
    raised if a layer that is never quantized has some."""
    held = {name for weight in scales for name in (weight, weight.rpartition(".")[0])}
    for name in held & reasons.keys():
        if reasons[name] != "exclude_modules":
            raise ValueError(
                f"The checkpoint holds {name!r} in low bits, which is never quantized here ({reasons[name]}). Start from the high-precision "
                "checkpoint, or from one that leaves this layer out."
            )
    return {name: "not quantized in the checkpoint" for name in layers if name not in held} | dict(reasons)


def share_global_scales(layers: Mapping[str, QuantizedLayer], known: Mapping[str, float] | None = None) -> None:
    """Set the global scale, such as NVFP4's, of each group of fused layers: the one in `known`, by layer name, else
    the one for the largest weight of the group. `ValueError` is raised if `known` lacks a layer."""
    for names in fused_layers(name for name, layer in layers.items() if layer.scheme.container.has_global_scale):
        weights = [weight for name in names for weight in layers[name].quantized_weights.values()]
        if known is not None:
            missing = [name for name in names if name not in known]
            if missing:
                raise ValueError(
                    f"global_scales has no entry {missing[0]!r}. It has to name every layer of "
                    f"{layers[missing[0]].scheme.name!r}."
                )
            scale = known[names[0]]
        else:
            masters = [weight.master().detach() for weight in weights]
            if any(master.is_meta for master in masters):
                continue
            scale = min(format_of(weights[0].scheme.container).choose_global_scale(master) for master in masters)
        for weight in weights:
            weight.global_scale = scale
            weight.forget()


def quantize_layer(module: nn.Module, scheme: QuantScheme, scale_dtype: torch.dtype | None) -> QuantizedLayer:
    """Make the quantized layer that replaces a linear layer or a module of experts."""
    if isinstance(module, nn.Linear):
        return QuantizedLinear.from_linear(module, scheme, scale_dtype)
    return QuantizedExperts.from_experts(module, scheme, scale_dtype)


def report_frozen(model: nn.Module, plan: QuantPlan | None = None) -> SwapReport:
    """Return the report of a model that was loaded without masters; `plan` is required if its layers have several
    schemes by patterns."""
    inventory = Inventory.of(model)
    plan = plan or QuantPlan.of_layers({name: layer.scheme for name, layer in inventory.layers.items()})
    skipped = dict.fromkeys(inventory.quantizable, "not quantized in the checkpoint")
    return report_layers(plan, inventory.layers, skipped)


def report_layers(plan: QuantPlan, layers: Mapping[str, QuantizedLayer], skipped: Mapping[str, str]) -> SwapReport:
    """Return the report of quantized layers and of the reasons for `skipped` ones."""
    weights = [weight for layer in layers.values() for weight in layer.quantized_weights.values()]
    return SwapReport(
        plan=plan,
        converted={name: layer.group_size for name, layer in layers.items()},
        skipped=dict(skipped),
        master_bytes=sum(w.parameter.itemsize * w.shape.numel() for w in weights if not w.is_frozen),
        bf16_bytes=sum(2 * weight.shape.numel() for weight in weights),
        low_bit_bytes=sum(map(low_bit_bytes, weights)),
        schemes={name: layer.scheme for name, layer in layers.items()},
        num_experts={name: layer.num_experts for name, layer in layers.items() if isinstance(layer, QuantizedExperts)},
    )


def low_bit_bytes(weight: QuantizedWeight) -> int:
    """Return the size of a low-bit weight in bytes, without computing the weight."""
    *rows, columns = weight.shape
    num_rows, container = math.prod(rows), weight.scheme.container
    scales = columns // (weight.group_size or columns) * dtype_of_scales(weight.scheme, weight.scale_dtype).itemsize
    global_scale = 4 if container.has_global_scale else 0
    return num_rows * (columns * container.num_bits // 8 + scales + global_scale)


def restore_model(model: nn.Module) -> int:
    """Replace every quantized layer of `model` by the module it was made from, with the same parameters, and return
    the number of layers. Engine numerics are detached."""
    if (engine_forward := getattr(base_model(model), "_engine_forward", None)) is not None:
        engine_forward.detach()
    return _replace_quantized(model, lambda layer: layer.restored())


def convert_model(model: nn.Module) -> int:
    """
    Replace every [`QuantizedLinear`] of `model` by an `nn.Linear` with its frozen low-bit weight, freeze experts in
    place, and return the number of layers.

    Results of the model stay the same, bit for bit. Its masters are gone: it can be evaluated, deployed and exported,
    not trained. Memory is freed once no other object, such as an optimizer, holds the masters. `ValueError` is raised
    if no layer is prepared, or if the model has engine numerics.
    """
    if not quantized_layers(model):
        raise ValueError(f"{type(model).__name__} has no prepared layer. Call `prepare_model(model, scheme)` first.")
    return _replace_quantized(model, lambda layer: layer.convert())


def _replace_quantized(model: nn.Module, make: Callable[[QuantizedLayer], nn.Module]) -> int:
    layers = quantized_layers(model).values()
    if any(layer.product is not low_bit_linear for layer in layers):
        raise ValueError(
            "The model has engine numerics, whose product an ordinary layer does not have. Call "
            "`trl_qarl.bitwise.attach.detach_engine_numerics(model)` first."
        )
    _replace(model, layers, make)
    return len(layers)


def _replace(
    model: nn.Module, modules: Iterable[nn.Module], make: Callable[[Any], nn.Module]
) -> dict[nn.Module, nn.Module]:
    """Replace each of `modules` in `model` by `make(module)`, wherever it occurs; return new modules by old ones."""
    modules = set(modules)
    if model in modules:
        raise ValueError(
            f"The model is itself a {type(model).__name__} without a parent module, so it cannot be replaced. Put it into a module "
            "(`nn.Sequential(layer)`), or use `QuantizedLinear.from_linear`."
        )
    replacements = {module: make(module) for module in modules}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, name, replacements[child])
    # The former inventory would keep the replaced modules, and their masters, in memory.
    Inventory.of(model)
    return replacements


def freeze_model(model: nn.Module) -> int:
    """Drop the masters of every quantized layer of `model` without an adapter in its weight, in place, and return
    their bytes. Results stay the same, bit for bit; gradients go to inputs and to adapters next to the layers."""
    layers = [layer for layer in quantized_layers(model).values() if not layer.holds_adapter]
    weights = [weight for layer in layers for weight in layer.quantized_weights.values()]
    num_bytes = sum(weight.parameter.nbytes for weight in weights if not weight.is_frozen)
    for layer in layers:
        layer.freeze()
    return num_bytes


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Return every quantized layer of `model` by its name in the base model."""
    return Inventory.of(model).layers


def disable_quantized_forward(model: nn.Module) -> None:
    """Give quantized layers the forward of the layers they were made from; low-bit weights can still be published."""
    for layer in quantized_layers(model).values():
        layer.use_quantized_forward = False


@contextmanager
def quantized_forward(model: nn.Module) -> Iterator[None]:
    """While open, every quantized layer of `model` runs its quantized forward, even if it is disabled."""
    disabled = [layer for layer in quantized_layers(model).values() if not layer.use_quantized_forward]
    for layer in disabled:
        layer.use_quantized_forward = True
    try:
        yield
    finally:
        for layer in disabled:
            layer.use_quantized_forward = False


def _check_not_quantized(model: nn.Module) -> None:
    if any(isinstance(module, QuantizedLayer) for module in model.modules()):
        raise ValueError("The model has been prepared already. Call `restore_model(model)` before preparing it again.")
    if any(isinstance(parameter, LowBitTensor) for parameter in model.parameters()):
        raise ValueError("The model is converted already: no masters are left. Load the high-precision checkpoint.")
    model = base_model(model)
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None or getattr(model, "is_quantized", False):
        raise ValueError(
            f"The model is quantized already (quant_method={method_of(config) or 'unknown'!r}): its masters are gone. Load the high-precision checkpoint, "
            "without `quantization_config`, and let the scheme quantize it; or load masters with the codes and scales of a "
            "compressed-tensors checkpoint (`trl_qarl.checkpoint.load.load_masters`)."
        )
