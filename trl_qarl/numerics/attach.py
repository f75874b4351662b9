"""
Putting the engine's operations into a transformers model, and taking them out.

A module is changed by its class, as [`~trl_qarl.quantization.linear.QuantizedLinear`] is: parameters, names, hooks and ties stay, and so
does whatever looks at `isinstance`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from . import cuda, ops
from .availability import check_engine_numerics
from .modules import ATTENTION, ENGINE_MODULES, EngineModule, engine_class


__all__ = [
    "attach_engine_numerics",
    "detach_engine_numerics",
    "engine_numerics",
    "has_engine_numerics",
]


def attach_engine_numerics(
    model: PreTrainedModel,
    dtype: torch.dtype = torch.bfloat16,
    temperature: float = 1.0,
    allow_longer: bool = False,
) -> None:
    """
    Have `model` compute every log-prob as the engine does, bit for bit; with gradients.

    Layers that are quantized run the engine's product of their scheme; all other parameters stay float32 masters which
    are rounded to `dtype` wherever they are used. Autocast has no effect on the model any more. Logits come in `dtype`; take
    log-probs with [`~trl_qarl.numerics.ops.token_log_probs`], or give `labels` and `fused_lm_head=True`, as TRL does.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            A model of a class in [`~trl_qarl.numerics.availability.COVERED_CLASSES`], prepared by [`~trl_qarl.prepare_model`] or not quantized.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            Dtype in which the engine runs the model.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, for calls with `fused_lm_head=True`.
        allow_longer (`bool`, *optional*, defaults to `False`):
            Whether sequences may be longer than [`~trl_qarl.numerics.cpu.max_exact_length`], whose attention the engine
            rounds otherwise in decoding. By default they raise.

    Raises:
        ValueError: from [`~trl_qarl.numerics.availability.check_engine_numerics`], or if they are attached already.
    """
    if has_engine_numerics(model):
        raise ValueError("Engine numerics are attached to this model already.")
    check_engine_numerics(model, dtype)
    device = next(model.parameters()).device.type
    if device == "cuda":
        cuda.prepare_process()
    for module in list(model.modules()):
        for original, engine in ENGINE_MODULES.items():
            if type(module) is original:
                module.engine_dtype = dtype
                module.engine_device = device
                module.allow_longer = allow_longer
                module.__class__ = engine_class(engine, original)
                module._attach()
                break
    model._fast_forward = vars(model).get("forward")
    model._engine_temperature = temperature
    model.forward = MethodType(_forward_of(model.forward, type(model)), model)
    model._fast_attention = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION
    model._position_hook = model.base_model.register_forward_pre_hook(_true_positions, with_kwargs=True)
    model._detach_numerics = partial(detach_engine_numerics, model)


def detach_engine_numerics(model: PreTrainedModel) -> None:
    """Undo [`attach_engine_numerics`]. Parameters are untouched."""
    for module in model.modules():
        if isinstance(module, EngineModule):
            module._detach()
            del module.engine_dtype, module.engine_device, module.allow_longer
            module.__class__ = module.original_class
    model.config._attn_implementation = model._fast_attention
    model._position_hook.remove()
    if model._fast_forward is None:
        del model.forward
    else:
        model.forward = model._fast_forward
    del model._fast_attention, model._position_hook, model._fast_forward, model._engine_temperature
    del model._detach_numerics


def has_engine_numerics(model: nn.Module) -> bool:
    """Whether [`attach_engine_numerics`] is in effect."""
    return any(isinstance(module, EngineModule) for module in model.modules())


@contextmanager
def engine_numerics(model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """[`attach_engine_numerics`] while the context is open."""
    attach_engine_numerics(model, dtype)
    try:
        yield
    finally:
        detach_engine_numerics(model)


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


def _forward_of(original: Callable, model_class: type) -> Callable:
    """`original`, but for calls that ask for log-probs (TRL's `add_fused_lm_head`), which get the engine's."""

    # `generate` looks at the signature.
    @wraps(model_class.forward)
    def forward(self, *args, labels=None, fused_lm_head=False, **kwargs):
        if not fused_lm_head:
            return original(*args, **kwargs, **({} if labels is None else {"labels": labels}))
        hidden = self.base_model(*args, **kwargs | {"use_cache": False}).last_hidden_state[:, :-1]
        labels = labels[:, 1:]
        scored = labels != -100
        head = self.get_output_embeddings()
        values = ops.head_log_probs(
            hidden[scored], head.weight, head.bias, head.product(), labels[scored], self._engine_temperature
        )
        return _LogProbsOutput(*(value.new_zeros(labels.shape).masked_scatter(scored, value) for value in values))

    return forward
