"""
The engine's operations by the class of transformers' module whose forward they replace.

Decoder layers return the residual stream in float32, before the engine's rounding, so each layer stays one unit for
gradient checkpointing and sharding.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.activations import SiLUActivation
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..quantization.names import adapted_layers, class_of
from ..quantization.storage import weight_version
from ..token_row import Segments
from . import expert_products as experts
from . import ops


ATTENTION = "qarl_engine"
"""Name of the engine's attention among transformers' attention functions."""


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


def operation_of(module: nn.Module) -> EngineOperation | None:
    """Return the engine's operation that replaces the module's forward, if any."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, EngineOperation) else None


class _Embedding(EngineOperation):
    def forward(self, ids):
        embedded = nn.Embedding.forward(self.module, ids).to(self.dtype)
        scale = getattr(self.module, "embed_scale", None)
        return embedded if scale is None else embedded * scale.to(self.dtype)


@lru_cache
def _weight_offset(kind: type) -> float | None:
    """Return what a class of RMSNorm adds to its weight, 0 or 1 (Gemma), or `None` if it is none."""
    if not kind.__name__.endswith("RMSNorm"):
        return None
    x, weight = torch.linspace(-1.0, 2.0, 8, device="cpu"), torch.linspace(-1.0, 1.0, 8, device="cpu")
    with torch.device("cpu"), torch.no_grad():
        norm = kind(8, eps=1e-6)
        norm.weight.copy_(weight)
        y, expected = norm(x), x * torch.rsqrt(x.pow(2).mean() + 1e-6)
    return next((offset for offset in (0.0, 1.0) if torch.allclose(y, expected * (weight + offset))), None)


class _RMSNorm(EngineOperation):
    def forward(self, x):
        module = self.module
        epsilon = getattr(module, "variance_epsilon", None) or module.eps
        return ops.rms_norm(x, module.weight, epsilon, self.dtype, _weight_offset(class_of(module)))


class _LayerNorm(EngineOperation):
    def forward(self, x):
        module = self.module
        weight, bias = (None if x is None else x.to(self.dtype) for x in (module.weight, module.bias))
        return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


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
        kinds = self.module.rope_type
        self.tables = {
            kind: self._table(name, {} if kind is None else {"layer_type": kind})
            for kind, name in (kinds if isinstance(kinds, dict) else {None: kinds}).items()
        }

    def _table(self, name: str, layers: dict[str, str]) -> torch.Tensor:
        module = self.module
        # For all positions at once, like the engine: the last bit may depend on the shape.
        compute = module.compute_default_rope_parameters if name == "default" else ROPE_INIT_FUNCTIONS[name]
        # On the device itself: powers and cosines of GPU and CPU differ.
        with next(module.buffers()).device:
            frequencies, _ = compute(module.config, **layers)
            positions = torch.arange(module.config.max_position_embeddings, dtype=torch.float)
            angles = torch.einsum("i,j -> ij", positions, frequencies)
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.dtype)

    def forward(self, x, position_ids, layer_type=None):
        table = self.tables[layer_type]
        # The kernel would read beyond the table.
        if (longest := int(position_ids.max()) + 1) > len(table):
            raise ValueError(
                f"A sequence has {longest} tokens, but model and engine have only {len(table)} positions "
                "(max_position_embeddings). Shorten prompts or completions."
            )
        return table, position_ids.expand(x.shape[0], -1)


@lru_cache
def _with_engine_rotation(forward: FunctionType) -> FunctionType:
    """Return the forward of an attention that rotates with the engine's kernel instead of `apply_rotary_pos_emb`."""
    # From transformers 5.24 on a decorator accepts the former names of arguments.
    forward = inspect.unwrap(forward)
    names = forward.__globals__
    # Pairs of features are neighbours (GLM), or half a head apart.
    is_interleaved = names["rotate_half"](torch.arange(4.0))[0].item() == -1

    def rotate(query, key, table, positions, unsqueeze_dim=1):
        flat = positions.reshape(-1)
        rows = (x.transpose(1, 2).flatten(0, 1) for x in (query, key))
        rotated = (ops.rotate(x, flat, table, is_interleaved) for x in rows)
        return tuple(x.unflatten(0, positions.shape).transpose(1, 2) for x in rotated)

    names = names | {"apply_rotary_pos_emb": rotate}
    return FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)


class _Attention(EngineOperation):
    def forward(self, *args, **kwargs):
        return _with_engine_rotation(class_of(self.module).forward)(self.module, *args, **kwargs)


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


_NORMS = (
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", None, "post_attention_layernorm", None),
)
"""Names of norms before and after attention, and before and after the MLP."""


