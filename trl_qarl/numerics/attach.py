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
from ..quantization.names import base_model
from ..quantization.storage import is_sharded, whole
from ..quantization.weight import QuantizedLayer
from . import cuda, low_bit, ops
from .availability import check_engine_numerics
from .modules import ATTENTION, ENGINE_OPERATIONS, EngineOperation, LoraOperation, cache_of, class_of, operation_of


def attach_engine_numerics(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, temperature: float = 1.0, adapter_rank: int | None = None
) -> None:
    """
    Have `model` compute every log-prob like the engine, bit for bit, with gradients.

    Quantized layers run the engine's product of their scheme; other parameters stay float32 masters that are rounded
    to `dtype` at each use. Autocast has no effect. Logits are in `dtype`; compute log-probs with
    [`~trl_qarl.numerics.ops.token_log_probs`], or pass `labels` and `fused_lm_head=True` like TRL.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            A model of a class in [`~trl_qarl.numerics.availability.COVERED_CLASSES`], prepared by
            [`~trl_qarl.prepare_model`] or not quantized, with or without LoRA.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            Dtype in which the engine runs the model.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, for calls with `fused_lm_head=True`.
        adapter_rank (`int`, *optional*):
            Rank to which the engine pads adapters next to the layers with zeros, which affects the last bit.
            Defaults to their own rank.

    Raises:
        ValueError: from [`~trl_qarl.numerics.availability.check_engine_numerics`], or if they are attached already.
    """
    if has_engine_numerics(model):
        raise ValueError("Engine numerics are attached to this model already. Call `detach_engine_numerics` first.")
    check_engine_numerics(model, dtype)
    model = base_model(model)
    device = next(model.parameters()).device.type
    if device == "cuda":
        cuda.prepare_process()
    for module in Inventory.of(model).modules.values():
        if isinstance(module, QuantizedLayer):
            module.product = low_bit.low_bit_linear
        elif operation := ENGINE_OPERATIONS.get(class_of(module)):
            module.forward = operation(module, dtype, device)
    for _, layer in LoraOperation.layers_of(model):
        layer.forward = LoraOperation(layer, dtype, device, adapter_rank)
    # accelerate wraps the model's forward later, which hides it.
    model._engine_forward = model.forward = _ModelForward(model, dtype, device, temperature)
    if is_sharded(model):
        keep_no_products(model)


def detach_engine_numerics(model: nn.Module) -> None:
    """Undo [`attach_engine_numerics`]. Parameters are untouched."""
    model = base_model(model)
    model._engine_forward.detach()
    del model._engine_forward
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            module.product = low_bit_linear
        elif operation_of(module) is not None:
            del module.forward


def has_engine_numerics(model: nn.Module) -> bool:
    """Return whether [`attach_engine_numerics`] is in effect."""
    return hasattr(base_model(model), "_engine_forward")


def keep_no_products(model: nn.Module) -> None:
    """Have operations round and pack weights at each use: FSDP2 changes gathered values without a trace."""
    for module in model.modules():
        if (operation := operation_of(module)) is not None:
            operation.keeps_products = False


def _true_positions(module, args, kwargs):
    """Count positions without padding on the left, which shifts transformers' default positions."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is None and mask is not None and cache_of(kwargs) is None:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_(min=0)
    return args, kwargs


def _pack(kwargs: dict[str, Any], scored: torch.Tensor) -> dict[str, Any] | None:
    """Return the model's keyword arguments for a padded batch with all tokens in one row, where positions separate the
    sequences: their bits stay the same, and padding costs nothing. `None` without padding, or for inputs of another
    form. `scored`, `(B, T - 1)`, is true at positions whose next token is scored."""
    known = "input_ids", "attention_mask", "position_ids"
    ids, mask, given = map(kwargs.get, known)
    if ids is None or mask is None or mask.shape != ids.shape or mask.all():
        return None
    if any(isinstance(value, torch.Tensor) for name, value in kwargs.items() if name not in known):
        return None
    mask = mask.bool()
    own = mask.cumsum(-1) - 1
    counts_from_zero = given is None or torch.equal(given.expand_as(own)[mask], own[mask])
    # An empty sequence, or a scored token after padding, cannot be packed.
    if not (counts_from_zero and mask.any(dim=1).all() and mask[:, :-1][scored].all()):
        return None
    return kwargs | {"input_ids": ids[mask][None], "position_ids": own[mask][None], "attention_mask": None}


class _ModelForward(EngineOperation):
    """The model's forward, with the engine's log-probs for calls with `fused_lm_head` (TRL's `add_fused_lm_head`)."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, device: str, temperature: float):
        super().__init__(model, dtype, device)
        self.temperature = temperature
        # TRL or accelerate may have set a forward on the instance.
        self.original = vars(model).get("forward")
        self.attention = model.config._attn_implementation
        model.config._attn_implementation = ATTENTION
        self.position_hook = model.base_model.register_forward_pre_hook(_true_positions, with_kwargs=True)

    def detach(self) -> None:
        """Restore the model's forward, attention and positions."""
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
            original = self.original or MethodType(type(model).forward, model)
            return original(*args, **kwargs)
        labels = labels[:, 1:]
        scored = labels != -100
        kwargs |= {"use_cache": False}
        packed = _pack(kwargs, scored)
        outputs = model.base_model(*args, **packed or kwargs)
        hidden = outputs.last_hidden_state
        if packed is None:
            hidden, mask = hidden[:, :-1][scored], kwargs.get("attention_mask")
        else:
            places = kwargs["attention_mask"].bool().flatten().cumsum(0).view(len(labels), -1) - 1
            # Without padding the load-balancing loss needs no mask.
            hidden, mask = hidden[0].index_select(0, places[:, :-1][scored]), None
        head = model.get_output_embeddings()
        # FSDP2 gathers the head with the last norm, but with an adapter only when the head itself is called.
        weight, bias = (None if master is None else whole(master) for master in (head.weight, head.bias))
        product = operation_of(head).product(weight)
        values = ops.head_log_probs(hidden, weight, bias, product, labels[scored], self.temperature)
        log_probs, entropy = (value.new_zeros(labels.shape).masked_scatter(scored, value) for value in values)
        aux_loss, config = None, model.config
        if logits := getattr(outputs, "router_logits", None):
            # All mixtures of transformers, and TRL, use Mixtral's.
            aux_loss = load_balancing_loss_func(logits, config.num_experts, config.num_experts_per_tok, mask)
        return FusedCausalLMOutput(log_probs=log_probs, entropy=entropy, aux_loss=aux_loss)
