"""
Attaches the engine's operations to a transformers model, and detaches them: a module gets an operation as the
`forward` of its instance, a quantized layer a product. Classes, parameters, names, hooks and ties do not change.
"""

from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.trainer.utils import FusedCausalLMOutput

from ..quantization.gemm import low_bit_linear
from ..quantization.inventory import Inventory
from ..quantization.names import base_model, class_of
from ..quantization.storage import is_sharded, whole
from ..quantization.weight import QuantizedLayer
from . import cuda, low_bit, ops
from .availability import check_engine_numerics, layers_in_engine
from .modules import (
    ATTENTION,
    EngineOperation,
    LoraOperation,
    cache_of,
    operation_for,
    operation_of,
    register_attention,
)


def attach_engine_numerics(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, temperature: float = 1.0, adapter_rank: int | None = None
) -> None:
    """
    Have `model` compute every log-prob like the engine, bit for bit, with gradients.

    Quantized layers run the engine's product of their scheme; other parameters stay float32 masters that are rounded
    to `dtype` at each use. Autocast has no effect. Logits are in `dtype`; compute log-probs with
    [`~trl_qarl.bitwise.ops.token_log_probs`], or pass `labels` and `fused_lm_head=True` like TRL.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            A model of a class in [`~trl_qarl.bitwise.availability.COVERED_CLASSES`], prepared by
            [`~trl_qarl.prepare_model`] or not quantized, with or without LoRA.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            Dtype in which the engine runs the model.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, for calls with `fused_lm_head=True`.
        adapter_rank (`int`, *optional*):
            Rank to which the engine pads adapters next to the layers with zeros, which affects the last bit.
            Defaults to their own rank.

    Raises:
        ValueError: from [`~trl_qarl.bitwise.availability.check_engine_numerics`], or if they are attached already.
    """
    if has_engine_numerics(model):
        raise ValueError("Engine numerics are attached to this model already. Call `detach_engine_numerics` first.")
    check_engine_numerics(model, dtype)
    model = base_model(model)
    device = next(model.parameters()).device.type
    if device == "cuda":
        cuda.prepare_process()
    layers = layers_in_engine(class_of(model).__name__)
    for module in Inventory.of(model).modules.values():
        if isinstance(module, QuantizedLayer):
            module.product = low_bit.low_bit_linear
        elif operation := operation_for(module, layers):
            module.forward = operation(module, dtype, device)
    for _, layer in LoraOperation.layers_of(model):
        layer.forward = LoraOperation(layer, dtype, device, adapter_rank)
    # accelerate wraps the model's forward later, which hides it.
    model._engine_forward = model.forward = _ModelForward(model, dtype, device, temperature)
    if is_sharded(model):
        keep_no_products(model)


def detach_engine_numerics(model: nn.Module) -> None:
    """Undo [`attach_engine_numerics`]. Parameters are untouched."""
    base_model(model)._engine_forward.detach()


def has_engine_numerics(model: nn.Module) -> bool:
    """Return whether [`attach_engine_numerics`] is in effect."""
    return hasattr(base_model(model), "_engine_forward")


def keep_no_products(model: nn.Module) -> None:
    """Have operations round and pack weights at each use: FSDP2 changes gathered values without a trace."""
    for module in model.modules():
        if (operation := operation_of(module)) is not None:
            operation.keeps_products = False


def logit_options(config: Any) -> tuple[float | None, float]:
    """Return the cap and the factor of a model's logits, like TRL's `add_fused_lm_head`."""
    return getattr(config, "final_logit_softcapping", None), 1 / getattr(config, "logits_scaling", 1.0)


def _true_positions(module, args, kwargs):
    """Count positions without padding on the left, which shifts transformers' default positions."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is None and mask is not None and cache_of(kwargs) is None:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_(min=0)
    return args, kwargs


class _ModelForward(EngineOperation):
    """The model's forward, with the engine's log-probs for calls with `fused_lm_head` (TRL's `add_fused_lm_head`)."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, device: str, temperature: float):
        super().__init__(model, dtype, device)
        self.temperature = temperature
        # TRL or accelerate may have set a forward on the instance.
        self.original = vars(model).get("forward")
        self.attention = model.config._attn_implementation
        register_attention()
        model.config._attn_implementation = ATTENTION
        self.position_hook = model.base_model.register_forward_pre_hook(_true_positions, with_kwargs=True)

    def detach(self) -> None:
        """Restore the model's forward, attention and positions, and its modules."""
        model = self.module
        model.config._attn_implementation = self.attention
        self.position_hook.remove()
        if self.original is None:
            del model.forward
        else:
            model.forward = self.original
        del model._engine_forward
        for module in model.modules():
            if isinstance(module, QuantizedLayer):
                module.product = low_bit_linear
            elif operation_of(module) is not None:
                del module.forward

    def __call__(self, *args, labels=None, shift_labels=None, fused_lm_head=False, **kwargs):
        model = self.module
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels}
            kwargs |= {name: value for name, value in given.items() if value is not None}
            original = self.original or MethodType(type(model).forward, model)
            return original(*args, **kwargs)
        outputs = model.base_model(*args, **kwargs | {"use_cache": False})
        hidden = outputs.last_hidden_state
        if shift_labels is None:
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        scored = shift_labels != -100
        places = scored.flatten().nonzero()[:, 0]
        hidden = hidden.flatten(0, 1).index_select(0, places)
        head = model.get_output_embeddings()
        # FSDP2 gathers the head with the last norm, but with an adapter only when the head itself is called.
        weight, bias = (None if master is None else whole(master) for master in (head.weight, head.bias))
        product = operation_of(head).product(weight)
        options = self.temperature, *logit_options(model.config)
        values = ops.head_log_probs(hidden, weight, bias, product, shift_labels[scored], *options)
        log_probs, entropy = (value.new_zeros(scored.shape).masked_scatter(scored, value) for value in values)
        aux_loss, config = None, model.config
        if logits := getattr(outputs, "router_logits", None):
            mask = kwargs.get("attention_mask")
            # All mixtures of transformers, and TRL, use Mixtral's.
            aux_loss = load_balancing_loss_func(logits, config.num_experts, config.num_experts_per_tok, mask)
        return FusedCausalLMOutput(log_probs=log_probs, entropy=entropy, aux_loss=aux_loss)
