"""Operations of engine numerics against float64, with vLLM's kernels and with those in torch."""

import pytest
import torch

from reference.attention_naive import attend
from testing_utils import relative_error
from testing_utils.live_bytes import LiveBytes
from trl_qarl.bitwise import cpu as kernels
from trl_qarl.bitwise import ops
from trl_qarl.bitwise.ops import backend_of, token_log_probs
from trl_qarl.token_row import Segments


def check_gradients(inputs, reference):
    """Allow a product's factors and its result one rounding to bfloat16 each."""
    for ours, exact in zip(inputs, reference, strict=True):
        assert relative_error(ours.grad, exact.grad) < 2**-8


@pytest.mark.parametrize("lengths", [(256,), (40, 300)])
def test_attention_gradients_are_as_exact_as_torchs(lengths):
    generator = torch.Generator().manual_seed(0)
    ours, theirs, exact = (
        [
            torch.randn(sum(lengths), 4, 64, generator=generator.manual_seed(seed))
            .bfloat16()
            .to(dtype)
            .requires_grad_()
            for seed in range(3)
        ]
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float64)
    )
    upstream = torch.randn(sum(lengths), 4, 64, generator=generator).bfloat16()
    ops.attention(*ours, Segments(lengths), 0.125).backward(upstream)
    for inputs in (theirs, exact):
        sequences = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in inputs), strict=True)
        outputs = [
            torch.nn.functional.scaled_dot_product_attention(*(x[None] for x in each), is_causal=True)[0]
            for each in sequences
        ]
        torch.cat(outputs, dim=1).transpose(0, 1).backward(upstream.to(inputs[0].dtype))
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert 0 < relative_error(a.grad, c.grad) <= relative_error(b.grad, c.grad)


@pytest.mark.parametrize(
    ("lengths", "window", "softcap"),
    [
        ((5, 140, 33), None, None),
        ((1600,), None, None),
        ((5, 1100, 33), 33, None),
        ((700,), 600, None),
        # Of similar length, so computed together with padding, and not in order.
        ((66, 61, 140, 130, 64), None, None),
        ((66, 140, 61, 64, 136), 33, 2.0),
    ],
)
def test_attention_has_the_gradient_of_exact_attention(lengths, window, softcap, arithmetic):
    if window is not None and not kernels.has_engine_kernels():
        pytest.skip("windows and caps are vLLM's alone")
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(lengths), heads, 64, generator=generator).bfloat16().requires_grad_() for heads in (4, 2, 2)
    ]
    output = ops.attention(*inputs, Segments(lengths), 0.125, window, softcap)
    upstream = torch.randn(output.shape, generator=generator).bfloat16()
    output.backward(upstream)
    reference = [tensor.detach().double().requires_grad_() for tensor in inputs]
    segments = zip(*(tensor.split(lengths) for tensor in reference), strict=True)
    expected = torch.cat([attend(*segment, 0.125, window, softcap) for segment in segments])
    expected.backward(upstream.double())
    assert (output - expected).abs().max() < 0.02
    check_gradients(inputs, reference)


