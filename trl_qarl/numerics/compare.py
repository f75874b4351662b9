"""
A release of vLLM against the learner: products, an attention and on GPUs norms, each by the learner's function and by
the class or function that vLLM's own layers call. All bits must be equal, also for other numbers of rows.

This stands in for a list of releases: what has moved or changed is named, whatever the release is called. What is not
compared here (norms, rotation, sampling) shows in the first batch, every one of which is checked
([`trl_qarl.numerics.exact`]).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ..quantization.schemes import get_scheme
from ..quantization.tensors import LowBitTensor


__all__ = ["first_difference", "first_difference_on_gpu"]

ROWS = (1, 5, 40)
"""Decoding of one sequence and of several, and a prefill."""


@torch.no_grad()
def first_difference(
    linear: Callable[[torch.Tensor], Callable[..., torch.Tensor]],
    dispatch: Callable[[nn.Module, bool], None],
    attention: Callable[..., torch.Tensor],
    num_keys: int,
    block_size: int,
) -> str | None:
    """
    Return what vLLM computes otherwise than the learner, in words, or `None`. `linear` makes the learner's product of
    an unquantized weight, and `dispatch` gives a layer of vLLM its own, as an engine that is told to use the learner's
    does. `attention` is the learner's, of a sequence of `num_keys`, of which the engine's cache has `block_size` in a
    block.
    """
    generator = torch.Generator().manual_seed(0)
    return _first_difference(
        {
            "product of unquantized weights": lambda: _products(linear, dispatch, generator),
            "attention": lambda: _attentions(attention, num_keys, block_size, generator),
        }
    )


@torch.no_grad()
def first_difference_on_gpu(kernels: Any, device: torch.device) -> str | None:
    """Return what a batch-invariant engine computes otherwise than the learner on a GPU, in words, or `None`.
    `kernels` are the learner's functions, [`trl_qarl.numerics.cuda`], whose environment is set."""
    generator = torch.Generator().manual_seed(0)

    def random(*shapes):
        return [tensor.to(device) for tensor in _random(generator, *shapes)]

    return _first_difference(
        {
            "product of unquantized weights": lambda: _fused_products(kernels.linear, random),
            "product of low-bit weights": lambda: _products_in_batches(kernels.low_bit_linear, random),
            "norm": lambda: _norms(kernels.rms_norm, random),
            "attention": lambda: _flash_attentions(kernels.attention, kernels.BLOCK_SIZE, random),
        }
    )


def _first_difference(
    operations: Mapping[str, Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]],
) -> str | None:
    for name, pairs in operations.items():
        try:
            differing = next((pair for pair in pairs() if not torch.equal(*pair)), None)
        # A release may have moved, renamed or removed anything.
        except Exception as error:
            return f"its {name} cannot be compared ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        if differing is not None:
            ours, theirs = (tensor.float() for tensor in differing)
            where = ours != theirs
            largest = (ours - theirs).abs().max().item()
            return f"its {name} differs from the learner's in {where.sum()} of {where.numel()} numbers, by up to {largest:.2g}"
    return None


def _products(linear, dispatch, generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, weight, bias = _random(generator, (max(ROWS), 256), (64, 256), (64,))
    layer = nn.Module()
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    layer.bias = nn.Parameter(bias, requires_grad=False)
    dispatch(layer, False)
    ours = linear(weight)(x, bias)
    for rows in ROWS:
        yield ours[:rows], layer.cpu_linear(x[:rows], layer.weight, layer.bias)


def _attentions(attention, num_keys, block_size, generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    heads, key_heads, head_dim, scale = 4, 2, 64, 0.125
    query, key, value = _random(generator, *((num_keys, count, head_dim) for count in (heads, key_heads, key_heads)))
    ours = attention(query, key, value, (num_keys,), (num_keys,), scale)
    # All that the engine's attention asks of its configuration.
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=query.dtype))
    with patch.object(cpu_attn, "get_current_vllm_config", lambda: config, create=True):
        engine = cpu_attn.CPUAttentionBackendImpl(heads, head_dim, scale, key_heads, None, None, "auto")
    layer: Any = SimpleNamespace(isa=cpu_attn._get_attn_isa(query.dtype, block_size, head_dim))
    layer._k_scale_float = layer._v_scale_float = 1.0
    blocks = -(-num_keys // block_size)
    cache = query.new_zeros(blocks, key_heads, block_size, 2 * head_dim)
    engine.do_kv_cache_update(layer, key, value, cache, torch.arange(num_keys))
    lengths = torch.tensor([num_keys], dtype=torch.int32)
    for rows in (1, num_keys):
        starts = torch.tensor([0, rows], dtype=torch.int32)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=heads,
            num_kv_heads=key_heads,
            head_dim=head_dim,
            seq_lens=lengths,
            dtype=query.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=layer.isa,
            enable_kv_split=False,
        )
        metadata = cpu_attn.CPUAttentionMetadata(
            num_actual_tokens=rows,
            max_query_len=rows,
            query_start_loc=starts,
            max_seq_len=num_keys,
            seq_lens=lengths,
            block_table=torch.arange(blocks, dtype=torch.int32)[None],
            slot_mapping=torch.arange(num_keys - rows, num_keys),
            scheduler_metadata=schedule,
        )
        queries = query[-rows:].contiguous()
        output = torch.zeros_like(queries)
        engine.forward(layer, queries, key[-rows:], value[-rows:], cache, metadata, output)
        yield ours[-rows:], output


