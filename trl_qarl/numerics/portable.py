"""
Rotation and attention in torch, where vLLM's kernels are not installed: decoding with a cache and scoring agree bit for bit.

A row of a matrix product keeps its bits only if the shapes of the product stay the same, as BLAS chooses the order of sums by
them. So everything that is summed here is a product of one fixed shape, filled up with zeros, and sums over several of them are
taken from the first to the last. Queries, keys and values are bfloat16; products and sums are float32.
"""

import torch
import torch.nn.functional as F


__all__ = ["attention", "rotate"]

NUM_ROWS = 48  # a multiple of the rows that BLAS takes at once, as in `trl_qarl.quantization.gemm`
NUM_KEYS = 128


def rotate(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """[`trl_qarl.numerics.cpu.rotate`], rounded once."""
    cos, sin = cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def attention(query, key, value, query_lengths, key_lengths, scale) -> torch.Tensor:
    """[`trl_qarl.numerics.cpu.attention`] for sequences of any length."""
    outputs = []
    for q, k, v in zip(query.split(query_lengths), key.split(key_lengths), value.split(key_lengths), strict=True):
        num_queries, num_keys, num_groups = len(q), len(k), q.shape[1] // k.shape[1]
        # (key_heads, queries * heads per key head, head_dim): one product for all heads that share keys.
        rows = q.float().unflatten(1, (-1, num_groups)).transpose(0, 1).flatten(1, 2) * scale
        positions = torch.arange(num_keys - num_queries, num_keys).repeat_interleave(num_groups)
        padding = (0, 0, 0, -num_keys % NUM_KEYS)
        keys, values = (F.pad(x.float().transpose(0, 1), padding) for x in (k, v))
        parts = zip(rows.split(NUM_ROWS, dim=1), positions.split(NUM_ROWS), strict=True)
        output = torch.cat([_attend(part, seen, keys, values) for part, seen in parts], dim=1)
        outputs.append(output.unflatten(1, (num_queries, num_groups)).transpose(0, 1).flatten(1, 2))
    return torch.cat(outputs).to(query.dtype)


def _attend(rows: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Outputs `(H, R, head_dim)` of at most `NUM_ROWS` queries, each of which sees the keys up to its position."""
    num_rows = rows.shape[1]
    rows = F.pad(rows, (0, 0, 0, NUM_ROWS - num_rows))
    positions = F.pad(positions, (0, NUM_ROWS - num_rows))
    tiles = [
        (
            torch.bmm(rows, keys[:, start : start + NUM_KEYS].transpose(1, 2)).masked_fill_(
                torch.arange(start, start + NUM_KEYS) > positions[:, None], -torch.inf
            ),
            # The column of ones sums the weights.
            F.pad(values[:, start : start + NUM_KEYS], (0, 1), value=1.0),
        )
        for start in range(0, int(positions.max()) + 1, NUM_KEYS)
    ]
    largest = torch.stack([scores.amax(dim=-1, keepdim=True) for scores, _ in tiles]).amax(dim=0)
    # A tile without a key that a row may see adds exactly 0 to it.
    total = sum(torch.bmm((scores - largest).exp_(), tile) for scores, tile in tiles)
    return (total[..., :-1] / total[..., -1:])[:, :num_rows]
