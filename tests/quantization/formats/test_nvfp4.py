"""NVFP4 against compressed-tensors, byte for byte."""

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams

from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


ORACLE = preset_name_to_scheme("NVFP4A16", ["Linear"])
SCHEME = get_scheme("nvfp4a16")


def awkward_weight(seed: int) -> torch.Tensor:
    """Weights `(16, 128)` with zeros of both signs, denormal, huge and outlying ones, and ties of codes."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.02 * torch.randn(16, 128, generator=generator)
    weight[0], weight[1, :32], weight[2, ::3], weight[3, ::5] = 0, 0, 0.0, -0.0
    weight[4] *= 1e-37
    weight[5] *= 1e-3
    weight[6, 32:64] = 1e-44
    weight[7] *= 1e28 if seed % 5 == 0 else 1.0
    weight[8, 7] = 50.0 if seed % 3 == 0 else 0.3
    weight[9:12] = torch.randint(-28, 29, (3, 128), generator=generator) / 4 * 2.0 ** (seed % 20 - 10)
    weight[12] = 0.875 * weight[12].sign()
    return weight.bfloat16().float() if seed % 2 else weight


def test_scales_codes_and_weights_equal_compressed_tensors_on_a_thousand_matrices():
    for seed in range(1000):
        weight = awkward_weight(seed)
        low_bit = LowBitTensor.from_hp(weight, SCHEME, torch.bfloat16)
        tensors = low_bit.checkpoint_tensors()
        divisor = tensors["weight_global_scale"]
        assert divisor.dtype is torch.float32 and divisor.log2().frac().item() == 0
        assert 0.125 < divisor.item() / (2688 / weight.abs().max().item()) <= 0.25
        groups = weight.unflatten(-1, (-1, 16))
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), ORACLE.weights, global_scale=divisor)
        expected = NVFP4PackedCompressor.compress(
            {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}, ORACLE
        )
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype is expected[name].dtype, name
            assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), (seed, name)
        if seed < 50:
            dense = NVFP4PackedCompressor.decompress(expected, ORACLE)["weight"]
            assert torch.equal(low_bit.dequantize(torch.bfloat16), dense.bfloat16())
            # Code times E4M3 over a power of two: bf16 loses nothing.
            assert torch.equal(low_bit.dequantize(torch.bfloat16).double(), low_bit.dequantize(torch.float64))


def test_a_given_divisor_is_kept_until_weights_outgrow_it():
    weight = awkward_weight(1)
    divisor = LowBitTensor.from_hp(weight, SCHEME, torch.bfloat16).shared_scale
    grown = LowBitTensor.from_hp(4 * weight, SCHEME, torch.bfloat16, divisor)
    assert grown.shared_scale == divisor and grown.scale.float().max() <= 448
    with pytest.raises(ValueError, match="Weights have grown to .*four times the largest weight at the start"):
        LowBitTensor.from_hp(9 * weight, SCHEME, torch.bfloat16, divisor)