class _DecoderLayer(EngineOperation):
    def forward(self, hidden_states, **kwargs):
        module = self.module
        names = next(names for names in _NORMS if all(name is None or hasattr(module, name) for name in names))
        norms = [nn.Identity() if name is None else getattr(module, name) for name in names]
        residual = hidden_states.to(self.dtype)
        attended, _ = module.self_attn(hidden_states=norms[0](hidden_states), **kwargs)
        # Engines store the rounded sum, but on a CPU they norm the sum itself.
        hidden_states = norms[1](attended).float() + residual.float()
        residual = hidden_states.to(self.dtype)
        return norms[3](module.mlp(norms[2](hidden_states))).float() + residual.float()


_BY_SUFFIX = {
    "RotaryEmbedding": _RotaryEmbedding,
    "Attention": _Attention,
    "DecoderLayer": _DecoderLayer,
    "TopKRouter": Router,
    "Experts": _Experts,
    "SparseMoeBlock": _SparseBlock,
}
"""Operations by the end of the name of transformers' class."""


def rope_types(config: Any) -> set[str]:
    """Return the kinds of rotary embeddings of a configuration, which may have one for each kind of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return {kind.get("rope_type", "default") for kind in kinds}


def operation_for(module: nn.Module, layers: str) -> type[EngineOperation] | None:
    """Return the engine's operation for a module that is not quantized, or `None` if the engine computes what the
    module's own forward does in its dtype. `layers` is [`~trl_qarl.models.Family.engine_layers`] of the model."""
    kind = class_of(module)
    if kind is nn.Linear:
        return _Linear
    if isinstance(module, nn.Embedding):
        return _Embedding
    if kind is nn.LayerNorm:
        return _LayerNorm
    if _weight_offset(kind) is not None:
        return _RMSNorm
    if kind.__name__.endswith("MLP") and hasattr(module, "gate_proj") and isinstance(module.act_fn, SiLUActivation):
        return _MLP
    operation = next((value for suffix, value in _BY_SUFFIX.items() if kind.__name__.endswith(suffix)), None)
    if operation is _DecoderLayer and layers != "fused":
        return None
    # vLLM rotates as transformers does where it runs transformers' code, and for LongRoPE.
    rotates_alike = layers == "transformers" or "longrope" in rope_types(getattr(module, "config", None))
    return None if operation in (_RotaryEmbedding, _Attention) and rotates_alike else operation


def _attend(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling,
    position_ids=None,
    sliding_window=None,
    softcap=None,
    layout=None,
    **kwargs,
):
    """
    Implement transformers' attention interface with the engine's kernel. Return `(B, T, heads, head_dim)`, 0 for
    padding, and `None` in place of attention weights.

    `query` is `(B, heads, T, head_dim)`, `key` and `value` are `(B, key_heads, S, head_dim)`, with a cache `S > T`.
    `attention_mask`, `(B, S)`, is true for tokens; `None` without padding. Without a mask, a new sequence begins where
    `position_ids`, `(B, T)` or `(1, T)`, are 0. With a `layout`, a [`~trl_qarl.token_row.Layout`], its row is the
    batch.
    """
    batch, _, length, _ = query.shape
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    options = {"scale": scaling, "window": sliding_window or None, "softcap": softcap}
    if layout is not None:
        layout.calls.append(ATTENTION)
        output = ops.attention(query[0], key[0], value[0], layout.segments, **options)
        return output[None], None
    if sliding_window and key.shape[1] != length:
        raise ValueError(
            f"Layers attend to a window of {sliding_window} tokens, and a cache drops older keys: engine numerics do not support "
            "decoding with such a cache. Take rollouts from vLLM (use_vllm=True), or use the fast numerics."
        )
    if attention_mask is None:
        if key.shape[1] == length and position_ids is not None:
            starts = (position_ids == 0).expand(batch, -1).flatten()
            starts[::length] = True
            bounds = [*starts.nonzero()[:, 0].tolist(), starts.numel()]
            key_lengths = query_lengths = tuple(b - a for a, b in pairwise(bounds))
        else:
            query_lengths, key_lengths = (length,) * batch, (key.shape[1],) * batch
        packed = (x.flatten(0, 1) for x in (query, key, value))
        output = ops.attention(*packed, Segments(query_lengths, key_lengths), **options)
        return output.view(query.shape), None
    present = attention_mask.bool()
    queries = present[:, -length:]
    query_lengths, key_lengths = (tuple(mask.sum(dim=1).tolist()) for mask in (queries, present))
    if 0 in query_lengths:
        raise ValueError("A sequence of the batch has no token: its attention mask is 0 everywhere.")
    packed = query[queries], key[present], value[present]
    output = ops.attention(*packed, Segments(query_lengths, key_lengths), **options)
    return torch.zeros_like(query).masked_scatter(queries[..., None, None], output), None


def register_attention() -> None:
    """Give transformers the attention of engine numerics by the name `ATTENTION`."""
    AttentionInterface.register(ATTENTION, _attend)
    # The mask `(B, S)` unchanged, or `None` if every position holds a token.
    AttentionMaskInterface.register(ATTENTION, flash_attention_mask)
