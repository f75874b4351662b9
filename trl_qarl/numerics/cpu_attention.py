"""vLLM's attention for CPUs, split into requests whose bits do not depend on the rest of the batch."""

from functools import lru_cache

import torch


__all__ = ["IN_ONE_PASS", "KV_BLOCK_SIZE", "attention", "blocks_of_keys", "one_pass_requests", "queries_in_one_pass"]

IN_ONE_PASS = "requests of one pass"
"""Identifier of engines whose attention runs in [`one_pass_requests`]."""

KV_BLOCK_SIZE = 128

PASS_ROWS = {"amx": 32, "vec": 8}
"""Rows of queries per pass of vLLM's attention, by its name of the instructions (`MaxQHeadNumPerIteration`)."""


def attention(query, key, value, query_lengths, key_lengths, scale, window=None) -> torch.Tensor:
    """[`~trl_qarl.numerics.backends.Backend.attention`] with vLLM's kernel."""
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
    """
    Split the requests of a batch into requests of at most `size` queries, from [`queries_in_one_pass`]; each sees the
    keys up to its last query. `query_starts`, `(R + 1,)` int32, has the first query of each request; its queries are
    the last positions of `key_lengths`, `(R,)` int32. Return both tensors for the new requests, and the index of the
    original request of each.
    """
    counts = query_starts.diff()
    parts = (counts + size - 1) // size
    request = torch.repeat_interleave(torch.arange(len(counts)), parts)
    part = torch.arange(len(request)) - (parts.cumsum(0) - parts)[request]
    starts, ends = query_starts[:-1][request] + part * size, query_starts[1:][request]
    lengths = key_lengths[request] - (ends - starts - size).clamp(min=0)
    return torch.cat([starts, query_starts[-1:]]).int(), lengths.int(), request


def blocks_of_keys(
    query_lengths: tuple[int, ...], key_lengths: tuple[int, ...], block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the slot of each key among all blocks, int64, and, in int32, the blocks, the first query and the number
    of keys of each sequence."""
    lengths = torch.tensor(key_lengths, dtype=torch.int32)
    num_blocks = (lengths + block_size - 1) // block_size
    first = num_blocks.cumsum(0) - num_blocks
    table = first[:, None] + torch.arange(int(num_blocks.max()))
    # The table is not read beyond a sequence's blocks, but must name existing blocks.
    table = table.clamp(max=int(num_blocks.sum()) - 1).int()
    slots = torch.cat([int(start) * block_size + torch.arange(n) for start, n in zip(first, key_lengths, strict=True)])
    query_starts = torch.tensor([0, *torch.tensor(query_lengths).cumsum(0)], dtype=torch.int32)
    return slots, table, query_starts, lengths


@lru_cache(maxsize=4)
def _layout(query_lengths, key_lengths, num_heads, num_key_heads, head_dim, dtype, num_threads, window):
    """Return the layout that all layers of a forward share: slots of keys, blocks of sequences, thread schedule."""
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, KV_BLOCK_SIZE, head_dim)
    slots, table, query_starts, keys = blocks_of_keys(query_lengths, key_lengths, KV_BLOCK_SIZE)
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
        # Sums over keys must not depend on the number of threads.
        enable_kv_split=False,
    )
    return isa, slots, table, query_starts, keys, schedule
