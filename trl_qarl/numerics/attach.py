"""
Putting the engine's operations into a transformers model, and taking them out.

A module is changed by its class, as [`~trl_qarl.quantization.linear.QuantizedLinear`] is: parameters, names, hooks and ties stay, and so
does whatever looks at `isinstance`. What passes between decoder layers is the residual stream in float32, before the
engine's rounding ([`~trl_qarl.numerics.ops.add`]), so each layer stays one unit for gradient checkpointing and sharding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import MethodType

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.utils import ModelOutput

from ..quantization.gemm import low_bit_linear
from ..quantization.linear import QuantizedLinear, weight_version
from . import kernels, ops


__all__ = [
    "COVERED_CLASSES",
    "attach_engine_numerics",
    "check_engine_numerics",
    "detach_engine_numerics",
    "engine_numerics",
    "has_engine_numerics",
]

ATTENTION = "qarl_engine"
"""Name of the engine's attention among transformers' attention functions."""

COVERED_CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
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
            A model of a class in [`COVERED_CLASSES`], prepared by [`~trl_qarl.prepare_model`] or not quantized.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            Dtype in which the engine runs the model.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, for calls with `fused_lm_head=True`.
        allow_longer (`bool`, *optional*, defaults to `False`):
            Whether sequences may be longer than [`~trl_qarl.numerics.kernels.max_exact_length`], whose attention the engine
            rounds otherwise in decoding. By default they raise.

    Raises:
        ValueError: from [`check_engine_numerics`], or if they are attached already.
    """
    if has_engine_numerics(model):
        raise ValueError("Engine numerics are attached to this model already.")
    check_engine_numerics(model, dtype)
    for module in list(model.modules()):
        for original, engine in _ENGINE_MODULES.items():
            if type(module) is original:
                module.engine_dtype = dtype
                module.allow_longer = allow_longer
                module.__class__ = _engine_class(engine, original)
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
        if isinstance(module, _EngineModule):
            module._detach()
            del module.engine_dtype, module.allow_longer
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
    return any(isinstance(module, _EngineModule) for module in model.modules())


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
    name = type(model).__name__
    yield name in COVERED_CLASSES, f"the operations of {name} are not known, those of {', '.join(COVERED_CLASSES)} are"
    yield dtype is torch.bfloat16, f"they exist in bfloat16, not in {dtype}"
    device = next(model.parameters()).device
    yield device.type == "cpu", f"they exist for CPUs; the model is on {device}"
    # Without vLLM the same operations run in torch, which has fewer limits.
    is_engine = kernels.has_engine_kernels()
    yield not is_engine or torch.cpu._is_avx512_supported(), "this processor has no AVX512"
    config = model.config
    yield config.hidden_act == "silu", f"hidden_act={config.hidden_act!r} is not 'silu'"
    windows = {kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"}
    yield not windows, f"layers attend with {sorted(windows)}, not with 'full_attention' alone"
    for option in ("attn_logit_softcapping", "final_logit_softcapping"):
        yield not getattr(config, option, None), f"the model caps logits ({option}={getattr(config, option, None)})"
    yield not config.attention_dropout, f"attention_dropout={config.attention_dropout} is not 0"
    rope = config.rope_parameters.get("rope_type", "default")
    yield rope in ROPE_TYPES, f"rope_type={rope!r} is none of {list(ROPE_TYPES)}"
    head_dim = _head_dim(config)
    yield not is_engine or head_dim in HEAD_DIMS, f"head_dim={head_dim} is none of {list(HEAD_DIMS)}"
    known = (*_ENGINE_MODULES, *_TRANSPARENT)
    for path, module in model.named_modules():
        if type(module) not in known and path not in ("", model.base_model_prefix):
            yield False, f"{path!r} is a {type(module).__name__}, whose operations are not known"
        if isinstance(module, QuantizedLinear):
            scheme = module.scheme.name
            yield (
                scheme in kernels.SCHEMES,
                f"{path!r} has scheme {scheme!r}, which is none of {list(kernels.SCHEMES)}",
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


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _true_positions(module, args, kwargs):
    """Positions count a sequence's own tokens: padding on the left must not shift them, as it would by default."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is None and mask is not None and kwargs.get("past_key_values") is None:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_(min=0)
    return args, kwargs


def _without_autocast(forward: Callable) -> Callable:
    @wraps(forward)
    def run(self, *args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            return forward(self, *args, **kwargs)

    return run


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


class _EngineModule:
    """Base of the classes a module changes to; `original_class` is the one it changes back to."""

    engine_dtype: torch.dtype
    allow_longer: bool
    original_class: type

    def _attach(self) -> None:
        """Prepare what the forward needs."""

    def _detach(self) -> None:
        """Undo [`_attach`]."""


@cache
def _engine_class(engine: type, original: type) -> type:
    # Sharding and checkpointing policies find decoder layers by their class's name.
    return type(original.__name__, (engine, original), {"original_class": original, "__module__": __name__})


class _Embedding(_EngineModule):
    @_without_autocast
    def forward(self, ids):
        return super().forward(ids).to(self.engine_dtype)


class _RMSNorm(_EngineModule):
    @_without_autocast
    def forward(self, x):
        return ops.rms_norm(x, self.weight, self.variance_epsilon, self.engine_dtype)


class _Linear(_EngineModule):
    """An unquantized linear layer. The rounded, packed weight is kept for as long as the master's value stays."""

    def _attach(self):
        self._product, self._product_version = None, None

    def _detach(self):
        del self._product, self._product_version

    def product(self) -> kernels.PackedLinear:
        version = weight_version(self.weight)
        if version is None or version != self._product_version:
            self._product = kernels.PackedLinear(self.weight.detach().to(self.engine_dtype))
            self._product_version = version
        return self._product

    @_without_autocast
    def forward(self, x):
        return ops.linear(x, self.weight, self.bias, self.product())


class _QuantizedLinear(_EngineModule):
    """A quantized layer already runs the engine's product, given activations in the engine's dtype; INT4 needs its kernel."""

    def _product(self, rows, low_bit, bias):
        if self.scheme.name != "w4a16":
            return super()._product(rows, low_bit, bias)
        if not kernels.has_engine_kernels():
            y, seen, self.kernel_name = low_bit_linear(rows, low_bit, bias, row_invariant=True)
            return y, seen
        product = low_bit.cached(kernels.PackedInt4Linear)
        self.kernel_name = product.name
        return product(rows, bias), (rows,)


class _RotaryEmbedding(_EngineModule):
    """Gives attention the table and the positions, where the original gives it cosines and sines."""

    def _attach(self):
        # Over all positions at once, as the engine computes it: the last bit may depend on the shape.
        is_plain = self.rope_type == "default"
        compute = self.compute_default_rope_parameters if is_plain else ROPE_INIT_FUNCTIONS[self.rope_type]
        frequencies, _ = compute(self.config)
        angles = torch.einsum(
            "i,j -> ij", torch.arange(self.config.max_position_embeddings, dtype=torch.float), frequencies
        )
        self._cache = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.engine_dtype)

    def _detach(self):
        del self._cache

    def forward(self, x, position_ids):
        return self._cache, position_ids.expand(x.shape[0], -1)


class _Attention(_EngineModule):
    @_without_autocast
    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        cache, positions = position_embeddings
        shape = hidden_states.shape[:-1]
        query, key, value = (
            layer(hidden_states).view(*shape, -1, self.head_dim) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        flat = positions.reshape(-1)
        query, key = (ops.rotate(x.flatten(0, 1), flat, cache).view_as(x).transpose(1, 2) for x in (query, key))
        value = value.transpose(1, 2)
        kwargs.pop("position_ids", None)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[ATTENTION]
        output, _ = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, position_ids=positions, **kwargs
        )
        return self.o_proj(output.reshape(*shape, -1)), None


class _DecoderLayer(_EngineModule):
    @_without_autocast
    def forward(self, hidden_states, **kwargs):
        residual = hidden_states.to(self.engine_dtype)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = ops.add(attended, residual)
        residual = hidden_states.to(self.engine_dtype)
        return ops.add(self.mlp(self.post_attention_layernorm(hidden_states)), residual)


_ENGINE_MODULES = {
    nn.Embedding: _Embedding,
    nn.Linear: _Linear,
    QuantizedLinear: _QuantizedLinear,
    **{
        getattr(module, f"{prefix}{name}"): engine
        for module, prefix in ((llama, "Llama"), (qwen2, "Qwen2"), (qwen3, "Qwen3"))
        for name, engine in (
            ("RMSNorm", _RMSNorm),
            ("RotaryEmbedding", _RotaryEmbedding),
            ("Attention", _Attention),
            ("DecoderLayer", _DecoderLayer),
        )
    },
}

# Modules whose forward, given bfloat16 outside autocast, is the engine's already.
_TRANSPARENT = (llama.LlamaMLP, qwen2.Qwen2MLP, qwen3.Qwen3MLP, nn.ModuleList, SiLUActivation)


def _attend(module, query, key, value, attention_mask, scaling, position_ids=None, **kwargs):
    """
    transformers' attention interface for the engine's kernel.

    Args:
        module (`nn.Module`): the attention layer.
        query (`torch.Tensor`): `(B, heads, T, head_dim)`.
        key (`torch.Tensor`): `(B, key_heads, S, head_dim)`, with a cache `S > T`.
        value (`torch.Tensor`): as `key`.
        attention_mask (`torch.Tensor` or `None`): `(B, S)`, true where there is a token; `None` if there is one everywhere.
        scaling (`float`): factor of the scores.
        position_ids (`torch.Tensor`, *optional*): `(B, T)`; where they start again, without a mask, so does a sequence.

    Returns:
        `(B, T, heads, head_dim)`, 0 where there is no token, and `None` for the weights.
    """
    batch, _, length, head_dim = query.shape
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask is None:
        key_lengths = query_lengths = None
        if key.shape[1] == length and position_ids is not None:
            starts = (position_ids == 0).flatten()
            starts[::length] = True
            ends = [*starts.nonzero()[1:, 0].tolist(), starts.numel()]
            key_lengths = query_lengths = tuple(b - a for a, b in zip([0, *ends[:-1]], ends, strict=True))
        else:
            query_lengths, key_lengths = (length,) * batch, (key.shape[1],) * batch
        _check_length(module, max(key_lengths), head_dim)
        packed = (x.flatten(0, 1) for x in (query, key, value))
        output = ops.attention(*packed, query_lengths, key_lengths, scaling)
        return output.view(query.shape), None
    present = attention_mask.bool()
    queries = present[:, -length:]
    query_lengths, key_lengths = (tuple(mask.sum(dim=1).tolist()) for mask in (queries, present))
    if 0 in query_lengths:
        raise ValueError("A sequence of the batch has no token: its attention mask is 0 everywhere.")
    _check_length(module, max(key_lengths), head_dim)
    output = ops.attention(query[queries], key[present], value[present], query_lengths, key_lengths, scaling)
    return torch.zeros_like(query).masked_scatter(queries[..., None, None], output), None


def _check_length(module: _Attention, longest: int, head_dim: int) -> None:
    if module.allow_longer or not kernels.has_engine_kernels():
        return
    limit = kernels.max_exact_length(head_dim)
    if longest > limit:
        raise ValueError(
            f"A sequence has {longest} tokens. With head_dim={head_dim}, vLLM's attention computes a token of up to {limit} "
            "alike in prefill and decode on this processor (they fill half its L2 cache), and differently beyond. Shorten "
            "prompts or completions, or use numerics='fast' or exact='warn'."
        )


AttentionInterface.register(ATTENTION, _attend)
# `(B, S)` as it came, or `None` if every position holds a token.
AttentionMaskInterface.register(ATTENTION, flash_attention_mask)
