"""
Comparison of the installed vLLM with the learner: products, norms and an attention are computed by the
learner's function and by the class or function that vLLM's layers call. All bits must be equal for any number of rows.

The comparison replaces a list of releases and names the operation that has moved or changed. Other operations show in
the first batch, because every batch is checked ([`trl_qarl.bitwise.exact`]).
"""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..quantization.schemes import get_scheme
from ..quantization.tensors import LowBitTensor
from ..replacing import replaced
from ..token_row import Segments


ROWS = (1, 5, 40)
"""Numbers of rows for decoding of one sequence and of several, and for a prefill."""

HEADS, KEY_HEADS, HEAD_DIM, SCALE, NUM_KEYS = 4, 2, 64, 0.125, 150
"""Sizes of the compared attentions."""

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Results of the learner and of vLLM."""


@torch.no_grad()
def first_difference(kernels: Any, device: torch.device) -> str | None:
    """Describe the first operation that differs between an engine on `device` and the learner, or return `None`.
    `kernels` is [`trl_qarl.bitwise.cpu`], or [`trl_qarl.bitwise.cuda`] in its environment for an engine."""
    generator = torch.Generator().manual_seed(0)

    def random(*shapes: tuple[int, ...]) -> Iterator[torch.Tensor]:
        return (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)

    if device.type == "cpu":
        operations = {
            "product of unquantized weights": _products(kernels, device, random),
            "norm": _cpu_norms(kernels, random),
            "attention": _cpu_attentions(kernels, random),
        }
    else:
        operations = {
            "product of unquantized weights": _products(kernels, device, random),
            "product of low-bit weights": _products_in_batches(kernels.low_bit_linear, random),
            "norm": _norms(kernels.rms_norm, random),
            "attention": _flash_attentions(kernels, device, random),
        }
    for name, pairs in operations.items():
        try:
            differing = next((pair for pair in pairs if not torch.equal(*pair)), None)
        # A release may have moved, renamed or removed anything.
        except Exception as error:
            return f"its {name} cannot be compared ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        if differing is not None:
            ours, theirs = (tensor.float() for tensor in differing)
            where = ours != theirs
            largest = (ours - theirs).abs().max().item()
            return f"its {name} differs from the learner's in {where.sum()} of {where.numel()} numbers, by up to {largest:.2g}"
    return None


def _products(kernels, device, random) -> Pairs:
    """Compare an engine's fused query, key and value with the learner's three matrices."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    x, weight, bias = random((max(ROWS), 256), (96, 256), (96,))
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if device.type == "cpu":
        # Like an engine that is told to use the learner's product.
        kernels.dispatch_row_invariant(utils.dispatch_cpu_unquantized_gemm, lambda: True)(layer, False)
    for b in (None, bias):
        parts = [(weight[i : i + 32], None if b is None else b[i : i + 32]) for i in range(0, 96, 32)]
        ours = torch.cat([kernels.PackedLinear(matrix)(x, part) for matrix, part in parts], dim=-1)
        for rows in ROWS:
            yield ours[:rows], UnquantizedLinearMethod().apply(layer, x[:rows], b)


def _cpu_norms(kernels, random) -> Pairs:
    """Compare a norm, and one that adds to the residual stream, with the kernels that an engine is told to use."""
    x, stream, weight = random((max(ROWS), 256), (max(ROWS), 256), (256,))
    if not kernels.has_norm_kernel(weight):
        # The engine computes with torch, like the learner.
        return
    alone, of_stream = (kernels.rms_norm(each, weight, 1e-6) for each in (x, x.float() + stream.float()))
    for rows in ROWS:
        normed = torch.empty_like(x[:rows])
        torch.ops._C.rms_norm(normed, x[:rows], weight, 1e-6)
        yield alone[:rows], normed
        added, total = x[:rows].clone(), stream[:rows].clone()
        torch.ops._C.fused_add_rms_norm(added, total, weight, 1e-6)
        yield of_stream[:rows], added
        yield x[:rows] + stream[:rows], total


