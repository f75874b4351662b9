"""
Engine numerics without an engine: gradients against float64, the same bits for any batch, and what is refused. With vLLM's kernels
and with those in torch that take their place.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from testing_utils import logged, make_tiny_config, make_tiny_model, make_vllm_trainer, relative_error
from trl_qarl import convert_model, get_scheme, prepare_model, restore_model
from trl_qarl.adapters.base import prepare_base
from trl_qarl.numerics import cpu as kernels
from trl_qarl.numerics import cpu_attention, ops, portable
from trl_qarl.numerics.attach import (
    attach_engine_numerics,
    detach_engine_numerics,
    engine_numerics,
    has_engine_numerics,
)
from trl_qarl.numerics.availability import COVERED_CLASSES, check_engine_numerics
from trl_qarl.numerics.ops import token_log_probs
from trl_qarl.quantization.gemm import linear_in_blocks
from trl_qarl.quantization.tensors import LowBitTensor


REASON = kernels.reason_against()
VLLM = [pytest.mark.vllm, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def needs_vllm(test):
    for mark in VLLM:
        test = mark(test)
    return test


@pytest.fixture
def torch_kernels(monkeypatch):
    """No vLLM's kernels, as where it is not installed."""
    monkeypatch.setattr(kernels, "reason_against", lambda: "it is not installed")


@pytest.fixture(params=[pytest.param("vllm", marks=VLLM), "torch"])
def arithmetic(request):
    if request.param == "torch":
        request.getfixturevalue("torch_kernels")


LENGTHS = (3, 40, 17, 130, 1, 64, 9)


def make_model(tmp_path, arch="qwen3", scheme="bf16", **overrides):
    model = AutoModelForCausalLM.from_pretrained(
        make_tiny_model(tmp_path, arch, **overrides), dtype=torch.float32
    ).eval()
    prepare_model(model, scheme, scale_dtype=torch.bfloat16)
    return model


def make_sequences(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 260, (length,), generator=generator).tolist() for length in lengths]


def padded_log_probs(model, sequences, side):
    """Log-probs of each sequence's tokens after its first, from one padded batch."""
    length = max(map(len, sequences))

    def pad(row, value):
        padding = [value] * (length - len(row))
        return padding + row if side == "left" else row + padding

    ids = torch.tensor([pad(row, 0) for row in sequences])
    mask = torch.tensor([pad([1] * len(row), 0) for row in sequences])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    starts = [length - len(row) if side == "left" else 0 for row in sequences]
    return [
        token_log_probs(logits[i, start : start + len(row) - 1], torch.tensor(row[1:], dtype=torch.int64))
        for i, (row, start) in enumerate(zip(sequences, starts, strict=True))
    ]


