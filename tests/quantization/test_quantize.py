import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams

from reference.signed_scales_naive import naive_signed
from testing_utils.layers import bits
from trl_qarl.quantization.quantize import dequantize_activation, quantize_activation
from trl_qarl.quantization.schemes import SCHEMES, get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


# The arithmetic of w4a8's scales is not compressed-tensors' but what the engine makes of them.
QUANTIZED = [name for name, scheme in SCHEMES.items() if scheme.is_quantized and not scheme.has_fp8_scales]
# FP4's are compared in tests/quantization/formats.
FP4 = [name for name in QUANTIZED if SCHEMES[name].grid.name == "e2m1"]
# Of signed scales it has no rule.
OBSERVED = [name for name in QUANTIZED if name not in FP4 and not SCHEMES[name].grid.has_signed_scales]
SIGNED = [name for name in QUANTIZED if SCHEMES[name].grid.has_signed_scales]
DTYPES = [(torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]


def awkward_weight(seed, dtype, shape=(48, 192)):
    """Random weights with an all-zero row and group, denormal and huge rows, exact halves, and signed zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 0.02
    weight[0] = 0
    weight[1] *= 1e-37
    weight[2] *= 1e-40
    weight[3, :64] = 1e-44
    weight[4, 64:128] = 0
    weight[5] *= 1e30
    weight[6] = torch.linspace(-7.5, 7.5, shape[1])
    weight[7, ::2] = -0.0
    return weight.to(dtype)


def grid_args(scheme, group_size, **arguments):
    """compressed-tensors' arguments of the grid itself, whatever it is stored in."""
    described = scheme.weight_args(group_size) | {"num_bits": scheme.grid.num_bits}
    return QuantizationArgs(**described, **arguments)


def oracle(weight, scheme, scale_dtype):
    """compressed-tensors' own scale and codes."""
    group_size = scheme.group_size_for(weight.shape[1])
    if scheme.scale_dtype is not None:
        scale_dtype = getattr(torch, scheme.scale_dtype)
        weight = weight.to(scale_dtype)
    args = grid_args(scheme, group_size, scale_dtype=scale_dtype)
    groups = weight.view(weight.shape[0], -1, group_size or weight.shape[1])
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    code_dtype = torch.int8 if scheme.grid.type == "int" else torch.float8_e4m3fn
    return scale, quantize(weight, scale, None, args, dtype=code_dtype)


@pytest.mark.parametrize(("weight_dtype", "scale_dtype"), DTYPES)
@pytest.mark.parametrize("name", OBSERVED)
def test_scales_and_codes_equal_compressed_tensors_bit_for_bit(name, weight_dtype, scale_dtype):
    for seed in range(50):
        scheme = get_scheme(name, (None, 32, 64)[seed % 3] if get_scheme(name).group_size else None)
        weight = awkward_weight(seed, weight_dtype)
        low_bit = LowBitTensor.from_hp(weight, scheme, scale_dtype)
        scale, codes = oracle(weight, scheme, scale_dtype)
        assert torch.equal(low_bit.scale.double(), scale.double())
        tensors = low_bit.checkpoint_tensors()
        if scheme.container.checkpoint_format == "pack-quantized":
            assert torch.equal(tensors["weight_packed"], pack_to_int32(codes, scheme.container.num_bits))
            assert tensors["weight_shape"].tolist() == list(weight.shape)
        else:
            assert torch.equal(tensors["weight"].view(torch.uint8), codes.view(torch.uint8))
        assert tensors["weight_scale"].data_ptr() == low_bit.scale.data_ptr()


@pytest.mark.parametrize("name", OBSERVED + SIGNED)
def test_dequantized_weight_equals_compressed_tensors(name):
    scheme = get_scheme(name)
    weight = awkward_weight(1, torch.float32)
    low_bit = LowBitTensor.from_hp(weight, scheme, torch.float32)
    codes = low_bit.qdata
    if scheme.container.num_bits == 4:
        codes = unpack_from_int32(codes, 4, weight.shape)
    args = grid_args(scheme, scheme.group_size_for(weight.shape[1]))
    expected = dequantize(codes, low_bit.scale, args=args)
    assert torch.equal(low_bit.dequantize(torch.float32), expected.float())
    assert torch.equal(low_bit.dequantize(torch.bfloat16), expected.float().bfloat16())


def weight_with_ties(seed: int, shape=(16, 256)) -> torch.Tensor:
    """[`awkward_weight`] with rows whose largest magnitude occurs with both signs, in both orders, or everywhere."""
    weight = awkward_weight(seed, torch.float32, shape)
    first, second = torch.randperm(32, generator=torch.Generator().manual_seed(seed))[:2].tolist()
    for row, sign in ((8, 1), (9, -1)):
        weight[row, first::32], weight[row, second::32] = sign * 0.3, -sign * 0.3
    weight[10], weight[11], weight[12] = 0.3, -0.3, 0.0
    weight[12, first::32] = 1e-39 * (seed + 1)
    return weight


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 1000), marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("name", SIGNED)
def test_signed_scales_and_codes_equal_the_reference_bit_for_bit(name, seeds):
    has_both_signs, num_clamped = torch.zeros(2, dtype=torch.bool), 0
    for seed in seeds:
        scale_dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
        scheme = get_scheme(name, (32, 64, 128)[seed // 3 % 3])
        for weight in (weight_with_ties(seed), weight_with_ties(seed).bfloat16()):
            # A bf16 master counts as its float32 copy, so no bits of the quotients are lost.
            dtype_name = str(scale_dtype).removeprefix("torch.")
            scale, codes, quotients = naive_signed(
                weight.float().numpy(), scheme.group_size, scheme.grid.num_bits, dtype_name
            )
            low_bit = LowBitTensor.from_hp(weight, scheme, scale_dtype)
            assert low_bit.scale.dtype is scale_dtype
            assert np.array_equal(low_bit.scale.float().numpy(), scale)
            assert np.array_equal(unpack_from_int32(low_bit.qdata, 4, weight.shape).numpy(), codes)
            smallest, largest = scheme.grid.quant_range
            assert (abs(np.clip(quotients, smallest, largest) - codes) <= 0.5 + 2**-20).all()
            num_clamped += (quotients > largest + 0.5).sum()
            if scale_dtype is not torch.float16:
                # 1e30 is beyond float16.
                groups = scale.astype(np.float64).repeat(scheme.group_size, 1)
                assert np.array_equal(low_bit.dequantize(torch.float64).numpy(), groups * codes)
            has_both_signs |= torch.stack([(low_bit.scale < 0).any(), (low_bit.scale > 0).any()])
    assert has_both_signs.all() and num_clamped > 0


def engines_weight(codes, scale):
    """Weight that vLLM's CUTLASS kernel multiplies by, from the codes of `weight_packed` and bf16 `weight_scale`;
    naive.

    https://github.com/vllm-project/vllm: `convert_bf16_scales_to_fp8`, `csrc/quantization/cutlass_w4a8`.
    """
    rows = []
    for row_codes, row_scales in zip(codes.tolist(), scale.float(), strict=True):
        channel = max((row_scales.max() / 448).item(), 1 / (448 * 512))
        row = []
        for group, group_scale in enumerate(row_scales):
            eighth = ((group_scale / channel).to(torch.float8_e4m3fn).float() / 8).to(torch.float8_e4m3fn).double()
            table = {code: (eighth * code).to(torch.float8_e4m3fn).double() for code in range(-8, 8)}
            row += [(table[code] * 8 * channel).item() for code in row_codes[128 * group : 128 * (group + 1)]]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


# 1e-4: below 0.0146 vLLM bounds the scale of a channel from below.
@pytest.mark.parametrize("size", [1.0, 0.03, 1e-4])
def test_w4a8_multiplies_by_the_engines_weight(size):
    scheme = get_scheme("w4a8")
    torch.manual_seed(0)
    weight = torch.randn(24, 512) * size * torch.rand(24, 4).repeat_interleave(128, 1)
    weight[0], weight[1, :128], weight[2, 128:] = 0, 0, 0
    low_bit = LowBitTensor.from_hp(weight, scheme, torch.float32)
    assert low_bit.scale.dtype is torch.bfloat16 and low_bit.scale.shape == (24, 4)
    product = low_bit.gemm_weight()
    assert product.qdata.dtype is torch.float8_e4m3fn and product.scale.shape == (24, 1)
    codes = unpack_from_int32(low_bit.qdata, 4, weight.shape)
    ours = product.dequantize(torch.float64)
    torch.testing.assert_close(ours, engines_weight(codes, low_bit.scale), rtol=1e-6, atol=0)
    assert (ours[0] == 0).all() and (ours[1, :128] == 0).all()


def test_w4a8_scales_survive_the_engines_conversion():
    """Scale by scale the product's weight is the checkpoint's, up to E4M3's rounding of a scale times a code."""
    scheme = get_scheme("w4a8")
    for seed in range(100):
        torch.manual_seed(seed)
        weight = torch.randn(16, 512) * (torch.rand(16, 1) + 0.1) * torch.logspace(-2, 0, 4).repeat_interleave(128)
        low_bit = LowBitTensor.from_hp(weight, scheme, torch.bfloat16)
        powers = LowBitTensor(
            torch.full_like(low_bit.qdata, 0x44444444), low_bit.scale, scheme, weight.dtype
        )  # code -4 everywhere
        exact = powers.dequantize(torch.float64)
        assert torch.equal(powers.gemm_weight().dequantize(torch.float64), exact)


def vllms_fp8(x):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    with set_current_vllm_config(VllmConfig()):
        return QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN).forward_native(x)


def vllms_int8(x):
    ops = pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._C, "dynamic_scaled_int8_quant"):
        pytest.skip("vLLM is not built for CPUs here")
    return ops.onednn_scaled_int8_quant(x)[:2]


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("name", "vllms"), [("fp8", vllms_fp8), ("w8a8", vllms_int8)])
def test_activations_equal_vllms_on_a_million_values(name, vllms, dtype):
    torch.manual_seed(0)
    x = (torch.randn(2048, 512) * torch.logspace(-4, 4, 2048)[torch.randperm(2048)].unsqueeze(1)).to(dtype)
    expected, expected_scale = vllms(x)
    codes, scale = quantize_activation(x, get_scheme(name))
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("size", [0, 1e-45, 1e-40, 1e-37, 1e-35])
@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_tiny_activations_stay_finite_and_small(name, size):
    codes, scale = quantize_activation(torch.randn(4, 64) * size, get_scheme(name))
    assert (codes.double() * scale).abs().max() <= 6 * size + 1e-44
    assert torch.isfinite(scale).all() and (scale >= 1 / (448 * 512) * (name == "fp8")).all() and (scale > 0).all()


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.is_quantized])
def test_strides_of_a_master_do_not_change_codes(name):
    scheme = get_scheme(name)
    storage = torch.randn(300, 300)
    for weight in (
        storage[:128, :48].t(),
        storage[:48, 8:136],
        storage[:96:2, :256:2],
        storage[3:4, :128].expand(48, -1),
    ):
        assert not weight.is_contiguous()
        low_bit = LowBitTensor.from_hp(weight, scheme, torch.bfloat16)
        expected = LowBitTensor.from_hp(weight.clone(memory_format=torch.contiguous_format), scheme, torch.bfloat16)
        ours, theirs = low_bit.checkpoint_tensors(), expected.checkpoint_tensors()
        assert all(tensor.is_contiguous() for tensor in ours.values()) and bits(ours.items()) == bits(theirs.items())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.is_quantized])
