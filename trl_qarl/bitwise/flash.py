"""torch's FlashAttention for sequences in one row of tokens, with the sums of exponentials that join two calls."""

from itertools import accumulate

import torch


def starts_of(lengths, device: torch.device) -> tuple[list[torch.Tensor], list[int]]:
    """Return the places at which segments begin, `(segments + 1,)` int32, and the largest length, for each tuple of
    `lengths`."""
    starts = [torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in lengths]
    return starts, [*map(max, lengths)]


def flash(query, key, value, query_lengths=None, key_lengths=None, *, is_causal, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention `(N, heads, head_dim)` by torch's FlashAttention, and the logarithms of the sums of its
    exponentials, `(heads, N)`. A query of a causal segment, with as many keys, sees those up to its own."""
    query_lengths, key_lengths = query_lengths or (len(query),), key_lengths or (len(key),)
    if query.is_cuda:
        starts, longest = starts_of((query_lengths, key_lengths), query.device)
        call = torch.ops.aten._flash_attention_forward
        output, total, *_ = call(query, key, value, *starts, *longest, 0.0, is_causal, False, scale=scale)
        return output, total
    call, outputs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, []
    num_groups = 1 if is_causal else query.shape[1] // key.shape[1]
    for q, k, v in _segments((query, key, value), query_lengths, key_lengths):
        output, total = call(_fold(q, num_groups), k, v, 0.0, is_causal, scale=scale)
        outputs.append((_unfold(output, num_groups), _unfold(total[..., None], num_groups)[..., 0]))
    outputs, totals = zip(*outputs, strict=True)
    return torch.cat(outputs, dim=2)[0].transpose(0, 1), torch.cat(totals, dim=2)[0]


def flash_backward(grad, query, key, value, output, total, query_lengths=None, key_lengths=None, *, is_causal, scale):
    """Return the gradients of `query`, `key` and `value` in [`flash`]."""
    query_lengths, key_lengths = query_lengths or (len(query),), key_lengths or (len(key),)
    if query.is_cuda:
        starts, longest = starts_of((query_lengths, key_lengths), query.device)
        # Of dropout, which there is none of.
        state, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        tensors = (each.contiguous() for each in (grad, query, key, value, output, total))
        call = torch.ops.aten._flash_attention_backward
        return call(*tensors, *starts, *longest, 0.0, is_causal, state, unused, scale=scale)
    call, grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, []
    num_groups = query.shape[1] // key.shape[1]
    folds, copies = (1, num_groups) if is_causal else (num_groups, 1)
    # The kernel has a gradient for each head of queries.
    key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
    tensors = query, key, value, grad, output, total.T[..., None]
    for q, k, v, *others in _segments(tensors, query_lengths, key_lengths):
        q, g, o, sums = (_fold(each, folds) for each in (q, *others))
        of_query, *of_keys = call(g, q, k, v, o, sums[..., 0].contiguous(), 0.0, is_causal, scale=scale)
        grads.append((_unfold(of_query, folds), *of_keys))
    of_query, *of_keys = (torch.cat(each, dim=2)[0].transpose(0, 1) for each in zip(*grads, strict=True))
    return of_query, *(
        each.unflatten(1, (-1, copies)).sum(dim=2, dtype=torch.promote_types(each.dtype, torch.float32))
        for each in of_keys
    )


def _fold(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return `(1, heads, tokens, size)` with the `num_groups` heads of a key head as its tokens."""
    return x.unflatten(1, (-1, num_groups)).flatten(2, 3)


def _unfold(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Undo [`_fold`]."""
    return x.unflatten(2, (num_groups, -1)).flatten(1, 2)


def _segments(tensors, query_lengths, key_lengths):
    """Yield the segments of tensors in the order query, key, value and others like query, each `(1, heads, tokens,
    head_dim)`."""
    sizes = (query_lengths, key_lengths, key_lengths, *[query_lengths] * 3)
    rows = (each.transpose(0, 1)[None].split(size, dim=2) for each, size in zip(tensors, sizes, strict=False))
    return zip(*rows, strict=True)
