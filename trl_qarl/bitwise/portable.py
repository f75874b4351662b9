"""
The operations of [`trl_qarl.bitwise.ops`] in torch, without gradients, for machines without vLLM's kernels: decoding
with a cache and scoring agree bit for bit.

BLAS chooses the order of a sum by the shapes of the product. Therefore all sums here are products of one fixed shape,
padded with zeros, and sums over several products run from the first to the last. Queries, keys and values are
bfloat16; products and sums are float32.
"""

import torch
import torch.nn.functional as F

from ..quantization.gemm import has_fast_bf16, linear_in_blocks


NUM_ROWS = 48  # a multiple of the rows of BLAS' tiles, as in `trl_qarl.quantization.gemm`
NUM_KEYS = 128


class PackedLinear:
    """[`~trl_qarl.bitwise.ops.Product`] in blocks of `NUM_ROWS`."""

    def __init__(self, weight: torch.Tensor):
        self._weight = weight if has_fast_bf16() else weight.float()

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(self._weight.dtype)
        y = linear_in_blocks(rows, self._weight).to(x.dtype)
        return (y if bias is None else y + bias.to(y.dtype)).view(*x.shape[:-1], y.shape[1])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return x.to(weight.dtype) * weight


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probs `(M, V)` float32 of `logits` `(M, V)` like the engine's sampler."""
    logits = logits.float()
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, is_interleaved: bool = False
) -> torch.Tensor:
    cos, sin = cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
    turned, rest = x.tensor_split([cache.shape[1]], dim=-1)
    pairs = turned.float().unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
    first, second = pairs.unbind(-1 if is_interleaved else -2)
    parts = first * cos - second * sin, second * cos + first * sin
    y = torch.stack(parts, dim=-1 if is_interleaved else -2).flatten(-2).to(x.dtype)
    return torch.cat([y, rest], dim=-1)


rotate_gradient = rotate


def attention(query, key, value, segments, scale, window=None, softcap=None):
    if (window, softcap) != (None, None):
        raise NotImplementedError("Only vLLM's kernels for CPUs support a window of keys, or a cap of scores.")
    outputs = []
    if segments.keys is not None:
        key, value = (x.index_select(0, segments.keys) for x in (key, value))
    lengths = segments.query_lengths, segments.key_lengths, segments.key_lengths
    for q, k, v in zip(*(x.split(each) for x, each in zip((query, key, value), lengths, strict=True)), strict=True):
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
    # A tile without visible keys adds exactly 0 to a row.
    total = sum(torch.bmm((scores - largest).exp_(), tile) for scores, tile in tiles)
    return (total[..., :-1] / total[..., -1:])[:, :num_rows]