def packed_log_probs(model, sequences):
    """The same from all sequences in one row, told apart by their positions."""
    ids = torch.tensor([[token for row in sequences for token in row]])
    positions = torch.tensor([[position for row in sequences for position in range(len(row))]])
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].split([*map(len, sequences)])
    return [
        token_log_probs(part[:-1], torch.tensor(row[1:], dtype=torch.int64))
        for part, row in zip(logits, sequences, strict=True)
    ]


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
@torch.no_grad()
def test_a_sequence_gets_the_same_bits_in_every_batch(tmp_path, scheme, arithmetic):
    model = make_model(tmp_path, scheme=scheme)
    sequences = make_sequences(LENGTHS * 5)[:32]
    with engine_numerics(model):
        alone = [padded_log_probs(model, [row], "left")[0] for row in sequences]
        batches = {"packed": packed_log_probs(model, sequences)}
        for side in ("left", "right"):
            for size in (2, 7, 32):
                parts = [sequences[i : i + size] for i in range(0, len(sequences), size)]
                batches[f"{size}, padded on the {side}"] = [
                    row for part in parts for row in padded_log_probs(model, part, side)
                ]
    for name, rows in batches.items():
        assert all(torch.equal(a, b) for a, b in zip(alone, rows, strict=True)), name


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gradients_are_those_of_the_fast_forward_up_to_rounding(tmp_path, arch, arithmetic):
    model = make_model(tmp_path, arch)
    exact = copy.deepcopy(model).double()
    sequences = make_sequences()
    weights = torch.randn(sum(LENGTHS) - len(LENGTHS), generator=torch.Generator().manual_seed(2))
    with engine_numerics(model):
        (torch.cat(padded_log_probs(model, sequences, "left")) * weights).sum().backward()
    positions = 0
    for row in sequences:
        if len(row) == 1:
            continue
        logits = exact(torch.tensor([row])).logits[0, :-1]
        logps = torch.log_softmax(logits, -1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        (logps * weights[positions : positions + len(row) - 1]).sum().backward()
        positions += len(row) - 1
    for (name, ours), reference in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert ours.grad.dtype is torch.float32
        distance = (ours.grad - reference.grad).norm() / reference.grad.norm()
        # Forward and backward round to 8 bits at every operation.
        assert distance < 0.03, f"{name}: {distance:.3f}"


@pytest.mark.parametrize("scheme", ["bf16", "w4a16"])
def test_checkpointing_changes_neither_bits_nor_gradients(tmp_path, scheme, arithmetic):
    model = make_model(tmp_path, scheme=scheme)
    sequences = make_sequences()
    results = []
    with engine_numerics(model):
        model.train()
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.zero_grad()
            logps = torch.cat(padded_log_probs(model, sequences, "left"))
            logps.sum().backward()
            results.append((logps.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    (logps, grads), (logps_again, grads_again) = results
    assert torch.equal(logps, logps_again)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))


@pytest.mark.parametrize(
    ("lengths", "window"), [((5, 140, 33), None), ((1600,), None), ((5, 1100, 33), 33), ((700,), 600)]
)
def test_attention_has_the_gradient_of_exact_attention(lengths, window, arithmetic):
    if window is not None and not kernels.has_engine_kernels():
        pytest.skip("windows are vLLM's alone")
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(lengths), heads, 64, generator=generator).bfloat16().requires_grad_() for heads in (4, 2, 2)
    ]
    output = ops.attention(*inputs, lengths, lengths, 0.125, window)
    upstream = torch.randn(output.shape, generator=generator).bfloat16()
    output.backward(upstream)
    reference = [tensor.detach().double().requires_grad_() for tensor in inputs]
    parts = []
    for q, k, v in zip(*(tensor.split(lengths) for tensor in reference), strict=True):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.125
        seen = torch.ones(len(q), len(q)).tril().triu(1 - (window or len(q))).bool()
        scores = scores.masked_fill(~seen, -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    expected = torch.cat(parts)
    expected.backward(upstream.double())
    assert (output - expected).abs().max() < 0.02
    for ours, exact in zip(inputs, reference, strict=True):
        # One rounding to bfloat16.
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=2**-8, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Keeps the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return output


def test_no_tensor_of_attention_grows_with_the_square_of_the_length(arithmetic):
    lengths = (2048, 2048)
    inputs = [torch.randn(4096, heads, 32).bfloat16().requires_grad_() for heads in (2, 1, 1)]
    with LargestTensor() as largest:
        output = ops.attention(*inputs, lengths, lengths, 0.1)
        output.backward(torch.ones_like(output))
    # The scores of one head of one sequence alone would be 16 times as many; torch's kernel keeps a sum of each row.
    assert 0 < largest.numel <= inputs[0].numel() < 2048**2 // 15


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@torch.no_grad()
def test_a_converted_model_computes_with_its_own_arithmetic_again(tmp_path, scheme):
    model = make_model(tmp_path, scheme=scheme)
    expected, ids = copy.deepcopy(model), torch.arange(4, 40)[None]
    attach_engine_numerics(model)
    assert not torch.equal(model(ids).logits.float(), expected(ids).logits)
    for change in (convert_model, restore_model):
        with pytest.raises(ValueError, match=r"detach_engine_numerics\(model\)` first"):
            change(model)
    assert has_engine_numerics(model) and model(ids).logits.dtype is torch.bfloat16
    detach_engine_numerics(model)
    assert convert_model(model) == convert_model(expected)
    assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.fixture(params=["amx", "vec"])
def instructions(request, monkeypatch):
    """vLLM's kernels for processors with AMX, and those for AVX512 alone, which run here too."""
    if request.param == "vec":
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    elif not torch.cpu._is_amx_tile_supported():
        pytest.skip("no AMX")
    cpu_attention._layout.cache_clear()
    yield
    cpu_attention._layout.cache_clear()


def make_attention(length, num_heads, num_key_heads, head_dim):
    """Attention of the positions `start` to `end` of one random sequence."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(length, heads, head_dim, generator=generator).bfloat16()
        for heads in (num_heads, num_key_heads, num_key_heads)
    )

    def attend(*ranges, window=None):
        """Of several such ranges at once, each as a sequence of its own."""
        parts = [(query[start:end], key[:end], value[:end]) for start, end in ranges]
        lengths = [(end - start, end) for start, end in ranges]
        output = kernels.attention(*map(torch.cat, zip(*parts, strict=True)), *zip(*lengths, strict=True), 0.1, window)
        return output.split([queries for queries, _ in lengths])

    return attend


@needs_vllm
@pytest.mark.parametrize(
    ("length", "num_heads", "num_key_heads", "head_dim"),
    # With AMX heads that share keys are rows of one pass if 32 is a multiple of their number. A tile of decoding has 8,096 keys.
    [(5000, 2, 2, 64), (2500, 2, 2, 128), (3000, 3, 1, 64), (2000, 16, 1, 96), (9000, 2, 1, 64)],
)
def test_attention_has_the_bits_of_decoding_at_any_length(
    length, num_heads, num_key_heads, head_dim, instructions, monkeypatch
):
    attend = make_attention(length, num_heads, num_key_heads, head_dim)
    (whole,) = attend((0, length))
    # Chunks that begin and end anywhere, in one batch with decoding and with another prefill.
    ranges = [(0, 700), (700, 737), (737, 1500), (1500, length), (length - 1, length), (1, 1599)]
    for (start, end), output in zip(ranges, attend(*ranges), strict=True):
        assert torch.equal(output, whole[start:end]), (start, end)
    # One token at a time; first of some steps, then of all in one batch.
    decoded = {position: attend((position, position + 1))[0][0] for position in (0, 1, 736, 1376, length - 1)}
    monkeypatch.setattr(cpu_attention, "PASS_ROWS", {})
    cpu_attention._layout.cache_clear()
    (all_decoded,) = attend((0, length))
    assert all(torch.equal(all_decoded[position], row) for position, row in decoded.items())
    assert (whole != all_decoded).flatten(1).any(dim=1).nonzero().flatten().tolist() == []


@needs_vllm
@pytest.mark.parametrize("window", [1, 32, 100, 1500, 4000])
def test_attention_to_a_window_has_the_bits_of_decoding(window, instructions):
    attend = make_attention(3000, 4, 2, 64)
    (whole,) = attend((0, 3000), window=window)
    for start, end in ((0, 700), (700, 1999), *((p, p + 1) for p in (0, 31, 32, 99, 100, 1500, 1531, 2999))):
        assert torch.equal(attend((start, end), window=window)[0], whole[start:end]), (start, end)
    is_cut = (whole != attend((0, 3000))[0]).flatten(1).any(dim=1)
    assert not is_cut[:window].any() and (window > 3000 or is_cut[window + 32 :].any())


@needs_vllm
def test_a_prefill_of_vllm_has_other_bits_at_some_length(instructions, monkeypatch):
    """Without which all of this would be for nothing."""
    whole = make_attention(3000, 4, 2, 128)((0, 3000))[0]
    monkeypatch.setattr(cpu_attention, "PASS_ROWS", dict.fromkeys(cpu_attention.PASS_ROWS, 1 << 20))
    cpu_attention._layout.cache_clear()
    prefill = make_attention(3000, 4, 2, 128)((0, 3000))[0]
    is_equal = (prefill == whole).flatten(1).all(dim=1)
    assert is_equal[:320].all() and not is_equal[2000:].all()


def test_attention_in_torch_is_the_same_in_chunks(torch_kernels):
    attend = make_attention(1500, 8, 2, 64)
    (whole,) = attend((0, 1500))
    for start, end in ((1499, 1500), (1000, 1500), (750, 751)):
        assert torch.equal(attend((start, end))[0], whole[start:end])


def test_requests_of_one_pass_are_all_queries_and_see_what_they_saw():
    counts, keys = [1, 16, 17, 0, 40, 1], [9, 16, 30, 5, 40, 1]
    query_starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    starts, lengths, request = cpu_attention.one_pass_requests(query_starts, torch.tensor(keys, dtype=torch.int32), 16)
    assert starts.dtype == lengths.dtype == torch.int32 and starts.diff().max() <= 16 and len(request) == 8

    def seen(starts, lengths, names):
        return [
            (name, end - (stop - query) + 1)
            for start, stop, end, name in zip(starts, starts[1:], lengths, names, strict=False)
            for query in range(start, stop)
        ]

    parts = seen(starts.tolist(), lengths.tolist(), request.tolist())
    assert parts == seen(query_starts.tolist(), keys, range(len(keys)))


@pytest.mark.parametrize("kind", ["default", "padded", "packed"])
@torch.no_grad()
def test_more_tokens_than_the_model_has_positions_are_refused(tmp_path, kind, arithmetic):
    model = make_model(tmp_path, max_position_embeddings=64)
    attach_engine_numerics(model)
    ids = torch.arange(4, 69)[None]
    arguments = {
        "default": {},
        "padded": {"attention_mask": torch.ones_like(ids)},
        "packed": {"position_ids": torch.arange(65)[None]},
    }[kind]
    with pytest.raises(ValueError, match=r"has 65 tokens, and the model positions for 64 \(max_position_embeddings\)"):
        model(ids, **arguments)
    assert model(ids[:, :64]).logits.isfinite().all()


@needs_vllm
def test_rotation_in_torch_is_vllms_bit_for_bit(torch_kernels):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 3, 64, generator=generator).bfloat16()
    cache = torch.randn(512, 64, generator=generator).bfloat16()
    positions = torch.randint(0, 512, (300,), generator=generator)
    in_torch = kernels.rotate(x, positions, cache)
    assert in_torch is not x and torch.equal(in_torch, portable.rotate(x, positions, cache))
    theirs = x.flatten(1).clone()
    torch.ops._C.rotary_embedding(positions, theirs, None, 64, cache, True)
    assert torch.equal(in_torch, theirs.view_as(x))


def test_rotation_has_the_gradient_of_exact_rotation(arithmetic):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, 64, generator=generator).bfloat16().requires_grad_()
    positions = torch.tensor([0, 1, 2, 3, 100, 7, 7, 1, 0])
    angles = torch.arange(128.0)[:, None] * 10000 ** -(torch.arange(32) / 32)
    cache = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    upstream = torch.randn(x.shape, generator=generator).bfloat16()
    y = ops.rotate(x, positions, cache)
    y.backward(upstream)
    exact = x.detach().double().requires_grad_()
    cos, sin = cache.double()[positions].unsqueeze(1).chunk(2, -1)
    first, second = exact.chunk(2, -1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    expected.backward(upstream.double())
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)


# The last has more input features than BLAS sums at once: `F.linear` fails there.
@pytest.mark.parametrize("shape", [(256, 64), (260, 64), (70, 40), (576, 1536)])
def test_a_packed_linear_gives_a_row_the_same_bits_among_any_others(shape, arithmetic):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, shape[1], generator=generator).bfloat16()
    weight, bias = torch.randn(shape, generator=generator).bfloat16(), torch.randn(shape[0], generator=generator)
    product = kernels.PackedLinear(weight)
    together = product(x, bias)
    torch.testing.assert_close(together.float(), F.linear(x.float(), weight.float(), bias), rtol=2**-6, atol=2**-4)
    for num_rows in (1, 2, 3, 4, 5, 16, 31, 33, 64, 200):
        assert torch.equal(product(x[:num_rows], bias), together[:num_rows]), num_rows
        assert torch.equal(product(x[-num_rows:], bias), together[-num_rows:]), num_rows


def test_a_processor_without_bf16_multiplies_in_float32(torch_kernels, monkeypatch):
    monkeypatch.setattr(kernels, "has_fast_bf16", lambda: False)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (50, 32))
    assert torch.equal(kernels.PackedLinear(weight)(x), linear_in_blocks(x.float(), weight.float()).bfloat16())


def test_rollouts_without_vllm_have_the_bits_of_scoring(tmp_path, torch_kernels):
    """A run of `numerics="engine"` where vLLM is not installed; one that rolls out in vLLM is refused there."""
    options = {"numerics": "engine", "bf16": True, "max_completion_length": 40, "learning_rate": 1e-2}
    trainer = make_vllm_trainer(tmp_path, use_vllm=False, **options)
    trainer.train()
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0, 0.0]
    assert logged(trainer, "tbpo/dropped/total")[::2] == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"contradicts use_vllm=True: .* kernels for CPUs, and it is not installed"):
        make_vllm_trainer(tmp_path, **options)


@pytest.mark.parametrize(
    ("is_installed", "has_avx512", "reason"),
    [(False, True, "vLLM for CPUs is not installed"), (True, False, "no AVX512")],
)
def test_what_vllms_kernels_lack_here_is_named(monkeypatch, is_installed, has_avx512, reason):
    monkeypatch.setattr(kernels, "find_spec", lambda name: is_installed or None)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    monkeypatch.setattr(kernels, "reason_not_to_call", kernels.reason_not_to_call.__wrapped__)
    assert reason in kernels.reason_against.__wrapped__()


@needs_vllm
@pytest.mark.parametrize("shape", [(64, 128), (96, 576), (1536, 320)])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-signed"])
def test_the_int4_layer_has_the_product_of_its_dequantized_weight(scheme, shape, rows):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(*shape[::-1]))
    prepare_model(model, scheme, scale_dtype=torch.bfloat16)
    low_bit = model[0].low_bit_weight()
    product = kernels.PackedInt4Linear(low_bit)
    x = torch.randn(rows, shape[1]).bfloat16()
    exact = x.double() @ low_bit.dequantize(torch.bfloat16).double().t() + model[0].bias.double()
    y = product(x, model[0].bias)
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)
    assert all(torch.equal(product(row[None], model[0].bias)[0], y[i]) for i, row in enumerate(x))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_log_probs_have_values_and_gradients_of_log_softmax_and_entropy(temperature):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 32, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(48, 32, generator=generator) / 4).bfloat16().float().requires_grad_()
    bias = torch.randn(48, generator=generator).requires_grad_()
    tokens = torch.randint(0, 48, (300,), generator=generator)
    upstream = torch.randn(2, 300, generator=generator)
    product = kernels.PackedLinear(weight.detach().bfloat16())
    values = ops.head_log_probs(hidden, weight, bias, product, tokens, temperature)
    assert torch.equal(values[0], token_log_probs(product(hidden, bias), tokens, temperature))
    (torch.stack(values) * upstream).sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    log_probs = torch.log_softmax((exact[0] @ exact[1].t() + exact[2]) / temperature, -1)
    expected = torch.stack([log_probs.gather(1, tokens[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)])
    (expected * upstream).sum().backward()
    for ours, reference in zip((hidden, weight, bias), exact, strict=True):
        assert (ours.grad - reference.grad).norm() / reference.grad.norm() < 0.01


def test_a_changed_master_is_packed_again(tmp_path):
    model = make_model(tmp_path, "llama")
    ids = torch.tensor([make_sequences()[1]])
    with engine_numerics(model), torch.no_grad():
        before = model(ids).logits
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
        after = model(ids).logits
    assert not torch.equal(before, after)


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


@torch.no_grad()
def test_autocast_changes_nothing(tmp_path):
    model = make_model(tmp_path)
    ids = torch.tensor([make_sequences()[1]])
    with engine_numerics(model):
        expected = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(ids).logits, expected)


@torch.no_grad()
def test_detaching_restores_the_model(tmp_path):
    model = make_model(tmp_path, "qwen2", "w4a16")
    ids = torch.tensor([make_sequences()[1]])
    before, state, text = model(ids).logits, dict(vars(model.model.layers[0].self_attn)), repr(model)
    attach_engine_numerics(model)
    assert has_engine_numerics(model)
    assert not torch.equal(model(ids).logits, before)
    with pytest.raises(ValueError, match="attached"):
        attach_engine_numerics(model)
    detach_engine_numerics(model)
    assert not has_engine_numerics(model)
    assert torch.equal(model(ids).logits, before)
    assert vars(model.model.layers[0].self_attn).keys() == state.keys()
    assert repr(model).replace("kernel=None", "") != "" and type(model.lm_head) is torch.nn.Linear and text


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
def test_decoding_with_a_cache_gives_the_bits_of_whole_sequences(tmp_path, scheme, arithmetic):
    model = make_model(tmp_path, scheme=scheme)
    prompts = make_sequences((3, 40, 17))
    ids = torch.tensor([[0] * (40 - len(row)) + row for row in prompts])
    mask = (torch.arange(40) >= 40 - torch.tensor([[len(row)] for row in prompts])).long()
    with engine_numerics(model):
        torch.manual_seed(0)
        generated = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
        whole = [row + generated.sequences[i, 40:].tolist() for i, row in enumerate(prompts)]
        scored = padded_log_probs(model, whole, "right")
    for i, row in enumerate(whole):
        logits = torch.stack([step[i] for step in generated.logits])
        sampled = token_log_probs(logits, torch.tensor(row[-24:]))
        assert torch.equal(sampled, scored[i][-24:])


def make_adapted(tmp_path, arch="qwen2", scheme="w4a16", is_merged=False, **config):
    """A `PeftModel` on a low-bit base, whose adapter is not zero."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, arch), dtype=torch.float32).eval()
    torch.manual_seed(0)
    options = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "init_lora_weights": False,
    }
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **(options | config))).eval()
    prepare_base(model, get_scheme(scheme), keep_masters=is_merged, is_merged=is_merged, scale_dtype=torch.bfloat16)
    return model


