"""
The engine's operations with gradients. Forward runs the engine's kernel in one of three modules, which give a token the
same bits in any batch; backward computes the gradient of the mathematical operation at the same point in high
precision.

| module | computes with | where |
|---|---|---|
| [`trl_qarl.bitwise.cpu`] | vLLM's kernels for CPUs | CPUs, if the kernels are available and agree with the learner |
| [`trl_qarl.bitwise.portable`] | torch | other CPUs, where only decoding and scoring have to agree |
| [`trl_qarl.bitwise.cuda`] | vLLM's batch-invariant kernels | GPUs |

Operations round float32 masters to the engine's dtype and pass the gradient straight through that rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from ..quantization import gemm
from ..token_row import Segments
from . import cpu, cuda, portable
from .flash import SharedPrompts


Product = Callable[..., torch.Tensor]
"""A `PackedLinear` of a backend: the product with a copy of one weight, `(N, K)`, of `(..., K)` in the weight's dtype
and a bias `(N,)` in any dtype or `None`."""

LOGIT_ROWS = 1024
"""Rows of logits, in the engine's dtype, held at a time. Forward keeps the last of them for backward."""

LOGITS_IN_CACHE = 2**18
"""Logits in float32 per thread at a time, so that intermediate results stay in a processor's cache."""

BLOCK_OF_QUERIES, TOKENS_OF_ATTENTION = {"cpu": 128}, {"cpu": 1024}
"""Queries per block, and tokens of sequences at a time, of attention's gradient by type of device: a CPU's fit its
cache. Other devices take 512 and 4,096."""

MIN_SHARED_KEYS = 64
"""Tokens of shared prompts, on average, from which attention's gradient calls FlashAttention for them."""


def backend_of(x: torch.Tensor) -> Any:
    """Return the module that computes with `x`."""
    if is_on_gpu(x):
        return cuda
    return cpu if cpu.has_engine_kernels() else portable


