"""
The engine's operations by the class of transformers' module whose forward they replace.

Decoder layers return the residual stream in float32, before the engine's rounding, so each layer stays one unit for
gradient checkpointing and sharding.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.activations import SiLUActivation
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.mixtral.modeling_mixtral import MixtralAttention

from ..models import family_of, with_fact
from ..quantization.names import adapted_layers
from ..quantization.storage import weight_version
from . import expert_products as experts
from . import ops


ATTENTION = "qarl_engine"
"""Name of the engine's attention among transformers' attention functions."""


def window_of(module: nn.Module) -> int | None:
    """Return the number of last keys that a query of an attention layer sees, or `None` (in configurations also 0) if
    it sees all keys."""
    if isinstance(module, (MistralAttention, MixtralAttention)):
        return module.config.sliding_window or None
    return getattr(module, "sliding_window", None) or None


def cache_of(arguments: Mapping[str, Any]) -> Cache | None:
    """Return the cache of keys and values among the arguments of a forward. Its name is `past_key_values`, and from
    transformers 5.24 on `cache`."""
    return next((value for value in arguments.values() if isinstance(value, Cache)), None)


class EngineOperation:
    """
    The forward of a module in the engine's arithmetic, in `dtype` on a type of `device`. Set as the attribute
    `forward` of the instance, it replaces the forward of the class for torch, transformers and PEFT, and is copied and
    pickled with the module. With `keeps_products`, products are kept while the values of their weights do not change.
    """

    forward: Callable[..., Any]
    keeps_products = True

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: str):
        self.module, self.dtype, self.device = module, dtype, device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device, enabled=False):
            return self.forward(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """Signature of the class's forward, which `generate` inspects."""
        return inspect.signature(MethodType(type(self.module).forward, self.module))


def class_of(module: nn.Module) -> type:
    """Return the class of a module, or its former class if FSDP2 manages it."""
    # torch derives a class from `FSDPModule` and the former class.
    return type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)


def operation_of(module: nn.Module) -> EngineOperation | None:
    """Return the engine's operation that replaces the module's forward, if any."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, EngineOperation) else None


class _Embedding(EngineOperation):
    def forward(self, ids):
        return type(self.module).forward(self.module, ids).to(self.dtype)


class _RMSNorm(EngineOperation):
    def forward(self, x):
        return ops.rms_norm(x, self.module.weight, self.module.variance_epsilon, self.dtype)


class _Packed(EngineOperation):
    """Operation with unquantized `weights`, of which `packing` makes a product after rounding to the dtype."""

    weights: tuple[str, ...]
    packing: Callable[..., Any]

    def __init__(self, *args):
        super().__init__(*args)
        self._product = self._versions = None

    def product(self, *masters: torch.Tensor) -> Any:
        """Return the product of `masters`, by default the module's own."""
        masters = masters or tuple(getattr(self.module, name) for name in self.weights)
        versions = [weight_version(master) if self.keeps_products else None for master in masters]
        if None not in versions and versions == self._versions:
            return self._product
        product = self.packing(*(master.detach().to(self.dtype) for master in masters))
        if None not in versions:
            self._product, self._versions = product, versions
        return product

    def __getstate__(self):
        return {**self.__dict__, "_product": None, "_versions": None}


class _Linear(_Packed):
    weights, packing = ("weight",), staticmethod(lambda weight: ops.backend_of(weight).PackedLinear(weight))

    def forward(self, x):
        return ops.linear(x, self.module.weight, self.module.bias, self.product())


class LoraOperation(EngineOperation):
    """PEFT's LoRA layer with the adapter next to the layer inside it. Like in the engine, factors are rounded, B with
    its scaling, and padded with zeros to `rank`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: str, rank: int | None):
        super().__init__(module, dtype, device)
        self.rank = rank

    @staticmethod
    def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield PEFT's layers whose adapter is outside the low-bit weight."""
        layers = adapted_layers(model)
        return ((name, layer) for name, layer in layers if not getattr(layer.base_layer, "holds_adapter", False))

    def forward(self, x):
        module = self.module
        y = module.base_layer(x)
        if module.disable_adapters or module.merged:
            return y
        for name in module.active_adapters:
            if name in module.lora_A:
                factors = module.lora_A[name].weight, module.lora_B[name].weight
                y = ops.add_lora(y, x, *factors, module.scaling[name], self.rank or module.r[name])
        return y