@pytest.mark.parametrize("kind", ["all weights", "adapter", "merged"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_with_engine_numerics_has_its_own(tmp_path, kind, copied):
    if kind == "all weights":
        model = make_model(tmp_path, "qwen2", "w4a16")
    else:
        model = make_adapted(tmp_path, is_merged=kind == "merged")
    ids = torch.tensor([make_sequences()[1]])
    before = model(ids).logits
    attach_engine_numerics(model)
    expected = model(ids).logits
    other = copied(model)
    assert has_engine_numerics(other) and torch.equal(other(ids).logits, expected)
    with torch.no_grad():
        for parameter in other.parameters():
            if not isinstance(parameter, LowBitTensor):
                parameter.mul_(1.5)
    assert torch.equal(model(ids).logits, expected) and not torch.equal(other(ids).logits, expected)
    detach_engine_numerics(model)
    assert torch.equal(model(ids).logits, before) and has_engine_numerics(other)
    changed = other(ids).logits
    detach_engine_numerics(other)
    assert not has_engine_numerics(other) and not torch.equal(other(ids).logits.float(), changed.float())


@pytest.mark.parametrize("is_merged", [False, True])
@torch.no_grad()
def test_lora_gives_the_same_bits_in_any_batch_and_is_taken_out_again(tmp_path, is_merged, arithmetic):
    model = make_adapted(tmp_path, is_merged=is_merged)
    sequences = make_sequences()
    before = model(torch.tensor([sequences[1]])).logits
    names = {name: vars(module).keys() for name, module in model.named_modules()}
    with engine_numerics(model):
        with_adapter = padded_log_probs(model, sequences, "right")
        for row, expected in zip(sequences, with_adapter, strict=True):
            [alone] = padded_log_probs(model, [row], "left")
            assert torch.equal(alone, expected)
        with model.disable_adapter():
            without = padded_log_probs(model, sequences, "right")
        assert not torch.equal(with_adapter[1], without[1])
    assert torch.equal(model(torch.tensor([sequences[1]])).logits, before)
    assert {name: vars(module).keys() for name, module in model.named_modules()} == names


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


@pytest.mark.parametrize(
    ("config", "message"),
    [({"lora_dropout": 0.1}, "lora_dropout=0.1, and engines drop nothing"), ({"use_dora": True}, "another kind")],
)
def test_adapters_that_an_engine_does_not_have_are_refused_by_name(tmp_path, config, message):
    model = make_adapted(tmp_path, scheme="bf16", **config)
    with pytest.raises(ValueError, match=f"layers.0.self_attn.q_proj' has .*{message}"):
        check_engine_numerics(model)


REFUSED = [
    (
        "gemma",
        {},
        {},
        "GemmaForCausalLM are not known, those of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
        "Qwen3ForCausalLM",
    ),
    ("qwen3", {"hidden_act": "gelu"}, {}, "hidden_act='gelu'"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, {}, "sliding_attention"),
    ("llama", {"attention_dropout": 0.1}, {}, "attention_dropout=0.1"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 2}, {}, "chunked_attention"),
    pytest.param("llama", {"head_dim": 16}, {}, "head_dim=16", marks=VLLM),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {},
        "rope_type='linear'",
    ),
    ("llama", {}, {"dtype": torch.float32}, "not in torch.float32"),
]


