"""
Modules of transformers' models with the engine's operations, by the class whose place they take.

What passes between decoder layers is the residual stream in float32, before the engine's rounding
([`~trl_qarl.numerics.ops.add`]), so each layer stays one unit for gradient checkpointing and sharding.
"""

from collections.abc import Callable
from functools import cache, wraps

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.activations import SiLUActivation
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from ..quantization.gemm import low_bit_linear
from ..quantization.linear import QuantizedLinear, weight_version
from ..quantization.schemes import INT4_PACKED
from . import cpu as kernels
from . import cuda, ops


__all__ = ["ATTENTION", "ENGINE_MODULES", "TRANSPARENT", "EngineModule", "engine_class", "head_dim_of"]

ATTENTION = "qarl_engine"
"""Name of the engine's attention among transformers' attention functions."""


def head_dim_of(config) -> int:
    """Size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _without_autocast(forward: Callable) -> Callable:
    @wraps(forward)
    def run(self, *args, **kwargs):
        with torch.autocast(self.engine_device, enabled=False):
            return forward(self, *args, **kwargs)

    return run


class EngineModule:
    """Base of the classes a module changes to; `original_class` is the one it changes back to."""

    engine_dtype: torch.dtype
    engine_device: str
    allow_longer: bool
    original_class: type

    def _attach(self) -> None:
        """Prepare what the forward needs."""

    def _detach(self) -> None:
        """Undo [`_attach`]."""


@cache
def engine_class(engine: type, original: type) -> type:
    # Sharding and checkpointing policies find decoder layers by their class's name.
    return type(original.__name__, (engine, original), {"original_class": original, "__module__": __name__})


class _Embedding(EngineModule):
    @_without_autocast
    def forward(self, ids):
        return super().forward(ids).to(self.engine_dtype)


class _RMSNorm(EngineModule):
    @_without_autocast
    def forward(self, x):
        return ops.rms_norm(x, self.weight, self.variance_epsilon, self.engine_dtype)


class _Linear(EngineModule):
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


class _QuantizedLinear(EngineModule):
    """A quantized layer already runs the engine's product, given activations in the engine's dtype; INT4 needs its kernel."""

    def _product(self, rows, low_bit, bias):
        if kernels.is_on_gpu(rows):
            y, seen, self.kernel_name = cuda.low_bit_linear(rows, low_bit, bias)
            return y, seen
        if self.scheme.container != INT4_PACKED:
            return super()._product(rows, low_bit, bias)
        if not kernels.has_engine_kernels():
            y, seen, self.kernel_name = low_bit_linear(rows, low_bit, bias, row_invariant=True)
            return y, seen
        product = low_bit.cached(kernels.PackedInt4Linear)
        self.kernel_name = product.name
        return product(rows, bias), (rows,)


class _RotaryEmbedding(EngineModule):
    """Gives attention the table and the positions, where the original gives it cosines and sines."""

    def _attach(self):
        # Over all positions at once, as the engine computes it: the last bit may depend on the shape.
        is_plain = self.rope_type == "default"
        compute = self.compute_default_rope_parameters if is_plain else ROPE_INIT_FUNCTIONS[self.rope_type]
        # On the device itself, as there: a GPU's powers and cosines are not a CPU's.
        with self.inv_freq.device:
            frequencies, _ = compute(self.config)
            positions = torch.arange(self.config.max_position_embeddings, dtype=torch.float)
            angles = torch.einsum("i,j -> ij", positions, frequencies)
        self._cache = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.engine_dtype)

    def _detach(self):
        del self._cache

    def forward(self, x, position_ids):
        return self._cache, position_ids.expand(x.shape[0], -1)


class _Attention(EngineModule):
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


class _MLP(EngineModule):
    @_without_autocast
    def forward(self, x):
        return self.down_proj(ops.silu_mul(self.gate_proj(x), self.up_proj(x)))


class _DecoderLayer(EngineModule):
    @_without_autocast
    def forward(self, hidden_states, **kwargs):
        residual = hidden_states.to(self.engine_dtype)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = ops.add(attended, residual)
        residual = hidden_states.to(self.engine_dtype)
        return ops.add(self.mlp(self.post_attention_layernorm(hidden_states)), residual)


ENGINE_MODULES = {
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
            ("MLP", _MLP),
            ("DecoderLayer", _DecoderLayer),
        )
    },
}

# Modules that compute nothing, or are not called any more.
TRANSPARENT = (nn.ModuleList, SiLUActivation)


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
    if module.engine_device != "cpu" or module.allow_longer or not kernels.has_engine_kernels():
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
