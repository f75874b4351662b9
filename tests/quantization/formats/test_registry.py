"""Behaviour that all containers share."""

import pytest
import torch

from trl_qarl.quantization.formats.fp4 import MAGNITUDES
from trl_qarl.quantization.formats.registry import format_of
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.quantization.tensors import LowBitTensor


PAIRS = [*dict.fromkeys((scheme.container, scheme.grid) for scheme in SCHEMES.values() if scheme.is_quantized)]
LOW_BIT = [*dict(PAIRS)]


def random_codes(grid, shape=(48, 64)):
    """Codes `(N, K)` of a grid, its ends among them, as float32."""
    if grid.name == "e2m1":
        sizes = torch.tensor(MAGNITUDES)
        return torch.cat([sizes, -sizes[1:]])[torch.randint(15, shape)]
    codes = torch.empty(shape).uniform_(*grid.quant_range)
    codes[0, 0], codes[0, 1] = grid.quant_range
    return codes.round() if grid.type == "int" else codes.to(torch.float8_e4m3fn).float()


@pytest.mark.parametrize(("container", "grid"), PAIRS, ids=lambda value: value.name)
def test_codes_come_back_from_memory_and_from_a_checkpoint(container, grid):
    functions, codes = format_of(container), random_codes(grid)
    qdata, scale = functions.pack(codes), torch.rand(48, 1)
    if container.scale_dtype is not None:
        scale = (100 * scale).to(getattr(torch, container.scale_dtype))
    assert functions.in_features(qdata) == 64
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        unpacked = functions.unpack(qdata, dtype)
        assert unpacked.dtype is dtype and torch.equal(unpacked.float(), codes)
    others = [torch.full((48, 1), 8192.0)] * container.has_global_scale
    tensors = functions.to_checkpoint(qdata, scale, *others)
    assert (*tensors,) == functions.checkpoint_names
    again, scale_again, *others_again = functions.from_checkpoint(tensors)
    for ours, theirs in zip(others, others_again, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert again.dtype is qdata.dtype and torch.equal(again.view(torch.uint8), qdata.view(torch.uint8))
    assert scale_again.dtype is scale.dtype and scale_again.data_ptr() == scale.data_ptr()
    assert qdata.nbytes == 48 * 64 * container.num_bits // 8
    stored = tensors.get("weight_packed", tensors.get("weight"))
    assert 48 * 64 // container.word_size == stored.numel() or stored.nbytes == qdata.nbytes


@pytest.mark.parametrize(("container", "grid"), PAIRS, ids=lambda value: value.name)
def test_flips_are_counted_one_by_one(container, grid):
    functions, before, after = format_of(container), random_codes(grid), random_codes(grid)
    if container.name == "e4m3":
        before[1, 1], after[1, 1] = 0.0, -0.0
    flips = functions.count_flips(functions.pack(before), functions.pack(after))
    # The signs of zeros are codes of their own.
    differ = (before != after) | (before.signbit() != after.signbit()) & (grid.type == "float")
    assert flips == differ.sum() > 0
    assert functions.count_flips(functions.pack(before), functions.pack(before.clone())) == 0


@pytest.mark.parametrize("container", LOW_BIT, ids=lambda value: value.name)
def test_tensors_have_a_row_per_row_of_the_weight(container):
    scheme = next(scheme for scheme in SCHEMES.values() if scheme.container == container)
    weight = LowBitTensor.from_hp(torch.randn(48, 256), scheme, torch.bfloat16)
    assert [len(part) for part in weight.parts()] == [48] * (2 + container.has_global_scale)
    assert torch.equal(weight.take(slice(16)).dequantize(), weight.dequantize()[:16])
