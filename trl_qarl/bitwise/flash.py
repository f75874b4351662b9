"""torch's FlashAttention for sequences in one row of tokens, with the sums of exponentials that join two calls."""

from itertools import accumulate

import torch
from torch.autograd.function import once_differentiable


def starts_of(lengths, device: torch.device) -> tuple[list[torch.Tensor], list[int]]:
    """Return the places at which segments begin, `(segments + 1,)` int32, and the largest length, for each tuple of
    `lengths`."""
    starts = [torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in lengths]
    return starts, [*map(max, lengths)]


def joined_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    runs: tuple[tuple[slice, slice], ...],
    scale: float,
) -> torch.Tensor:
    """
    Return the attention `(N, heads, head_dim)` of segments of these `lengths` to themselves and to shared prompts.

    `query` is `(N, heads, head_dim)`, `key` and `value` are `(N, key_heads, head_dim)`, and `runs` are those of a
    [`~trl_qarl.token_row.Layout`]. A token that sees two sets of keys, with outputs `o` and logarithms `l` of the sums
    of their exponentials, has the output `(exp(l_1) o_1 + exp(l_2) o_2) / exp(l)` with `exp(l) = exp(l_1) + exp(l_2)`.
    The gradient of either set is that of its own attention, computed with the joint output and `l`.
    """
    return _Joined.apply(query, key, value, lengths, runs, scale)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, lengths, runs, scale):
        output, total = flash(query, key, value, lengths, lengths, True, scale)
        prompts = SharedPrompts(runs, query.device) if runs else None
        if prompts:
            queries = prompts.queries
            of_prompts, total_of_prompts = prompts.attend(query, key, value, scale)
            own = total[:, queries]
            joint = torch.logaddexp(own, total_of_prompts)
            weights = ((each - joint).exp().T[..., None] for each in (own, total_of_prompts))
            both = zip(weights, (output[queries], of_prompts), strict=True)
            output[queries] = sum(weight * each.to(weight.dtype) for weight, each in both).to(output.dtype)
            total[:, queries] = joint
        ctx.save_for_backward(query, key, value, output, total)
        ctx.lengths, ctx.prompts, ctx.scale = lengths, prompts, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        tensors = grad, *ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        grads = [each.to(dtype) for each in flash_backward(*tensors, ctx.lengths, ctx.lengths, True, ctx.scale)]
        if ctx.prompts:
            ctx.prompts.add_gradients(grads, *tensors, ctx.scale)
        return *(each.to(grad.dtype) for each in grads), None, None, None


class SharedPrompts:
    """Attention of tokens to the shared prompts before them, of the `runs` of a [`~trl_qarl.token_row.Layout`].
    `queries` are the places of these tokens. Tensors are those of the whole row, in the shapes of [`flash`]."""

    def __init__(self, runs: tuple[tuple[slice, slice], ...], device: torch.device):
        ranges = [*zip(*runs, strict=True)]
        places = [torch.cat([torch.arange(each.start, each.stop) for each in of]).to(device) for of in ranges]
        self.queries, self._keys = places
        self._options = *(tuple(each.stop - each.start for each in of) for of in ranges), False

    def attend(self, query, key, value, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and logarithms of sums of `queries`."""
        return flash(query[self.queries], key[self._keys], value[self._keys], *self._options, scale)

    def add_gradients(self, grads, grad, query, key, value, output, total, scale: float) -> None:
        """Add to `grads` of query, key and value those through the prompts, with the joint `output` and `total`."""
        queries, keys = self.queries, self._keys
        tensors = grad[queries], query[queries], key[keys], value[keys], output[queries], total[:, queries]
        added = flash_backward(*tensors, *self._options, scale)
        for sum_, places, each in zip(grads, (queries, keys, keys), added, strict=True):
            sum_.index_add_(0, places, each.to(sum_.dtype))


def flash(query, key, value, query_lengths, key_lengths, is_causal, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention `(N, heads, head_dim)` by torch's FlashAttention, and the logarithms of the sums of its
    exponentials, `(heads, N)`. A query of a causal segment, with as many keys, sees those up to its own."""
    if query.is_cuda:
        starts, longest = starts_of((query_lengths, key_lengths), query.device)
        call = torch.ops.aten._flash_attention_forward
        output, total, *_ = call(query, key, value, *starts, *longest, 0.0, is_causal, False, scale=scale)
        return output, total
    call, outputs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, []
    for parts in _segments((query, key, value), query_lengths, key_lengths):
        outputs.append(call(*parts, 0.0, is_causal, scale=scale))
    outputs, totals = zip(*outputs, strict=True)
    return torch.cat(outputs, dim=2)[0].transpose(0, 1), torch.cat(totals, dim=2)[0]


def flash_backward(grad, query, key, value, output, total, query_lengths, key_lengths, is_causal, scale):
    """Return the gradients of `query`, `key` and `value` in [`flash`]."""
    if query.is_cuda:
        starts, longest = starts_of((query_lengths, key_lengths), query.device)
        # Of dropout, which there is none of.
        state, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        tensors = (each.contiguous() for each in (grad, query, key, value, output, total))
        call = torch.ops.aten._flash_attention_backward
        return call(*tensors, *starts, *longest, 0.0, is_causal, state, unused, scale=scale)
    call, grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, []
    num_groups = query.shape[1] // key.shape[1]
    # The kernel has a gradient for each head of queries. In 16 bits it rounds the gradients of keys after each block
    # of queries, and is no faster.
    dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = (each.repeat_interleave(num_groups, dim=1) for each in (key, value))
    tensors = [each.to(dtype) for each in (query, key, value, grad, output)]
    totals = total[None].split(query_lengths, dim=2)
    for (q, k, v, g, o), sums in zip(_segments(tensors, query_lengths, key_lengths), totals, strict=True):
        grads.append(call(g, q, k, v, o, sums.contiguous(), 0.0, is_causal, scale=scale))
    of_query, *of_keys = (torch.cat(each, dim=2)[0].transpose(0, 1) for each in zip(*grads, strict=True))
    return of_query, *(each.unflatten(1, (-1, num_groups)).sum(dim=2) for each in of_keys)


def _segments(tensors, query_lengths, key_lengths):
    """Yield the segments of tensors in the order query, key, value and others like query, each `(1, heads, tokens,
    head_dim)`."""
    sizes = (query_lengths, key_lengths, key_lengths, query_lengths, query_lengths)
    rows = (each.transpose(0, 1)[None].split(size, dim=2) for each, size in zip(tensors, sizes, strict=False))
    return zip(*rows, strict=True)