def test_a_nan_in_a_master_is_seen_in_the_low_bit_weight(name, value):
    weight = torch.ones(8, 256)
    weight[3, 5] = value
    # Beyond NVFP4's global scale.
    is_refused = name == "nvfp4a16" and value == math.inf
    with pytest.raises(ValueError, match="grown to inf") if is_refused else nullcontext():
        assert not LowBitTensor.from_hp(weight, get_scheme(name), torch.bfloat16).dequantize()[3].isfinite().all()


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
def test_codes_of_a_transposed_input_are_row_major(scheme):
    """ATen's product of FP8 codes on a GPU takes no others."""
    x = torch.randn(24, 16).t()
    codes, scale = quantize_activation(x, get_scheme(scheme))
    again, scale_again = quantize_activation(x.contiguous(), get_scheme(scheme))
    assert codes.is_contiguous() and torch.equal(codes.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(scale, scale_again)


@pytest.mark.parametrize("name", QUANTIZED)
def test_block_size_does_not_change_quantized_rows(monkeypatch, name):
    torch.manual_seed(0)
    weight = torch.randn(40, 256)
    weight[7] = 0
    whole = LowBitTensor.from_hp(weight, get_scheme(name), torch.bfloat16)
    for size in (1, 3 * 256, 16 * 256):
        monkeypatch.setattr("trl_qarl.quantization.quantize.BLOCK_OF_WEIGHTS", {"cpu": size})
        # The first forward of a step is under autocast, which does not take FP8 codes.
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(LowBitTensor.from_hp(weight, get_scheme(name), torch.bfloat16), whole)


@pytest.mark.parametrize(("name", "largest"), [("w8a8", 127), ("fp8", 448)])
def test_activations_follow_the_engines_rule(name, largest):
    x = torch.randn(4, 64)
    codes, scale = quantize_activation(x, get_scheme(name))
    torch.testing.assert_close(scale, x.abs().amax(1, keepdim=True) / largest)
    assert codes.double().abs().amax(1).tolist() == [largest] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_code_of_an_fp8_activation_is_dequantized_exactly(dtype):
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()].expand(3, -1).contiguous()
    scale = torch.tensor([[1 / (448 * 512)], [0.37], [65504 / 448]])
    x = dequantize_activation(codes, scale, dtype)
    assert x.dtype is dtype and torch.equal(x, (codes.to(torch.promote_types(dtype, scale.dtype)) * scale).to(dtype))


def test_nan_in_an_fp8_activation_is_not_a_number_afterwards():
    x = torch.randn(3, 64)
    x[1, 5], x[2, 7] = math.nan, math.inf
    x = dequantize_activation(*quantize_activation(x, get_scheme("fp8")), torch.bfloat16)
    assert x[0].isfinite().all() and x[1].isnan().all() and not x[2].isfinite().any()