def _fused_products(linear, random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """An engine has query, key and value in one matrix, the learner in three."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    x, weight, bias = random((max(ROWS), 256), (96, 256), (96,))
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    for b in (None, bias):
        parts = [(weight[i : i + 32], None if b is None else b[i : i + 32]) for i in range(0, 96, 32)]
        ours = torch.cat([linear(x, *part) for part in parts], dim=-1)
        for rows in ROWS:
            yield ours[:rows], UnquantizedLinearMethod().apply(layer, x[:rows], b)


def _products_in_batches(low_bit_linear, random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The engine's product is the learner's: what can differ is a row among others."""
    for scheme in ("w4a16", "fp8"):
        x, weight, bias = random((max(ROWS), 256), (64, 256), (64,))
        low_bit = LowBitTensor.from_hp(weight, get_scheme(scheme), torch.bfloat16)
        ours = low_bit_linear(x, low_bit, bias)[0]
        for rows in ROWS:
            yield ours[:rows], low_bit_linear(x[:rows], low_bit, bias)[0]


def _norms(rms_norm, random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One norm, and one of the residual stream that is added to; the learner's is summed already."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    x, stream, weight = random((max(ROWS), 256), (max(ROWS), 256), (256,))
    # All that its method for GPUs reads.
    layer: Any = SimpleNamespace(weight=nn.Parameter(weight, requires_grad=False), variance_epsilon=1e-6)
    layer.variance_size_override, layer.pass_weight, layer.pass_weight_add = None, True, True
    alone, of_stream = rms_norm(x, weight, 1e-6), rms_norm((x + stream).float(), weight, 1e-6)
    for rows in ROWS:
        yield alone[:rows], RMSNorm.forward_cuda(layer, x[:rows].clone())
        yield of_stream[:rows], RMSNorm.forward_cuda(layer, x[:rows].clone(), stream[:rows].clone())[0]


def _flash_attentions(attention, block_size, random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    from vllm.v1.attention.backends import flash_attn

    heads, key_heads, head_dim, scale, num_keys = 4, 2, 64, 0.125, 150
    query, key, value = random(*((num_keys, count, head_dim) for count in (heads, key_heads, key_heads)))
    ours = attention(query, key, value, (num_keys,), (num_keys,), scale)
    engine = flash_attn.FlashAttentionImpl(heads, head_dim, scale, key_heads, None, None, "auto")
    one = torch.ones(1, device=query.device)
    layer: Any = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
    num_blocks = -(-num_keys // block_size)
    cache = query.new_zeros(num_blocks, key_heads, block_size, 2 * head_dim)
    slots = torch.arange(num_keys, device=query.device)
    engine.do_kv_cache_update(layer, key, value, cache, slots)
    # Other parameters of a release are for cascades and several devices.
    required = [f.name for f in fields(flash_attn.FlashAttentionMetadata) if f.default is MISSING]
    for rows in (1, num_keys):
        integers = partial(torch.tensor, dtype=torch.int32, device=query.device)
        given = {
            "num_actual_tokens": rows,
            "max_query_len": rows,
            "query_start_loc": integers([0, rows]),
            "max_seq_len": num_keys,
            "seq_lens": integers([num_keys]),
            "block_table": integers([[*range(num_blocks)]]),
            "slot_mapping": slots[-rows:],
            # As their builder has it in this mode.
            "max_num_splits": 1,
        }
        metadata = flash_attn.FlashAttentionMetadata(**(dict.fromkeys(required) | given))
        queries = query[-rows:].contiguous()
        output = torch.zeros_like(queries)
        engine.forward(layer, queries, key[-rows:], value[-rows:], cache, metadata, output)
        yield ours[-rows:], output


def _random(generator: torch.Generator, *shapes: tuple[int, ...]) -> Iterator[torch.Tensor]:
    return (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
