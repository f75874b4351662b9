"""MXFP4 and NVFP4 against compressed-tensors, byte for byte."""

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams

from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


COMPRESSORS = {"mxfp4a16": MXFP4PackedCompressor, "nvfp4a16": NVFP4PackedCompressor}


def awkward_weight(name: str, seed: int) -> torch.Tensor:
    """Weights `(16, 128)` with zeros of both signs, denormal, huge and outlying ones, and ties of codes and scales."""
    generator, has_global_scale = torch.Generator().manual_seed(seed), name == "nvfp4a16"
    weight = 0.02 * torch.randn(16, 128, generator=generator)
    weight[0], weight[1, :32], weight[2, ::3], weight[3, ::5] = 0, 0, 0.0, -0.0
    weight[4] *= 1e-37
    weight[6, 32:64] = 1e-44
    exponent = seed % 20 - 10 if has_global_scale else seed % 40 - 20
    weight[9:12] = torch.randint(-28, 29, (3, 128), generator=generator) / 4 * 2.0**exponent
    weight[12] = 0.875 * weight[12].sign()
    weight[13] = torch.linspace(-7, 7, 128)
    if has_global_scale:
        # In some matrices only, as all others are small next to them.
        weight[5] *= 1e-3
        weight[7] *= 1e28 if seed % 5 == 0 else 1.0
        weight[8, 7] = 50.0 if seed % 3 == 0 else 0.3
    else:
        weight[5] *= 1e-40
        weight[7] *= 1e30
        weight[8, 7] = 50.0
    return weight.bfloat16().float() if seed % 2 else weight


@pytest.mark.parametrize("name", [pytest.param("mxfp4a16", marks=pytest.mark.slow), "nvfp4a16"])
def test_codes_equal_compressed_tensors_on_1000_matrices(name):
    scheme, compressor = get_scheme(name), COMPRESSORS[name]
    oracle = preset_name_to_scheme(name.upper(), ["Linear"])
    for seed in range(1000):
        weight, given = awkward_weight(name, seed), {}
        low_bit = LowBitTensor.from_hp(weight, scheme, torch.bfloat16)
        tensors = low_bit.checkpoint_tensors()
        if (divisor := tensors.get("weight_global_scale")) is not None:
            given = {"weight_global_scale": divisor}
            assert divisor.dtype is torch.float32 and divisor.log2().frac().item() == 0
            assert 0.125 < divisor.item() / (2688 / weight.abs().max().item()) <= 0.25
        groups = weight.unflatten(-1, (-1, scheme.group_size))
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), oracle.weights, global_scale=divisor)
        expected = compressor.compress({"weight": weight, "weight_scale": scale} | given, oracle)
        assert tensors.keys() == expected.keys()
        for key, tensor in tensors.items():
            assert tensor.dtype is expected[key].dtype, key
            assert torch.equal(tensor.view(torch.uint8), expected[key].view(torch.uint8)), (seed, key)
        if seed < 50:
            dense = compressor.decompress(expected, oracle)["weight"]
            assert torch.equal(low_bit.dequantize(torch.bfloat16), dense.bfloat16())
            # Code times scale: bf16 loses nothing.
            assert torch.equal(low_bit.dequantize(torch.bfloat16).double(), low_bit.dequantize(torch.float64))
            rounded = LowBitTensor.from_hp(weight.bfloat16(), scheme, torch.bfloat16)
            assert torch.equal(
                rounded.qdata, LowBitTensor.from_hp(weight.bfloat16().float(), scheme, torch.bfloat16).qdata
            )


def test_numbers_beyond_the_largest_scale_are_clamped():
    low_bit = LowBitTensor.from_hp(torch.full((1, 32), 3e38), get_scheme("mxfp4a16"), torch.float32)
    assert low_bit.scale_values().item() == 2.0**125 and torch.isfinite(low_bit.dequantize()).all()


def test_a_given_divisor_is_kept_until_weights_outgrow_it():
    weight, scheme = awkward_weight("nvfp4a16", 1), get_scheme("nvfp4a16")
    divisor = LowBitTensor.from_hp(weight, scheme, torch.bfloat16).shared_scale
    grown = LowBitTensor.from_hp(4 * weight, scheme, torch.bfloat16, divisor)
    assert grown.shared_scale == divisor and grown.scale.float().max() <= 448
    with pytest.raises(ValueError, match="Weights have grown to .*four times the largest weight at the start"):
        LowBitTensor.from_hp(9 * weight, scheme, torch.bfloat16, divisor)
