"""Attention, rotation and products in torch where vLLM is not installed."""

import pytest
import torch

from testing_utils import logged, make_vllm_trainer
from testing_utils.learners import make_attention, needs_vllm
from trl_qarl.numerics import portable
from trl_qarl.numerics.backends import backend_of
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
    assert torch.equal(in_torch, theirs.view_as(x))


def test_a_processor_without_bf16_multiplies_in_float32(torch_kernels, monkeypatch):
    monkeypatch.setattr(portable, "has_fast_bf16", lambda: False)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (50, 32))
    assert torch.equal(
        backend_of(weight).PackedLinear(weight)(x), linear_in_blocks(x.float(), weight.float()).bfloat16()
    )


def test_rollouts_without_vllm_have_the_bits_of_scoring(tmp_path, torch_kernels):
    """A run of `numerics="engine"` where vLLM is not installed; one that rolls out in vLLM is refused there."""
    options = {"numerics": "engine", "bf16": True, "max_completion_length": 40, "learning_rate": 1e-2}
    trainer = make_vllm_trainer(tmp_path, use_vllm=False, **options)
    trainer.train()
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0, 0.0]
    assert logged(trainer, "tbpo/dropped/total")[::2] == [0.0, 0.0]
    with pytest.raises(
        ValueError, match=r"contradicts use_vllm=True: .* kernels for CPUs, and (it|this processor|vLLM for CPUs) "
    ):
        make_vllm_trainer(tmp_path, **options)