def _cpu_attentions(kernels, random) -> Pairs:
    from vllm.v1.attention.backends import cpu_attn

    # The only part of the configuration that the engine's attention reads.
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    with replaced(cpu_attn, get_current_vllm_config=lambda: config):
        engine = cpu_attn.CPUAttentionBackendImpl(HEADS, HEAD_DIM, SCALE, KEY_HEADS, None, None, "auto")
    isa = cpu_attn._get_attn_isa(torch.bfloat16, kernels.KV_BLOCK_SIZE, HEAD_DIM)

    def make_metadata(**batch):
        of_batch = batch["query_start_loc"], batch["seq_lens"]
        schedule = kernels.schedule(HEADS, KEY_HEADS, HEAD_DIM, torch.bfloat16, isa, *of_batch)
        return cpu_attn.CPUAttentionMetadata(**batch, scheduler_metadata=schedule)

    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    yield from _attentions(kernels.attention, engine, layer, kernels.KV_BLOCK_SIZE, make_metadata, random)


def _attentions(attention, engine, layer, block_size, make_metadata, random) -> Pairs:
    """Compare the learner's `attention` with `engine`, vLLM's attention of a `layer`."""
    query, key, value = random(*((NUM_KEYS, count, HEAD_DIM) for count in (HEADS, KEY_HEADS, KEY_HEADS)))
    ours = attention(query, key, value, Segments((NUM_KEYS,)), SCALE)
    num_blocks = -(-NUM_KEYS // block_size)
    cache = query.new_zeros(num_blocks, KEY_HEADS, block_size, 2 * HEAD_DIM)
    slots = torch.arange(NUM_KEYS, device=query.device)
    engine.do_kv_cache_update(layer, key, value, cache, slots)
    integers = partial(torch.tensor, dtype=torch.int32, device=query.device)
    for rows in (1, NUM_KEYS):
        metadata = make_metadata(
            num_actual_tokens=rows,
            max_query_len=rows,
            query_start_loc=integers([0, rows]),
            max_seq_len=NUM_KEYS,
            seq_lens=integers([NUM_KEYS]),
            block_table=integers([[*range(num_blocks)]]),
            slot_mapping=slots[-rows:],
        )
        queries = query[-rows:].contiguous()
        output = torch.zeros_like(queries)
        engine.forward(layer, queries, key[-rows:], value[-rows:], cache, metadata, output)
        yield ours[-rows:], output


def _products_in_batches(low_bit_linear, random) -> Pairs:
    """Compare a row in different batches; the engine's product is the learner's."""
    for scheme in ("w4a16", "fp8"):
        x, weight, bias = random((max(ROWS), 256), (64, 256), (64,))
        low_bit = LowBitTensor.from_hp(weight, get_scheme(scheme), torch.bfloat16)
        ours = low_bit_linear(x, low_bit, bias)[0]
        for rows in ROWS:
            yield ours[:rows], low_bit_linear(x[:rows], low_bit, bias)[0]


def _norms(rms_norm, random) -> Pairs:
    """Compare a norm, and one that adds to the residual stream, which the learner has summed already."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    x, stream, weight = random((max(ROWS), 256), (max(ROWS), 256), (256,))
    # The attributes that its method for GPUs reads.
    layer: Any = SimpleNamespace(weight=nn.Parameter(weight, requires_grad=False), variance_epsilon=1e-6)
    layer.variance_size_override, layer.pass_weight, layer.pass_weight_add = None, True, True
    alone, of_stream = rms_norm(x, weight, 1e-6), rms_norm((x + stream).float(), weight, 1e-6)
    for rows in ROWS:
        yield alone[:rows], RMSNorm.forward_cuda(layer, x[:rows].clone())
        yield of_stream[:rows], RMSNorm.forward_cuda(layer, x[:rows].clone(), stream[:rows].clone())[0]


def _flash_attentions(kernels, device, random) -> Pairs:
    from vllm.v1.attention.backends import flash_attn

    engine = flash_attn.FlashAttentionImpl(HEADS, HEAD_DIM, SCALE, KEY_HEADS, None, None, "auto")
    one = torch.ones(1, device=device)
    # Other parameters of a release are for cascades and several devices.
    required = [f.name for f in fields(flash_attn.FlashAttentionMetadata) if f.default is MISSING]

    def make_metadata(**batch):
        # Like their builder in this mode.
        return flash_attn.FlashAttentionMetadata(**(dict.fromkeys(required) | batch | {"max_num_splits": 1}))

    layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
    yield from _attentions(kernels.attention, engine, layer, kernels.BLOCK_SIZE, make_metadata, random)
