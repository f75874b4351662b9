"""
Turn a model's linear layers into quantized ones and back, or into frozen low-bit ones, and say what was done.

| | weight of a layer | made by |
|---|---|---|
| prepared | the master; the forward quantizes it | [`prepare_model`], `quantize_(model, QaRLWeightConfig("w4a16"))` |
| converted | a frozen [`LowBitTensor`], in an ordinary `nn.Linear` | [`convert_model`], the same with `step="convert"` |

`quantize_` is torchao's (https://github.com/pytorch/ao). It passes every linear layer that its `filter_fn` lets through,
by default the output head too; [`prepare_model`] knows which layers to leave alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from .gemm import low_bit_linear
from .linear import MADE_IN_INFERENCE_MODE, QuantizedLinear
from .names import base_model, base_modules
from .plan import QuantPlan, check_fused, get_plan
from .schemes import QuantScheme, get_scheme
from .selection import reasons_to_skip, stacked_experts
from .tensors import LowBitTensor
from .walk import iter_layers


__all__ = [
    "QaRLWeightConfig",
    "SwapReport",
    "convert_model",
    "disable_quantized_forward",
    "engine_precision",
    "freeze_model",
    "kernels_run",
    "prepare_model",
    "quantized_forward",
    "quantized_layers",
    "report_frozen",
    "restore_model",
]


@dataclass
class QaRLWeightConfig(AOBaseConfig):
    """
    Configuration of torchao's `quantize_`, which applies it layer by layer; inside a `FqnToConfig`, a scheme per layer.

    Args:
        scheme (`str` or [`QuantScheme`], *optional*, defaults to `"w4a16"`):
            Scheme to apply.
        group_size (`int`, *optional*):
            Group size instead of the scheme's own.
        step (`str`, *optional*, defaults to `"prepare"`):
            `"prepare"` replaces a plain `nn.Linear` by a [`QuantizedLinear`] with the same parameters; `"convert"` replaces
            a prepared layer by an `nn.Linear` whose weight is the frozen [`LowBitTensor`], with the same outputs bit for
            bit, and leaves other layers alone.
        scale_dtype (`torch.dtype`, *optional*):
            Dtype in which the rollout engine runs the model, for `"prepare"`. Defaults to each weight's dtype.

    Example:

    ```python
    >>> quantize_(model, QaRLWeightConfig("w4a16"), filter_fn=lambda module, name: name.endswith("_proj"))
    >>> quantize_(model, QaRLWeightConfig("w4a16", step="convert"))
    ```
    """

    scheme: str | QuantScheme = "w4a16"
    group_size: int | None = None
    step: Literal["prepare", "convert"] = "prepare"
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.scheme = get_scheme(self.scheme, self.group_size)
        if self.step not in ("prepare", "convert"):
            raise ValueError(f"step={self.step!r} is unknown. Choose 'prepare' or 'convert'.")


@register_quantize_module_handler(QaRLWeightConfig)
def _transform(module: nn.Module, config: QaRLWeightConfig) -> nn.Module:
    made_for, layer = _replaced.get(module, (None, None))
    if made_for is config:
        return layer
    if config.step == "prepare":
        layer = QuantizedLinear.from_linear(module, config.scheme, config.scale_dtype)
    elif not isinstance(module, QuantizedLinear):
        return module
    elif module.scheme != config.scheme:
        raise ValueError(
            f"The layer was prepared with {module.scheme}, so it cannot be converted with {config.scheme}. Give the "
            "same `scheme` and `group_size`, or use `convert_model`."
        )
    else:
        _check_product(module)
        layer = module.convert()
    _replaced[module] = config, layer
    return layer


# torchao asks once for each parent of a module; all of them get the same new one.
_replaced: WeakKeyDictionary[nn.Module, tuple[QaRLWeightConfig, nn.Module]] = WeakKeyDictionary()


@dataclass(frozen=True)
class SwapReport:
    """
    What [`prepare_model`] did.

    Args:
        plan ([`~trl_qarl.quantization.plan.QuantPlan`]):
            The plan applied.
        converted (`dict[str, int | None]`):
            Name of each converted layer and its group size (`None`: one scale per output channel).
        skipped (`dict[str, str]`):
            Name of each linear layer, or tensor of experts, left alone and the reason.
        master_bytes (`int`):
            Bytes of the converted layers' master weights.
        bf16_bytes (`int`):
            Bytes of the same weights in 16-bit precision.
        low_bit_bytes (`int`):
            Bytes of the same weights in low-bit form, scales included.
        dropped_bytes (`int`, *optional*, defaults to `0`):
            Bytes of the master weights that [`freeze_model`] has dropped since.
        schemes (`dict[str, QuantScheme]`, *optional*):
            Name of each converted layer and its scheme.
    """

    plan: QuantPlan
    converted: dict[str, int | None]
    skipped: dict[str, str]
    master_bytes: int
    bf16_bytes: int
    low_bit_bytes: int
    dropped_bytes: int = 0
    schemes: dict[str, QuantScheme] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.plan.is_quantized:
            return f"scheme {self.plan.name}: every layer stays in high precision"
        # Of one scheme alone the beginning of the line says which.
        is_mixed = len({scheme.name for scheme in self.schemes.values()}) > 1
        groups = Counter(
            (f"{self.schemes[name].name} " if is_mixed else "", size) for name, size in self.converted.items()
        )
        parts = [
            f"{count} {name}per output channel" if size is None else f"{count} {name}group {size}"
            for (name, size), count in groups.items()
        ]
        lines = [
            f"scheme {self.plan.name}: {len(self.converted)} linear layers quantized ({', '.join(parts)}), "
            f"{self.low_bit_bytes / 2**20:.1f} MiB low-bit against {self.bf16_bytes / 2**20:.1f} MiB in bf16"
        ]
        if self.dropped_bytes:
            lines.append(f"frozen: {self.dropped_bytes / 2**20:.1f} MiB of master weights dropped")
        for reason, count in Counter(self.skipped.values()).items():
            names = [name for name, why in self.skipped.items() if why == reason]
            lines.append(f"left alone: {count} ({reason}): {', '.join(names[:3])}{', ...' if count > 3 else ''}")
        for size in sorted(
            {scheme.group_size or 0 for name, scheme in self.schemes.items() if self._is_smaller(name)}
        ):
            lines.append(f"group_size={size} does not divide every layer; the smaller sizes are above")
        return "\n".join(lines)

    def _is_smaller(self, name: str) -> bool:
        return self.converted[name] != self.schemes[name].group_size


def prepare_model(
    model: nn.Module,
    scheme: str | QuantScheme | QuantPlan | Mapping[str, Any],
    *,
    exclude_modules: str | Sequence[str] | None = None,
    scale_dtype: torch.dtype | None = None,
) -> SwapReport:
    """
    Quantize the forward of every linear layer of `model`: each is replaced by a [`QuantizedLinear`] with the same parameters.

    Output head, embeddings (and whatever shares their weight) and MoE routers are never touched.

    Args:
        model (`nn.Module`):
            Model in high precision.
        scheme (`str`, [`QuantScheme`], [`~trl_qarl.quantization.plan.QuantPlan`] or `Mapping`):
            Scheme of every layer, or schemes by patterns of names ([`trl_qarl.quantization.plan`]). `"bf16"` converts nothing.
        exclude_modules (`str` or `Sequence[str]`, *optional*):
            Layers to leave alone: names, their last components (`"o_proj"`, `"layers.0.mlp.down_proj"`), or regular
            expressions that must match the whole name. What names a layer is not read as an expression.
        scale_dtype (`torch.dtype`, *optional*):
            Dtype in which the rollout engine runs the model. Defaults to each weight's dtype.

    Raises:
        ValueError: for a model that is quantized already, has been prepared
            already or was made in inference mode, when nothing matched, when a pattern matches no linear layer, when a
            scheme cannot quantize a layer's number of input features, or when layers that vLLM holds as one matrix do not
            share a scheme.
    """
    plan = get_plan(scheme)
    _check_not_quantized(model)
    if not plan.is_quantized:
        return SwapReport(plan, {}, {}, 0, 0, 0)
    linears = {name: module for name, module in base_modules(model) if isinstance(module, nn.Linear)}
    if not linears:
        raise ValueError(f"{type(model).__name__} has no nn.Linear layer, so there is nothing to quantize.")
    reasons = reasons_to_skip(model, linears, exclude_modules)
    schemes, kept = plan.assign(linears, reasons)
    reasons |= kept
    chosen = {name: linears[name] for name in schemes}
    if not chosen:
        raise ValueError(
            f"No layer of {type(model).__name__} is left to quantize: {len(linears)} linear layers, all skipped "
            f"({'; '.join(sorted(set(reasons.values())))}). Relax `exclude_modules`={exclude_modules!r}."
        )
    if not plan.is_uniform:
        check_fused(schemes, linears)
    converted = {}
    for name, module in chosen.items():
        try:
            converted[name] = schemes[name].group_size_for(module.in_features)
        except ValueError as error:
            raise ValueError(f"Layer {name!r}: {error}") from None
    if any(module.weight.is_inference() for module in chosen.values()):
        raise ValueError(MADE_IN_INFERENCE_MODE)
    scheme_of = {module: schemes[name] for name, module in chosen.items()}
    layers = _replace(
        model, chosen.values(), lambda module: QuantizedLinear.from_linear(module, scheme_of[module], scale_dtype)
    )
    weights = [module.weight for module in chosen.values()]
    return SwapReport(
        plan=plan,
        converted=converted,
        schemes=schemes,
        skipped=reasons | dict.fromkeys(stacked_experts(model), "stacked experts, no linear layers"),
        master_bytes=sum(weight.nbytes for weight in weights),
        bf16_bytes=sum(2 * weight.numel() for weight in weights),
        low_bit_bytes=sum(map(_low_bit_bytes, layers.values())),
    )


def report_frozen(model: nn.Module, plan: QuantPlan | None = None) -> SwapReport:
    """
    Return the report of a model from [`~trl_qarl.checkpoint.load.load_frozen_model`], which came without masters; `plan`, if given, is
    one of several schemes that its layers have.
    """
    layers = quantized_layers(model)
    schemes = {name: layer.scheme for name, layer in layers.items()}
    linears = {name: module for name, module in base_modules(model) if isinstance(module, nn.Linear)}
    return SwapReport(
        plan=plan or QuantPlan.of_layers(schemes),
        schemes=schemes,
        converted={name: layer.group_size for name, layer in layers.items()},
        skipped={name: "not quantized in the checkpoint" for name in linears if name not in layers},
        master_bytes=0,
        bf16_bytes=sum(2 * layer.weight.numel() for layer in layers.values()),
        low_bit_bytes=sum(layer.low_bit_weight().num_bytes for layer in layers.values()),
    )


def restore_model(model: nn.Module) -> int:
    """
    Replace every [`QuantizedLinear`] of `model` by an `nn.Linear` with the same parameters, and return how many there were.

    Raises:
        ValueError: if the model has engine numerics.
    """
    layers = quantized_layers(model)
    for layer in layers.values():
        _check_product(layer)
    _replace(model, layers.values(), QuantizedLinear.to_linear)
    return len(layers)


def convert_model(model: nn.Module) -> int:
    """
    Replace every [`QuantizedLinear`] of `model` by an `nn.Linear` with its frozen low-bit weight.

    The model computes what it computed before, bit for bit, and its masters are gone: it can be evaluated, deployed and
    exported, not trained. Memory is freed once nothing else, such as an optimizer, holds the masters.

    Returns:
        The number of layers.

    Raises:
        ValueError: if no layer is prepared, or if the model has engine numerics.
    """
    layers = quantized_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no prepared layer to convert. Call `prepare_model(model, scheme)` first."
        )
    for layer in layers.values():
        _check_product(layer)
    _replace(model, layers.values(), QuantizedLinear.convert)
    return len(layers)


def _check_product(layer: QuantizedLinear) -> None:
    if layer.product is not low_bit_linear:
        raise ValueError(
            "The model computes with another product than its own, as with engine numerics, which an ordinary layer does not "
            "have. Call `trl_qarl.numerics.attach.detach_engine_numerics(model)` first."
        )


def _replace(
    model: nn.Module, modules: Iterable[nn.Module], make: Callable[[nn.Module], nn.Module]
) -> dict[nn.Module, nn.Module]:
    """Put `make(module)` into the place of each of `modules`, wherever it is registered below `model`; returns new by old."""
    modules = set(modules)
    if model in modules:
        raise ValueError(
            f"The model is itself a {type(model).__name__}, which nothing holds, so it cannot be replaced. Put it into a module "
            "(`nn.Sequential(layer)`), or use `QuantizedLinear.from_linear`."
        )
    replacements = {module: make(module) for module in modules}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, name, replacements[child])
    return replacements


def freeze_model(model: nn.Module) -> int:
    """
    Drop the masters of every [`QuantizedLinear`] of `model` that holds no adapter, in place, and return the bytes they took.

    The layers compute what they computed before, bit for bit, and pass gradients to their input and to adapters beside them.
    """
    layers = [layer for layer in quantized_layers(model).values() if not layer.holds_adapter]
    num_bytes = sum(layer.weight.nbytes for layer in layers if not layer.is_frozen)
    for layer in layers:
        layer.freeze()
    return num_bytes


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return every [`QuantizedLinear`] of `model` by its name, that in the base model where an adapter wraps it."""
    return {name: module for name, module in base_modules(model) if isinstance(module, QuantizedLinear)}