@pytest.mark.parametrize(("window", "knows_runs"), [(None, False), (None, True), (20, True)])
def test_keys_of_several_sequences_have_their_exact_gradient(window, knows_runs, arithmetic):
    """Two prompts of one and of 90 sequences, which see the prompt and themselves, and add to its gradient."""
    if window is not None and not kernels.has_engine_kernels():
        pytest.skip("windows are vLLM's alone")
    generator = torch.Generator().manual_seed(0)
    # The longer prompt fills a block of keys.
    prompts, rests = (31, 150), ((90,), (40, 41, 1, 70, 66, 64, 2, 39, 10) * 10)
    queries, keys, runs, start = [], [], [], 0
    for prompt, lengths in zip(prompts, rests, strict=True):
        shared = list(range(start, start + prompt))
        queries, keys, start = [*queries, prompt], [*keys, shared], start + prompt
        if knows_runs:
            runs.append((slice(start, start + sum(lengths)), slice(start - prompt, start)))
        for length in lengths:
            queries, keys = [*queries, length], [*keys, [*shared, *range(start, start + length)]]
            start += length
    index = torch.tensor([place for each in keys for place in each])
    inputs = [torch.randn(start, heads, 64, generator=generator).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    lengths = tuple(queries), tuple(map(len, keys))
    output = ops.attention(*inputs, Segments(*lengths, index, tuple(runs)), 0.125, window)
    of_own_keys = ops.attention(inputs[0], *(x[index] for x in inputs[1:]), Segments(*lengths), 0.125, window)
    assert torch.equal(output, of_own_keys)
    upstream = torch.randn(output.shape, generator=generator).bfloat16()
    output.backward(upstream)
    reference = [tensor.detach().double().requires_grad_() for tensor in inputs]
    query, *rows = reference
    segments = zip(query.split(queries), keys, strict=True)
    expected = torch.cat([attend(q, *(x[each] for x in rows), 0.125, window) for q, each in segments])
    expected.backward(upstream.double())
    assert (output - expected).abs().max() < 0.02
    check_gradients(inputs, reference)


class LargestTensor(LiveBytes):
    """Keeps the size of the largest tensor that any operation returns."""

    numel = 0

    def add(self, tensor):
        self.numel = max(self.numel, tensor.numel())


def test_attention_memory_is_not_quadratic(arithmetic):
    lengths = (4096, 4096)
    inputs = [torch.randn(8192, heads, 64).bfloat16().requires_grad_() for heads in (2, 1, 1)]
    with LargestTensor() as largest:
        output = ops.attention(*inputs, Segments(lengths), 0.1)
        output.backward(torch.ones_like(output))
    # The scores of one head of one sequence alone would be 16 times as many as those of a block of queries.
    assert 0 < largest.numel <= inputs[0].numel() < 4096**2 // 15


@pytest.mark.parametrize(("size", "is_interleaved"), [(64, False), (32, False), (32, True)])
def test_rotation_has_the_gradient_of_exact_rotation(size, is_interleaved, arithmetic):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, 64, generator=generator).bfloat16().requires_grad_()
    positions = torch.tensor([0, 1, 2, 3, 100, 7, 7, 1, 0])
    angles = torch.arange(128.0)[:, None] * 10000 ** -(torch.arange(size // 2) / (size // 2))
    cache = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    upstream = torch.randn(x.shape, generator=generator).bfloat16()
    y = ops.rotate(x, positions, cache, is_interleaved)
    y.backward(upstream)
    exact = x.detach().double().requires_grad_()
    cos, sin = cache.double()[positions].unsqueeze(1).chunk(2, -1)
    order = torch.arange(size)
    order = torch.cat([order[::2], order[1::2]]) if is_interleaved else order
    first, second = exact[..., order].chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    expected = torch.cat([turned[..., order.argsort()], exact[..., size:]], -1)
    expected.backward(upstream.double())
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("has_entropies", [True, False])
@pytest.mark.parametrize(("temperature", "softcap", "factor"), [(1.0, None, 1.0), (0.7, None, 0.5), (0.7, 3.0, 2.0)])
def test_head_log_probs_equal_log_softmax(monkeypatch, temperature, softcap, factor, has_entropies):
    """In several blocks of rows, of which forward keeps the last, and several parts of each; backward twice, the
    second without it."""
    monkeypatch.setattr(ops, "LOGIT_ROWS", 128)
    monkeypatch.setattr(ops, "LOGITS_IN_CACHE", 48 * 50 // torch.get_num_threads())
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 32, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(48, 32, generator=generator) / 4).bfloat16().float().requires_grad_()
    bias = torch.randn(48, generator=generator).requires_grad_()
    tokens = torch.randint(0, 48, (300,), generator=generator)
    upstream = torch.randn(2, 300, generator=generator) * torch.tensor([[1.0], [has_entropies]])
    product = backend_of(weight).PackedLinear(weight.detach().bfloat16())
    values = ops.head_log_probs(hidden, weight, bias, product, tokens, temperature, softcap, factor)
    rounded = product(hidden, bias)
    finished = (rounded if softcap is None else torch.tanh(rounded / softcap) * softcap) * factor
    assert torch.equal(values[0], token_log_probs(finished, tokens, temperature))
    assert torch.equal(
        values[0], backend_of(hidden).log_softmax(finished, temperature).gather(1, tokens[:, None])[:, 0]
    )
    inputs = (hidden, weight, bias)
    first, second = (torch.autograd.grad(torch.stack(values), inputs, upstream, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    logits = exact[0] @ exact[1].t() + exact[2]
    # At the logits that forward has rounded: what differs is backward's rounding.
    logits = logits + (rounded.double() - logits).detach()
    logits = (logits if softcap is None else torch.tanh(logits / softcap) * softcap) * factor
    logits = logits + (finished.double() - logits).detach()
    log_probs = torch.log_softmax(logits / temperature, -1)
    expected = torch.stack([log_probs.gather(1, tokens[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)])
    for ours, reference in zip(first, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        assert (ours - reference).norm() / reference.norm() < 0.005


def test_token_log_probs_has_value_and_gradient_of_log_softmax():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 300, 50, generator=generator).bfloat16().requires_grad_()
    tokens = torch.randint(0, 50, (2, 300), generator=generator)
    upstream = torch.randn(2, 300, generator=generator)
    ours = token_log_probs(logits, tokens, 0.7)
    (grad,) = torch.autograd.grad(ours, logits, upstream)
    expected = torch.log_softmax(logits.float() / 0.7, -1).gather(2, tokens[..., None])[..., 0]
    (expected_grad,) = torch.autograd.grad(expected, logits, upstream)
    assert torch.equal(ours, expected)
    torch.testing.assert_close(grad, expected_grad, rtol=2**-7, atol=1e-6)


def test_lora_has_the_gradients_of_the_exact_branch():
    generator = torch.Generator().manual_seed(0)
    x, y, upstream = (torch.randn(2, 9, n, generator=generator).bfloat16().requires_grad_() for n in (96, 64, 64))
    a, b = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((3, 96), (64, 3)))
    inputs = (y, x, a, b)
    output = ops.add_lora(*inputs, 1.7, 8)
    grads = torch.autograd.grad(output, inputs, upstream)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = exact[0] + 1.7 * (exact[1] @ exact[2].t()) @ exact[3].t()
    # Factors, the product with A, what is added and the sum are each rounded to bfloat16.
    assert relative_error(output, expected) < 2**-7
    for grad, exact_grad in zip(grads, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        assert relative_error(grad, exact_grad) < 2**-7