def is_on_gpu(x: torch.Tensor) -> bool:
    """Return whether [`trl_qarl.bitwise.cuda`] computes with `x`."""
    return x.is_cuda


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, dtype: torch.dtype, offset: float = 0.0
) -> torch.Tensor:
    """Return `x / sqrt(mean(x**2) + epsilon) * (weight + offset)`, computed in float32 and rounded; without vLLM's
    kernels and an offset also rounded before the product with `weight`. `x`, `(..., H)`, is float32 for the residual
    stream, a sum of two numbers in `dtype`, else in `dtype`, like the result; the master `weight`, `(H,)`, is rounded
    to `dtype`."""
    return _RMSNorm.apply(x, weight, epsilon, dtype, offset)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`, both in the engine's dtype; on a CPU rounded after each operation."""
    return _SiluMul.apply(gate, up)


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, is_interleaved: bool = False
) -> torch.Tensor:
    """Return the rotary position embedding of `x`, `(tokens, heads, head_dim)`, at `positions`, `(tokens,)` int64, from
    `cache`, `(max_positions, R)` in the dtype of `x`, cosines before sines. The first `R` features of each head turn in
    pairs, which are `R / 2` apart, or neighbours if `is_interleaved`; others stay."""
    return _Rotate.apply(x, positions, cache, is_interleaved)


def attention(query, key, value, segments: Segments, scale, window=None, softcap=None) -> torch.Tensor:
    """Return the causal attention of `segments`, with the same bits for any number of queries. `query`, like the
    result, is `(queries, heads, head_dim)`, and `key` and `value` are `(keys, key_heads, head_dim)`; gradients of keys
    that several segments see are added in float32. The queries of a segment see `window` last keys, including their
    own, or all. A score `s` becomes `softcap * tanh(s / softcap)`. Only vLLM's kernels for CPUs support a window or a
    `softcap`, other backends raise `NotImplementedError`."""
    return _Attention.apply(query, key, value, segments, scale, window, softcap)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, product: Product) -> torch.Tensor:
    """Return `x @ weight.T + bias` through `product`, made of the rounded `weight`."""
    return _Linear.apply(x, weight, bias, product)


def add_lora(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, rank: int
) -> torch.Tensor:
    """Return `y + scaling * B A x` through [`~trl_qarl.bitwise.cpu.lora`] of `y`, `(..., N)`, and `x`, `(..., K)`, in
    the engine's dtype, and of the masters `a`, `(R, K)`, rounded here, and `b`, `(N, R)`, multiplied by `scaling` and
    then rounded. `rank` is the engine's, at least `R`."""
    return _AddLora.apply(y, x, a, b, scaling, rank)


def head_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    product: Product,
    tokens: torch.Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return [`token_log_probs`] of the output head's logits, and the entropies, `(N,)` float32. A logit `z` of the head
    becomes `factor * softcap * tanh(z / softcap)`, rounded after each operation. At most [`LOGIT_ROWS`] rows of logits
    are held: backward gets the last ones from forward and computes the others again.

    `hidden` is `(N, K)` in the engine's dtype, `weight`, `(V, K)`, the head's master, `product` the product of its
    rounded form, and `tokens` is `(N,)` int64.
    """
    return _HeadLogProbs.apply(hidden, weight, bias, product, tokens, temperature, softcap, factor)


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probs, `(...)` float32, of `tokens`, `(...)` int64, like the engine's sampler:
    `log_softmax(float32(logits) / temperature)` of `logits`, `(..., V)` in the engine's dtype."""
    rows = _TokenLogProbs.apply(logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1), temperature)
    return rows.view(tokens.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, epsilon, dtype, offset):
        ctx.save_for_backward(x, weight)
        ctx.epsilon, ctx.dtype, ctx.offset = epsilon, dtype, offset
        rounded = weight.to(dtype)
        # vLLM's GemmaRMSNorm adds in float32.
        return backend_of(x).rms_norm(x, rounded.float() + offset if offset else rounded, epsilon).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad, rows = grad.float(), x.float()
        inverse = torch.rsqrt(rows.pow(2).mean(dim=-1, keepdim=True) + ctx.epsilon)
        normed = rows * inverse
        products = grad * normed
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = products.flatten(0, -2).sum(dim=0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            factors = weight.to(ctx.dtype).float() + ctx.offset
            means = (products @ factors).div_(rows.shape[-1])[..., None]
            grad_x = (grad * factors).addcmul_(normed, means, value=-1).mul_(inverse).to(x.dtype)
        return grad_x, grad_weight, None, None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return backend_of(gate).silu_mul(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, cache, is_interleaved):
        ctx.save_for_backward(positions, cache)
        ctx.is_interleaved = is_interleaved
        return backend_of(x).rotate(x, positions, cache, is_interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        positions, cache = ctx.saved_tensors
        # A rotation's transpose is the rotation back, whose table has the other sign of the sines.
        cos, sin = cache[positions].chunk(2, dim=-1)
        places = torch.arange(len(positions), device=positions.device)
        back = torch.cat([cos, -sin], dim=-1)
        return backend_of(grad).rotate_gradient(grad, places, back, ctx.is_interleaved), None, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, segments, *options):
        output = backend_of(query).attention(query, key, value, segments, *options)
        ctx.save_for_backward(query, key, value, output)
        ctx.segments, ctx.options = segments, options
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, output = ctx.saved_tensors
        segments, (scale, window, softcap) = ctx.segments, ctx.options
        keys, lengths, others = segments.keys, (segments.query_lengths, segments.key_lengths), None
        dtype = query.dtype if is_on_gpu(query) or gemm.has_fast_bf16() else torch.float32
        takes_flash = not is_on_gpu(query) and dtype is torch.bfloat16 and window is None and softcap is None
        num_shared = sum(prompt.stop - prompt.start for _, prompt in segments.runs)
        runs = segments.runs if takes_flash and num_shared >= MIN_SHARED_KEYS * len(segments.runs) else ()
        if runs:
            keys, lengths = None, (segments.query_lengths, segments.query_lengths)
            sums = (grad.float() * output.float()).sum(dim=-1, keepdim=True)
            others = torch.full_like(sums, -torch.inf), sums
            prompts = SharedPrompts(runs, query.device)
            others[0][prompts.queries] = prompts.attend(query, key, value, scale)[1].T[..., None]
        grads = _grad_segments(query, key, value, grad, *lengths, keys, dtype, ctx.options, others)
        if runs:
            prompts.add_gradients(grads, grad, query, key, value, output, others[0][..., 0].T, scale)
        return *(x.to(grad.dtype) for x in grads), *[None] * 4


def _grad_segments(query, key, value, grad, query_lengths, key_lengths, keys, dtype, options, others):
    """Return the gradients of the attention of [`Segments`] in the shapes of `query`, `key` and `value`, those of keys
    in float32. `others`, if queries also see other keys, are those of [`_grad_attention`], `(queries, heads, 1)` each,
    of which the first one is overwritten."""
    num_key_heads = key.shape[1]
    if keys is None:
        keys = torch.arange(len(key), device=key.device)
    places, queries, grads = keys.split(key_lengths), query.split(query_lengths), grad.split(query_lengths)
    others_of = [] if others is None else [x.split(query_lengths) for x in others]
    grad_query = torch.empty_like(query, dtype=torch.float32 if others else None)
    of_queries = grad_query.split(query_lengths)
    totals = [torch.zeros_like(x, dtype=torch.float32) for x in (key, value)]
    for group in _similar_lengths(query_lengths, key_lengths, TOKENS_OF_ATTENTION.get(grad.device.type, 4096)):
        offset = key_lengths[group[0]] - query_lengths[group[0]]
        padded = [
            _pad_sequences(parts, num_key_heads, dtype)
            for parts in (
                [queries[i] for i in group],
                *([x.index_select(0, places[i]) for i in group] for x in (key, value)),
                [grads[i] for i in group],
            )
        ]
        rows = [_pad_sequences([x[i] for i in group], num_key_heads, torch.float32) for x in others_of]
        results = _grad_attention(*padded, offset, *options, rows or None)
        for i, of_query, *of_keys in zip(group, *results, strict=True):
            of_queries[i].copy_(_unpad(of_query, query_lengths[i]))
            for total, of_key in zip(totals, of_keys, strict=True):
                total.index_add_(0, places[i], _unpad(of_key, key_lengths[i]))
        for own, total in zip(others_of[:1], rows[:1], strict=True):
            for row, i in enumerate(group):
                own[i].copy_(_unpad(total[row], query_lengths[i]))
    return grad_query, *totals


def _similar_lengths(
    query_lengths: tuple[int, ...], key_lengths: tuple[int, ...], num_tokens: int
) -> Iterator[list[int]]:
    """Yield groups of places of sequences, the longest first, with equally many keys before the first query. A group
    has at most `num_tokens` keys together, or a single sequence, and at most a tenth of padding in each one's
    queries."""
    lengths = [(keys - queries, queries) for queries, keys in zip(query_lengths, key_lengths, strict=True)]
    places = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    while places:
        offset, longest = lengths[places[0]]
        candidates = places[: max(1, num_tokens // (offset + longest))]
        count = sum(lengths[place][0] == offset and lengths[place][1] >= 0.9 * longest for place in candidates)
        yield places[:count]
        del places[:count]


def _pad_sequences(sequences: list[torch.Tensor], num_key_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `sequences`, `(tokens, heads, head_dim)` each, as `(sequences, key heads, tokens, heads per key head,
    head_dim)` in `dtype`, with zeros after the last token."""
    rows = pad_sequence(sequences, batch_first=True).unflatten(2, (num_key_heads, -1)).transpose(1, 2)
    return rows.to(dtype).contiguous()


def _unpad(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first `length` tokens of one sequence in the shape of [`_pad_sequences`], `(length, heads,
    head_dim)`."""
    return rows[:, :length].transpose(0, 1).flatten(1, 2).contiguous()


def _grad_attention(query, key, value, grad, offset, scale, window, softcap, others=None):
    """
    Return gradients of causal attention to the last `window` keys, or to all, in the shapes of [`_pad_sequences`]:
    that of `query` in its dtype, the others in float32. `offset` keys come before the first query. Padding comes after
    the last token, which does not see it, and its own gradients are zeros.

    A block of queries needs all its keys at once, so its probabilities are computed in float32, and those of later
    keys are not computed. Queries that share a key head are rows of the same product. As in FlashAttention,
    probabilities and gradients of scores are rounded to the dtype of `query` for the products with them.

    If queries also see other keys, `others` are the logarithm of the sum of the exponentials of those scores, which
    that of all scores overwrites, and the sum over the features of the output and its gradient, in float32.
    """
    num_sequences, dtype = len(query), query.dtype
    query, grad = query.flatten(0, 1), grad.flatten(0, 1)
    key, value = key.flatten(0, 1).squeeze(2), value.flatten(0, 1).squeeze(2)
    grad_query = torch.empty_like(query)
    grad_key, grad_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
    length, num_groups = query.shape[1:3]
    size = BLOCK_OF_QUERIES.get(key.device.type, 512)
    for start in range(0, length, size):
        end = min(start + size, length)
        first = 0 if window is None else max(offset + start - window + 1, 0)
        rows, keys = (slice(None), slice(start, end)), (slice(None), slice(first, offset + end))
        q, g, k, v = query[rows].flatten(1, 2), grad[rows].flatten(1, 2), key[keys], value[keys]
        # Without a window each query sees the keys before the block.
        masked = first if window is not None else offset + start
        distance = torch.arange(start, end, device=key.device)[:, None] + offset
        distance = distance - torch.arange(masked, offset + end, device=key.device)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = _float32_product(q, k, scale)
        capped = None if softcap is None else torch.tanh(scores / softcap)
        scores = scores if capped is None else softcap * capped
        scores[..., masked - first :].unflatten(1, (-1, num_groups)).masked_fill_(hidden[:, None], -torch.inf)
        probs = scores.softmax(dim=-1)
        grad_scores = _float32_product(g, v)
        if others is None:
            grad_scores = torch._softmax_backward_data(grad_scores, probs, -1, probs.dtype)
        else:
            before, sums = (x.flatten(0, 1)[rows].flatten(1, 2) for x in others)
            # The largest score has the largest probability, which cannot vanish.
            own = scores.amax(dim=-1, keepdim=True) - probs.amax(dim=-1, keepdim=True).log()
            total = torch.logaddexp(before, own)
            others[0].flatten(0, 1)[rows] = total.unflatten(1, (-1, num_groups))
            probs.mul_((own - total).exp_())
            grad_scores.sub_(sums).mul_(probs)
        grad_value[keys] += probs.to(dtype).mT @ g
        if capped is not None:
            grad_scores = grad_scores * (1 - capped**2)
        grad_scores = grad_scores.to(dtype)
        grad_query[rows] = torch.baddbmm(q, grad_scores, k, beta=0, alpha=scale).unflatten(1, (-1, num_groups))
        grad_key[keys] += grad_scores.mT @ q
    grads = grad_query, grad_key.mul_(scale).unsqueeze(2), grad_value.unsqueeze(2)
    return [tensor.unflatten(0, (num_sequences, -1)) for tensor in grads]


def _float32_product(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return `scale * a @ b.mT` in float32. For 16-bit numbers a second product computes what rounding the first one
    leaves, because the difference is taken before it is rounded itself."""
    if a.device.type == "cpu" and a.dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        with _multiply_as_bf16():
            return torch.baddbmm(a.new_empty((), dtype=torch.float32), a.float(), b.float().mT, beta=0, alpha=scale)
    product = torch.baddbmm(a.new_empty(()), a, b.mT, beta=0, alpha=scale)
    if a.dtype is torch.float32:
        return product
    return torch.baddbmm(product, a, b.mT, beta=-1, alpha=scale).float().add_(product.float())


@contextmanager
def _multiply_as_bf16() -> Iterator[None]:
    settings = torch.backends.mkldnn.matmul
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, product):
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return product(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight.to(grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


class _AddLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, x, a, b, scaling, rank):
        padding = rank - a.shape[0]
        rows, scaled = x.reshape(-1, x.shape[-1]), (b * scaling).to(x.dtype)
        inner, added = cpu.lora(rows, F.pad(a.to(x.dtype), (0, 0, 0, padding)), F.pad(scaled, (0, padding)))
        ctx.save_for_backward(x, a, scaled, inner)
        ctx.scaling, ctx.b_dtype = scaling, b.dtype
        return y + added.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, a, scaled, inner = ctx.saved_tensors
        # Products with the rank as a dimension are cheap, so they are in float32.
        rows = grad.reshape(-1, grad.shape[-1]).float()
        grad_inner = rows @ scaled.float()
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[1]:
            grad_x = (grad_inner @ a.to(x.dtype).float()).to(x.dtype).view_as(x)
        if ctx.needs_input_grad[2]:
            grad_a = (grad_inner.t() @ x.reshape(-1, x.shape[-1]).float()).to(a.dtype)
        if ctx.needs_input_grad[3]:
            grad_b = (rows.t() @ inner[:, : a.shape[0]].float() * ctx.scaling).to(ctx.b_dtype)
        return grad, grad_x, grad_a, grad_b, None, None


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, temperature):
        log_probs, _ = _score(logits, tokens, temperature, has_entropies=False)
        ctx.save_for_backward(logits, tokens, log_probs)
        ctx.temperature = temperature
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, tokens, log_probs = ctx.saved_tensors
        return _grad_logits(logits.clone(), tokens, log_probs, grad, ctx.temperature), None, None


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, product, tokens, temperature, softcap, factor):
        parts = zip(hidden.split(LOGIT_ROWS), tokens.split(LOGIT_ROWS), strict=True)
        values, logits = [], None
        for rows, token in parts:
            # Frees the former logits first.
            del logits
            logits = _finish(product(rows, bias), softcap, factor)
            values.append(_score(logits, token, temperature))
        log_probs, entropies = map(torch.cat, zip(*values, strict=True))
        ctx.save_for_backward(hidden, weight, bias, tokens, log_probs, entropies)
        ctx.product, ctx.temperature, ctx.options = product, temperature, (softcap, factor)
        ctx.last_logits = logits if any(ctx.needs_input_grad) else None
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropies):
        hidden, weight, bias, tokens, log_probs, entropies = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = grad_bias = None
        rounded = weight.to(hidden.dtype)
        last, ctx.last_logits = ctx.last_logits, None
        if not grad_entropies.any():
            entropies = None
        for start in reversed(range(0, max(len(tokens), 1), LOGIT_ROWS)):
            part = slice(start, start + LOGIT_ROWS)
            logits, last = _finish(ctx.product(hidden[part], bias), *ctx.options) if last is None else last, None
            slope = _slope(logits, *ctx.options)
            of_entropies = None if entropies is None else (entropies[part], grad_entropies[part])
            grad = _grad_logits(
                logits, tokens[part], log_probs[part], grad_log_probs[part], ctx.temperature, of_entropies
            )
            if ctx.options != (None, 1.0):
                grad.mul_(slope)
            if bias is not None and needs_bias:
                grad_bias = _add(grad_bias, grad.sum(dim=0, dtype=torch.float32).to(bias.dtype))
            if needs_hidden:
                torch.mm(grad, rounded, out=grad_hidden[part])
            if needs_weight:
                grad_weight = _add(grad_weight, (grad.t() @ hidden[part]).to(weight.dtype))
            # Frees them before the next ones are made.
            del grad, logits
        return grad_hidden, grad_weight, grad_bias, *[None] * 5


def _finish(logits: torch.Tensor, softcap: float | None, factor: float) -> torch.Tensor:
    """Cap and scale `logits` in place, in the order of vLLM's `LogitsProcessor`."""
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits if factor == 1.0 else logits.mul_(factor)


def _slope(logits: torch.Tensor, softcap: float | None, factor: float) -> torch.Tensor | float:
    """Return the derivative of [`_finish`] at its results, in their dtype."""
    return factor if softcap is None else factor * (1 - (logits.float() / (softcap * factor)) ** 2).to(logits.dtype)


def _add(total: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    return value if total is None else total.add_(value)


def _rows_in_cache(logits: torch.Tensor) -> int:
    if logits.device.type != "cpu":
        return 256
    return max(LOGITS_IN_CACHE * torch.get_num_threads() // logits.shape[1], 1)


def _score(logits, tokens, temperature, has_entropies=True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs of `tokens` and entropies, both `(M,)` float32, of `logits` `(M, V)`."""
    size = _rows_in_cache(logits)
    log_probs, entropies = logits.new_empty(2, len(tokens), dtype=torch.float32)
    for start in range(0, len(tokens), size):
        part = slice(start, start + size)
        all_log_probs = backend_of(logits).log_softmax(logits[part], temperature)
        log_probs[part] = all_log_probs.gather(1, tokens[part, None])[:, 0]
        if has_entropies:
            entropies[part] = -all_log_probs.exp().mul_(all_log_probs).sum(dim=-1)
    return log_probs, entropies


def _grad_logits(logits, tokens, log_probs, grad_log_probs, temperature, of_entropies=None) -> torch.Tensor:
    """Overwrite `logits` `(M, V)` by the gradient of the `log_probs` of `tokens` and of entropies, if given."""
    size = _rows_in_cache(logits)
    for start in range(0, len(tokens), size):
        part = slice(start, start + size)
        target, token, grad = logits[part], tokens[part, None], (grad_log_probs[part] / temperature)[:, None]
        scaled = target.float() if temperature == 1.0 else target.float().div_(temperature)
        # The logarithm of the sum is a token's logit less its log-prob, which saves a pass over the vocabulary.
        all_log_probs = scaled.sub_(scaled.gather(1, token) - log_probs[part, None])
        if of_entropies is None:
            grad_part = all_log_probs.exp_().mul_(-grad)
        else:
            entropy, grad_entropy = (tensor[part, None] for tensor in of_entropies)
            probs = all_log_probs.exp()
            factors = all_log_probs.add_(entropy).mul_(grad_entropy / temperature).add_(grad)
            grad_part = probs.mul_(factors).neg_()
        target.copy_(grad_part.scatter_add_(1, token, grad))
    return logits
