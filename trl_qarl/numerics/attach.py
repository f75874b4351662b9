"""
Putting the engine's operations into a transformers model, and taking them out.

A module gets an operation as the `forward` of its instance, a quantized layer a product. Its class stays, so do parameters, names,
hooks and ties.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..quantization.gemm import low_bit_linear
from ..quantization.linear import QuantizedLinear
from ..quantization.names import adapted_layers, base_model, base_modules
from . import cpu as kernels
from . import cuda, ops
from .modules import (
    ATTENTION,
    ENGINE_OPERATIONS,
    TRANSPARENT,
    EngineOperation,
    LoraOperation,
    engine_product,
    head_dim_of,
    operation_of,
    window_of,
)


__all__ = [
    "COVERED_CLASSES",
    "attach_engine_numerics",
    "check_engine_numerics",
    "detach_engine_numerics",
    "engine_numerics",
    "has_engine_numerics",
]

COVERED_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Model classes whose operations are all known here."""


def check_engine_numerics(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """
    Raise unless `model` can compute with the engine's arithmetic in `dtype` here.

    Raises:
        ValueError: naming what is not covered, and what is.
    """
    for is_met, reason in _conditions(model, dtype):
        if not is_met:
            raise ValueError(f"Engine numerics are not available: {reason}. Use the fast numerics.")


def attach_engine_numerics(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    temperature: float = 1.0,
    adapter_rank: int | None = None,
) -> None:
    """
    Have `model` compute every log-prob as the engine does, bit for bit; with gradients.

    Layers that are quantized run the engine's product of their scheme; all other parameters stay float32 masters which
    are rounded to `dtype` wherever they are used. Autocast has no effect on the model any more. Logits come in `dtype`; take
    log-probs with [`~trl_qarl.numerics.ops.token_log_probs`], or give `labels` and `fused_lm_head=True`, as TRL does.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            A model of a class in [`COVERED_CLASSES`], prepared by [`~trl_qarl.prepare_model`] or not quantized; also with LoRA
            beside its layers or in their low-bit weights.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            Dtype in which the engine runs the model.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, for calls with `fused_lm_head=True`.
        adapter_rank (`int`, *optional*):
            Rank to which the engine fills up adapters beside the layers with zeros, on which the last bit depends. Defaults to
            their own.

    Raises:
        ValueError: from [`check_engine_numerics`], or if they are attached already.
    """
    if has_engine_numerics(model):
        raise ValueError("Engine numerics are attached to this model already.")
    check_engine_numerics(model, dtype)
    model = base_model(model)
    device = next(model.parameters()).device.type
    if device == "cuda":
        cuda.prepare_process()
    for _, module in list(base_modules(model)):
        if isinstance(module, QuantizedLinear):
            module.product = engine_product
        elif operation := ENGINE_OPERATIONS.get(type(module)):
            module.forward = operation(module, dtype, device)
    for _, layer in _adapters_beside(model):
        layer.forward = LoraOperation(layer, dtype, device, adapter_rank)
    # Who wraps the model's forward later, as accelerate does, hides it.
    model._engine_forward = model.forward = _ModelForward(model, dtype, device, temperature)


def detach_engine_numerics(model: nn.Module) -> None:
    """Undo [`attach_engine_numerics`]. Parameters are untouched."""
    model = base_model(model)
    model._engine_forward.detach()
    del model._engine_forward
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.product = low_bit_linear
        elif operation_of(module) is not None:
            del module.forward


def has_engine_numerics(model: nn.Module) -> bool:
    """Whether [`attach_engine_numerics`] is in effect."""
    return hasattr(base_model(model), "_engine_forward")


def _adapters_beside(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """PEFT's layers whose adapter is not a part of the low-bit weight inside."""
    for name, layer in adapted_layers(model):
        if not getattr(layer.base_layer, "holds_adapter", False):
            yield name, layer


@contextmanager
def engine_numerics(model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """[`attach_engine_numerics`] while the context is open."""
    attach_engine_numerics(model, dtype)
    try:
        yield
    finally:
        detach_engine_numerics(model)


def _conditions(model, dtype) -> Iterator[tuple[bool, str]]:
    """Pairs of a condition and the reason to give where it is not met; later ones rely on earlier ones."""
    model = base_model(model)
    name = type(model).__name__
    yield name in COVERED_CLASSES, f"the operations of {name} are not known, those of {', '.join(COVERED_CLASSES)} are"
    yield dtype is torch.bfloat16, f"they exist in bfloat16, not in {dtype}"
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    yield on_gpu or device.type == "cpu", f"they exist for CPUs and for NVIDIA GPUs; the model is on {device}"
    reason = cuda.reason_against() if on_gpu else None
    yield reason is None, f"the model is on {device}, and {reason}"
    # Without vLLM the same operations run in torch, which has fewer limits.
    is_engine = not on_gpu and kernels.has_engine_kernels()
    config = model.config
    yield config.hidden_act == "silu", f"hidden_act={config.hidden_act!r} is not 'silu'"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    is_known = kinds in ({"full_attention"}, {"sliding_attention"})
    yield (
        is_known,
        f"layers attend with {sorted(kinds)}, not all with 'full_attention' or all with 'sliding_attention'",
    )
    windows = {window for module in model.modules() if (window := window_of(module)) is not None}
    yield (
        is_engine or not windows,
        f"layers attend to windows of {sorted(windows)} tokens, which vLLM's CPU kernels alone have",
    )
    for option in ("attn_logit_softcapping", "final_logit_softcapping"):
        yield not getattr(config, option, None), f"the model caps logits ({option}={getattr(config, option, None)})"
    yield not config.attention_dropout, f"attention_dropout={config.attention_dropout} is not 0"
    rope = config.rope_parameters.get("rope_type", "default")
    yield rope in ROPE_TYPES, f"rope_type={rope!r} is none of {list(ROPE_TYPES)}"
    head_dim = head_dim_of(config)
    yield not is_engine or head_dim in HEAD_DIMS, f"head_dim={head_dim} is none of {list(HEAD_DIMS)}"
    fits = head_dim % 8 == 0 and head_dim <= 256
    yield not on_gpu or fits, f"head_dim={head_dim} is no multiple of 8 up to 256, which FlashAttention takes"
    for path, layer in _adapters_beside(model):
        yield not on_gpu, f"{path!r} has an adapter beside it, whose product on a GPU has not been compared"
        is_lora = isinstance(layer.base_layer, nn.Linear) and hasattr(layer, "lora_A") and not layer.lora_variant
        yield is_lora, f"{path!r} has an adapter of another kind than LoRA of a linear layer"
        rates = [getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values()]
        yield not any(rates), f"{path!r} has lora_dropout={max(rates, default=0.0)}, and engines drop nothing"
    known = (*ENGINE_OPERATIONS, QuantizedLinear, *TRANSPARENT)
    for path, module in base_modules(model):
        if path in ("", model.base_model_prefix):
            continue
        if type(module) not in known:
            yield False, f"{path!r} is a {type(module).__name__}, whose operations are not known"
        yield (
            "forward" not in vars(module),
            f"{path!r} has a `forward` of its own on the instance, as accelerate's `device_map` sets one",
        )
        if isinstance(module, QuantizedLinear):
            scheme = module.scheme.name
            yield (
                scheme in kernels.SCHEMES,
                f"{path!r} has scheme {scheme!r}, which is none of {list(kernels.SCHEMES)}",
            )
            yield (
                not on_gpu or scheme != "fp8" or torch.cuda.get_device_capability() >= (8, 9),
                f"{path!r} has scheme 'fp8', which vLLM runs with 16-bit activations below compute capability 8.9",
            )
            shape = tuple(module.weight.shape)
            yield (
                scheme != "w4a16" or not is_engine or not any(size % 32 for size in shape),
                f"{path!r} has shape {shape}; vLLM's INT4 kernel takes multiples of 32",
            )


HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM's kernels take in whole vectors."""


ROPE_TYPES = ("default", "llama3")
"""Kinds of rotary embeddings whose table vLLM computes from the frequencies that transformers has."""


def _true_positions(module, args, kwargs):
    """Positions count a sequence's own tokens: padding on the left must not shift them, as it would by default."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is None and mask is not None and kwargs.get("past_key_values") is None:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_(min=0)
    return args, kwargs


@dataclass
class _LogProbsOutput(ModelOutput):
    """What TRL reads of a call with `fused_lm_head=True`: `(B, T - 1)` each, 0 where the label is -100."""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


class _ModelForward(EngineOperation):
    """The model's forward, but for calls that ask for log-probs (TRL's `add_fused_lm_head`), which get the engine's."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, device: str, temperature: float):
        super().__init__(model, dtype, device)
        self.temperature = temperature
        # TRL or accelerate may have set one on the instance.
        self.original = vars(model).get("forward")
        self.attention = model.config._attn_implementation
        model.config._attn_implementation = ATTENTION
        self.position_hook = model.base_model.register_forward_pre_hook(_true_positions, with_kwargs=True)

    def detach(self) -> None:
        """Undo what making it and setting it changed."""
        model = self.module
        model.config._attn_implementation = self.attention
        self.position_hook.remove()
        if self.original is None:
            del model.forward
        else:
            model.forward = self.original

    def __call__(self, *args, labels=None, fused_lm_head=False, **kwargs):
        model = self.module
        if not fused_lm_head:
            kwargs |= {} if labels is None else {"labels": labels}
            if self.original is not None:
                return self.original(*args, **kwargs)
            return type(model).forward(model, *args, **kwargs)
        hidden = model.base_model(*args, **kwargs | {"use_cache": False}).last_hidden_state[:, :-1]
        labels = labels[:, 1:]
        scored = labels != -100
        head = model.get_output_embeddings()
        product = operation_of(head).product()
        values = ops.head_log_probs(hidden[scored], head.weight, head.bias, product, labels[scored], self.temperature)
        return _LogProbsOutput(*(value.new_zeros(labels.shape).masked_scatter(scored, value) for value in values))