@pytest.mark.parametrize(
    ("arch", "overrides", "arguments", "message"),
    REFUSED,
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_is_not_covered_is_refused_by_name(arch, overrides, arguments, message):
    model = AutoModelForCausalLM.from_config(make_tiny_config(arch, **overrides))
    with pytest.raises(ValueError, match=message):
        check_engine_numerics(model, **arguments)


@pytest.mark.parametrize("arch", ["mistral", "qwen2"])
def test_windows_are_vllms_alone(arch, torch_kernels):
    fields = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True} if arch == "qwen2" else {}
    config = make_tiny_config(arch, sliding_window=20, **fields)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"windows of \[20\] tokens, which vLLM's CPU kernels alone have"):
        check_engine_numerics(model)
    for no_window in (None, 0):
        model.config.sliding_window = no_window
        if arch == "mistral":
            check_engine_numerics(model)


@needs_vllm
@torch.no_grad()
def test_a_window_hides_what_is_before_it_and_has_no_cache():
    config = make_tiny_config("mistral", sliding_window=20, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.tensor(make_sequences((60, 60)))
    ids[1, 40:] = ids[0, 40:]
    fast = model(ids).logits
    attach_engine_numerics(model)
    logits = model(ids, use_cache=False).logits
    assert relative_error(logits, fast.double()) < 0.02
    is_equal = (logits[0] == logits[1]).all(dim=-1)
    assert is_equal[59:].all() and not is_equal[:59].any()
    with pytest.raises(ValueError, match="a window of 20 tokens, and a cache drops keys before it"):
        model.generate(ids, max_new_tokens=2)


def test_capped_logits_and_other_schemes_are_refused(tmp_path):
    model = make_model(tmp_path, "llama", "w8a16")
    with pytest.raises(ValueError, match="scheme 'w8a16', which is none of"):
        check_engine_numerics(model)
    model.config.attn_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="attn_logit_softcapping=30.0"):
        check_engine_numerics(model)


def test_a_module_of_unknown_class_is_refused_by_path(tmp_path):
    model = make_model(tmp_path, "llama")
    model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp)
    with pytest.raises(ValueError, match="'model.layers.1.mlp' is a Sequential"):
        check_engine_numerics(model)


def test_every_covered_class_passes():
    names = {
        type(model).__name__
        for arch in ("llama", "mistral", "qwen2", "qwen3")
        for model in [AutoModelForCausalLM.from_config(make_tiny_config(arch, sliding_window=None))]
        if check_engine_numerics(model) is None
    }
    assert names == set(COVERED_CLASSES)