class _RotaryEmbedding(EngineOperation):
    """Passes the table and the positions to attention, instead of cosines and sines."""

    def __init__(self, *args):
        super().__init__(*args)
        module = self.module
        # For all positions at once, like the engine: the last bit may depend on the shape.
        is_plain = module.rope_type == "default"
        compute = module.compute_default_rope_parameters if is_plain else ROPE_INIT_FUNCTIONS[module.rope_type]
        # On the device itself: powers and cosines of GPU and CPU differ.
        with module.inv_freq.device:
            frequencies, _ = compute(module.config)
            positions = torch.arange(module.config.max_position_embeddings, dtype=torch.float)
            angles = torch.einsum("i,j -> ij", positions, frequencies)
        self.table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.dtype)

    def forward(self, x, position_ids):
        # The kernel would read beyond the table.
        if (longest := int(position_ids.max()) + 1) > len(self.table):
            raise ValueError(
                f"A sequence has {longest} tokens, but model and engine have only {len(self.table)} positions "
                "(max_position_embeddings). Shorten prompts or completions."
            )
        return self.table, position_ids.expand(x.shape[0], -1)


class _Attention(EngineOperation):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        module = self.module
        table, positions = position_embeddings
        shape = hidden_states.shape[:-1]
        query, key, value = (
            layer(hidden_states).view(*shape, -1, module.head_dim)
            for layer in (module.q_proj, module.k_proj, module.v_proj)
        )
        if hasattr(module, "q_norm"):
            query, key = module.q_norm(query), module.k_norm(key)
        flat = positions.reshape(-1)
        query, key = (ops.rotate(x.flatten(0, 1), flat, table).view_as(x).transpose(1, 2) for x in (query, key))
        value = value.transpose(1, 2)
        window = window_of(module)
        if (cache := cache_of(kwargs)) is not None:
            if window is not None:
                raise ValueError(
                    f"Layers attend to a window of {window} tokens, and a cache drops older keys: engine numerics do not support "
                    "decoding with such a cache. Take rollouts from vLLM (use_vllm=True), or use the fast numerics."
                )
            key, value = cache.update(key, value, module.layer_idx)
        options = kwargs | {"scaling": module.scaling, "position_ids": positions, "sliding_window": window}
        output, _ = _attend(module, query, key, value, attention_mask, **options)
        return module.o_proj(output.reshape(*shape, -1)), None


class _MLP(EngineOperation):
    def forward(self, x):
        module = self.module
        return module.down_proj(ops.silu_mul(module.gate_proj(x), module.up_proj(x)))


class Router(_Linear):
    """Returns logits in the engine's dtype, weights in float32, and experts in the engine's order, unsorted."""

    def forward(self, x):
        module = self.module
        logits = ops.linear(x.reshape(-1, module.hidden_dim), module.weight, None, self.product())
        # Mixtral's weights always sum to 1.
        return logits, *experts.route(logits, module.top_k, getattr(module, "norm_topk_prob", True))


class _Experts(_Packed):
    weights, packing = ("gate_up_proj", "down_proj"), experts.PackedExperts

    def forward(self, x, ids, weights):
        return experts.experts(x, ids, weights, self.module.gate_up_proj, self.module.down_proj, self.product())


class _SparseBlock(EngineOperation):
    """Experts, and the shared expert if there is one."""

    def forward(self, hidden_states):
        module = self.module
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = module.gate(x)
        output = module.experts(x, ids, weights)
        if hasattr(module, "shared_expert"):
            output = torch.sigmoid(module.shared_expert_gate(x)) * module.shared_expert(x) + output
        return output.view(hidden_states.shape)


