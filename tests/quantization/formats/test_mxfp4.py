"""MXFP4 against compressed-tensors, byte for byte."""

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams

from trl_qarl.quantization.formats.fp4 import MAGNITUDES, Mxfp4
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


ORACLE = preset_name_to_scheme("MXFP4A16", ["Linear"])
SCHEME = get_scheme("mxfp4a16")


def awkward_weight(seed: int) -> torch.Tensor:
    """Weights `(16, 128)` with zeros of both signs, denormal, huge and outlying ones, and ties of codes and of
    scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.02 * torch.randn(16, 128, generator=generator)
    weight[0], weight[1, :32], weight[2, ::3], weight[3, ::5] = 0, 0, 0.0, -0.0
    weight[4] *= 1e-37
    weight[5] *= 1e-40
    weight[6, 32:64] = 1e-44
    weight[7] *= 1e30
    weight[8, 7] = 50.0
    weight[9:12] = torch.randint(-28, 29, (3, 128), generator=generator) / 4 * 2.0 ** (seed % 40 - 20)
    weight[12] = 0.875 * weight[12].sign()
    weight[13] = torch.linspace(-7, 7, 128)
    return weight.bfloat16().float() if seed % 2 else weight


@pytest.mark.slow
def test_scales_codes_and_weights_equal_compressed_tensors_on_a_thousand_matrices():
    for seed in range(1000):
        weight = awkward_weight(seed)
        groups = weight.unflatten(-1, (-1, 32))
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), ORACLE.weights)
        expected = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, ORACLE)
        low_bit = LowBitTensor.from_hp(weight, SCHEME, torch.bfloat16)
        tensors = low_bit.checkpoint_tensors()
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype is torch.uint8 and torch.equal(tensor, expected[name]), (seed, name)
        if seed < 50:
            dense = MXFP4PackedCompressor.decompress(expected, ORACLE)["weight"]
            assert torch.equal(low_bit.dequantize(torch.float32), dense.float())
            # Code times power of two: bf16 loses nothing.
            assert torch.equal(low_bit.dequantize(torch.bfloat16).double(), low_bit.dequantize(torch.float64))
            promoted = LowBitTensor.from_hp(weight.bfloat16(), SCHEME, torch.bfloat16)
            assert torch.equal(
                promoted.qdata, LowBitTensor.from_hp(weight.bfloat16().float(), SCHEME, torch.bfloat16).qdata
            )


def test_every_quotient_goes_to_the_nearest_code_and_ties_to_the_even_one():
    quotients = torch.arange(-7 * 256, 7 * 256).view(1, -1) / 256
    codes = Mxfp4().unpack(Mxfp4().pack(quotients), torch.float32)
    magnitudes = torch.tensor(MAGNITUDES)
    distances = (quotients.abs().unsqueeze(-1) - magnitudes).abs()
    assert torch.equal((codes.abs() - quotients.abs()).abs(), distances.amin(-1))
    tied = distances.sort(-1).values[..., :2].diff(dim=-1)[..., 0] == 0
    index = (codes.abs().unsqueeze(-1) == magnitudes).int().argmax(-1)
    assert tied.sum() == 14 and (index[tied] % 2 == 0).all()
    assert (codes[quotients < 0] <= 0).all() and (codes[quotients > 0] >= 0).all()


def test_numbers_beyond_the_largest_scale_are_clamped():
    weight = torch.full((1, 32), 3e38)
    low_bit = LowBitTensor.from_hp(weight, SCHEME, torch.float32)
    assert low_bit.scale_values().item() == 2.0**125 and torch.isfinite(low_bit.dequantize()).all()
