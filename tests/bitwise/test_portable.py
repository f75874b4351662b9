"""Attention, rotation and products in torch where vLLM is not installed."""

import pytest
import torch
import torch.nn.functional as F

from testing_utils import logged, make_vllm_trainer
from testing_utils.learners import make_attention, needs_vllm
from trl_qarl.bitwise import cpu as kernels
from trl_qarl.bitwise import portable
from trl_qarl.bitwise.ops import backend_of
from trl_qarl.quantization.gemm import linear_in_blocks


def test_attention_in_torch_is_the_same_in_chunks(torch_kernels):
    attend = make_attention(1500, 8, 2, 64)
    (whole,) = attend((0, 1500))
    for start, end in ((1499, 1500), (1000, 1500), (750, 751)):
        assert torch.equal(attend((start, end))[0], whole[start:end])


@needs_vllm
def test_rotation_in_torch_is_vllms_bit_for_bit(torch_kernels):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 3, 64, generator=generator).bfloat16()
    cache = torch.randn(512, 64, generator=generator).bfloat16()
    positions = torch.randint(0, 512, (300,), generator=generator)
    in_torch = backend_of(x).rotate(x, positions, cache)
    assert in_torch is not x and torch.equal(in_torch, portable.rotate(x, positions, cache))
    theirs = x.flatten(1).clone()
    torch.ops._C.rotary_embedding(positions, theirs, None, 64, cache, True)
    if not kernels.has_rounding_rotation():
        in_torch = truncate(portable.rotate(x.float(), positions, cache))
    assert torch.equal(in_torch, theirs.view_as(x))


def truncate(x):
    """Return the leading half of the bits of float32 numbers, like vLLM's kernels without AVX512-BF16."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def test_a_processor_without_bf16_multiplies_in_float32(torch_kernels, monkeypatch):
    monkeypatch.setattr(portable, "has_fast_bf16", lambda: False)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (50, 32))
    assert torch.equal(
        backend_of(weight).PackedLinear(weight)(x), linear_in_blocks(x.float(), weight.float()).bfloat16()
    )


def test_rollouts_without_vllm_have_the_bits_of_scoring(tmp_path, torch_kernels):
    """In micro-batches of another size than scoring, where vLLM is not installed; what rolls out in it is refused."""
    options = {"numerics": "engine", "bf16": True, "max_completion_length": 40, "learning_rate": 1e-2}
    batches = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "gradient_checkpointing": True}
    trainer = make_vllm_trainer(tmp_path, use_vllm=False, **options, **batches)
    trainer.train()
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0, 0.0]
    assert logged(trainer, "tbpo/dropped/total")[::2] == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"use_vllm=True: .* kernels for CPUs"):
        make_vllm_trainer(tmp_path, **options)


@pytest.fixture(params=[1, 2])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


# The last three have more input features than BLAS sums at once: `F.linear` fails there, oneDNN with a single row, and
# without bf16 instructions also with two threads and few outputs.
@pytest.mark.parametrize("shape", [(256, 64), (260, 64), (70, 40), (576, 1536), (896, 4864), (96, 4096)])
def test_a_packed_linear_layer_is_row_invariant(shape, arithmetic, num_threads):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, shape[1], generator=generator).bfloat16()
    weight, bias = torch.randn(shape, generator=generator).bfloat16(), torch.randn(shape[0], generator=generator)
    product = backend_of(weight).PackedLinear(weight)
    together = product(x, bias)
    torch.testing.assert_close(together.float(), F.linear(x.float(), weight.float(), bias), rtol=2**-6, atol=2**-4)
    for num_rows in (1, 2, 3, 4, 5, 16, 31, 33, 64, 200):
        assert torch.equal(product(x[:num_rows], bias), together[:num_rows]), num_rows
        assert torch.equal(product(x[-num_rows:], bias), together[-num_rows:]), num_rows
    # A few numbers in a thousand differ where they do.
    assert torch.equal(torch.cat([product(row, bias) for row in x[:64].split(1)]), together[:64])
    # An engine holds several layers of the learner as one.
    part = slice(shape[0] // 3, shape[0] // 3 * 2)
    assert torch.equal(backend_of(weight).PackedLinear(weight[part].contiguous())(x, bias[part]), together[:, part])


@pytest.mark.parametrize(
    ("is_installed", "has_avx512", "reason"),
    [(False, True, "vLLM for CPUs is not installed"), (True, False, "no AVX512")],
)
def test_what_vllms_kernels_lack_here_is_named(monkeypatch, is_installed, has_avx512, reason):
    monkeypatch.setattr(kernels, "find_spec", lambda name: is_installed or None)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    monkeypatch.setattr(kernels, "reason_not_to_call", kernels.reason_not_to_call.__wrapped__)
    assert reason in kernels.reason_against.__wrapped__()