class _DecoderLayer(EngineOperation):
    def forward(self, hidden_states, **kwargs):
        module = self.module
        residual = hidden_states.to(self.dtype)
        attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **kwargs)
        # Engines store the rounded sum, but on a CPU they norm the sum itself.
        hidden_states = attended.float() + residual.float()
        residual = hidden_states.to(self.dtype)
        return module.mlp(module.post_attention_layernorm(hidden_states)).float() + residual.float()


ENGINE_OPERATIONS = {
    nn.Embedding: _Embedding,
    nn.Linear: _Linear,
    **{
        getattr(module, f"{family.prefix}{name}"): operation
        for family in map(family_of, with_fact("has_engine_numerics"))
        for folder in [family.model_type]
        for module in [import_module(f"transformers.models.{folder}.modeling_{folder}")]
        for name, operation in (
            ("RMSNorm", _RMSNorm),
            ("RotaryEmbedding", _RotaryEmbedding),
            ("Attention", _Attention),
            ("MLP", _MLP),
            ("DecoderLayer", _DecoderLayer),
            ("TopKRouter", Router),
            ("Experts", _Experts),
            ("SparseMoeBlock", _SparseBlock),
        )
        # A mixture has no plain block, a dense model no experts.
        if hasattr(module, f"{family.prefix}{name}")
    },
}
"""Operations by the class of the module; quantized layers and experts keep their forward and get
[`~trl_qarl.bitwise.low_bit.low_bit_linear`]."""

TRANSPARENT = (nn.ModuleList, SiLUActivation)
"""Modules that compute nothing, or are no longer called."""


def _attend(
    module, query, key, value, attention_mask, scaling, position_ids=None, sliding_window=None, layout=None, **kwargs
):
    """
    Implement transformers' attention interface with the engine's kernel. Return `(B, T, heads, head_dim)`, 0 for
    padding, and `None` in place of attention weights.

    `query` is `(B, heads, T, head_dim)`, `key` and `value` are `(B, key_heads, S, head_dim)`, with a cache `S > T`.
    `attention_mask`, `(B, S)`, is true for tokens; `None` without padding. Without a mask, a new sequence begins where
    `position_ids`, `(B, T)`, are 0. With a `layout`, a [`~trl_qarl.token_row.Layout`], its row is the batch.
    """
    batch, _, length, _ = query.shape
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if layout is not None:
        layout.calls.append(ATTENTION)
        lengths = layout.query_lengths, layout.key_lengths
        output = ops.attention(query[0], key[0], value[0], *lengths, scaling, sliding_window, layout.keys)
        return output[None], None
    if attention_mask is None:
        if key.shape[1] == length and position_ids is not None:
            starts = (position_ids == 0).flatten()
            starts[::length] = True
            bounds = [*starts.nonzero()[:, 0].tolist(), starts.numel()]
            key_lengths = query_lengths = tuple(b - a for a, b in pairwise(bounds))
        else:
            query_lengths, key_lengths = (length,) * batch, (key.shape[1],) * batch
        packed = (x.flatten(0, 1) for x in (query, key, value))
        output = ops.attention(*packed, query_lengths, key_lengths, scaling, sliding_window)
        return output.view(query.shape), None
    present = attention_mask.bool()
    queries = present[:, -length:]
    query_lengths, key_lengths = (tuple(mask.sum(dim=1).tolist()) for mask in (queries, present))
    if 0 in query_lengths:
        raise ValueError("A sequence of the batch has no token: its attention mask is 0 everywhere.")
    packed = query[queries], key[present], value[present]
    output = ops.attention(*packed, query_lengths, key_lengths, scaling, sliding_window)
    return torch.zeros_like(query).masked_scatter(queries[..., None, None], output), None


def register_attention() -> None:
    """Give transformers the attention of engine numerics by the name `ATTENTION`."""
    AttentionInterface.register(ATTENTION, _attend)
    # The mask `(B, S)` unchanged, or `None` if every position holds a token.
    AttentionMaskInterface.register(ATTENTION, flash_attention_mask)