def disable_quantized_forward(model: nn.Module) -> None:
    """Give every [`QuantizedLinear`] of `model` the forward of `nn.Linear`; its low-bit weight can still be published."""
    for layer in quantized_layers(model).values():
        layer.use_quantized_forward = False


@contextmanager
def quantized_forward(model: nn.Module) -> Iterator[None]:
    """While open, every [`QuantizedLinear`] of `model` runs its quantized forward, also where it is disabled."""
    disabled = [layer for layer in quantized_layers(model).values() if not layer.use_quantized_forward]
    for layer in disabled:
        layer.use_quantized_forward = True
    try:
        yield
    finally:
        for layer in disabled:
            layer.use_quantized_forward = False


@contextmanager
def engine_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """
    While open, every floating tensor of the `state_dict` but the quantized layers' weights is rounded to `dtype`.

    The model then computes what an engine computes with its export: the learner keeps embeddings, norms and biases in the
    precision of the masters, an export has them in `dtype`. The masters come back on leaving, bit for bit.
    """
    # Tied tensors share storage; rounding twice is harmless, and restoring in any order gives the same values.
    tensors = [
        tensor
        for layer in iter_layers(model)
        for tensor in layer.in_high_precision.values()
        if tensor.is_floating_point()
    ]
    saved = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(tensor.to(dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)


def kernels_run(model: nn.Module) -> dict[str, int]:
    """Kernels that ran in the last forward and the number of layers that used each."""
    names = (layer.kernel_name for layer in quantized_layers(model).values())
    return dict(Counter(name for name in names if name is not None))


def _check_not_quantized(model: nn.Module) -> None:
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ValueError("The model has been prepared already. Call `restore_model(model)` before preparing it again.")
    if any(isinstance(parameter, LowBitTensor) for parameter in model.parameters()):
        raise ValueError(
            "The model has been converted already: its masters are gone. Load the high-precision checkpoint."
        )
    model = base_model(model)
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None or getattr(model, "is_quantized", False):
        method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", "unknown")
        raise ValueError(
            f"The model is quantized already (quant_method={getattr(method, 'value', method)!r}): its masters are gone. Load "
            "the high-precision checkpoint, without `quantization_config`, and let the scheme quantize it."
        )


def _low_bit_bytes(layer: QuantizedLinear) -> int:
    scales = layer.in_features // (layer.group_size or layer.in_features) * layer.out_features
    scale_dtype = layer.scale_dtype if layer.scheme.scale_dtype is None else getattr(torch, layer.scheme.scale_dtype)
    return layer.weight.numel() * layer.scheme.container.num_bits // 8 + scales * scale_dtype.itemsize
