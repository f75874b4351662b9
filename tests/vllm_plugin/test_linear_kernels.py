"""Our linear kernels for CPUs: the engine's choice of them, and their bits."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_qarl.bitwise import cpu
from trl_qarl.quantization import gemm
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


pytest.importorskip("vllm")

from vllm.model_executor.kernels.linear import init_mxfp4_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types

from trl_qarl.vllm_plugin import linear_kernels
from trl_qarl.vllm_plugin.linear_kernels import QaRLInt8Kernel, QaRLMxFp4Kernel, QaRLNvFp4Kernel, QaRLWeightOnlyKernel


pytestmark = pytest.mark.vllm


@pytest.fixture
def engine_of(monkeypatch):
    """Makes vLLM build an engine of a checkpoint with such a group of layers, which gets no weights from a trainer."""

    def build(**group):
        hf_config = SimpleNamespace(quantization_config={"config_groups": {"group_0": group}})
        engine = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config), weight_transfer_config=None)
        monkeypatch.setattr(linear_kernels, "get_current_vllm_config_or_none", lambda: engine)

    return build


def test_exports_in_float32_are_served_by_any_engine():
    config = MPLinearLayerConfig((128, 64), (128, 64), scalar_types.uint4b8, torch.float32, 32, False)
    # vLLM's own kernel claims it and fails at the first request.
    assert QaRLWeightOnlyKernel.can_implement(config) == (True, None)
    for name, order in (("qweight", None), ("weight_packed", torch.arange(128))):
        layer = SimpleNamespace(weight_g_idx=order)
        with pytest.raises(ValueError, match=r"pack-quantized compressed-tensors .*--dtype bfloat16"):
            QaRLWeightOnlyKernel(config, name, "weight_scale").process_weights_after_loading(layer)


def test_int8_activations_never_use_vllms_kernel(engine_of):
    def make(weight_type, scheme):
        engine_of(weights=scheme.weight_args(128), input_activations=scheme.activation_args)
        config = MPLinearLayerConfig((128, 64), (128, 64), weight_type, torch.bfloat16, 128, False)
        return QaRLWeightOnlyKernel.can_implement(config)[0], config

    is_ours, config = make(scalar_types.uint4b8, get_scheme("w4a8-int8"))
    assert is_ours and make(scalar_types.uint4b8, get_scheme("w4a16"))[0] != torch.cpu._is_avx512_supported()
    layer = SimpleNamespace(_humming_input_quant_config={"num_bits": 8})
    _, other = make(scalar_types.uint8b128, get_scheme("w8a16"))
    with pytest.raises(ValueError, match="multiplies uint8b128 weights by INT8 activations"):
        QaRLWeightOnlyKernel(other, "weight_packed", "weight_scale").process_weights_after_loading(layer)
    kernel = QaRLWeightOnlyKernel(config, "weight_packed", "weight_scale")
    kernel.process_weights_after_loading(layer)
    assert kernel._scheme == get_scheme("w4a8-int8")


@pytest.mark.parametrize("has_vnni", [False, True])
def test_sums_that_overflow_without_vnni_are_ours(engine_of, monkeypatch, has_vnni):
    engine_of(weights=get_scheme("w8a8").weight_args(None), input_activations=get_scheme("w8a8").activation_args)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_vnni)
    assert QaRLInt8Kernel.can_implement(Int8ScaledMMLinearLayerConfig(False, True, True))[0] != has_vnni


def test_4_bit_activations_are_not_dropped_when_serving(engine_of):
    linear_kernels.register_kernels(PlatformEnum.CPU)
    weights = get_scheme("mxfp4a16").weight_args(32)

    def kernel_for(input_activations):
        engine_of(weights=weights, input_activations=input_activations)
        # What vLLM asks for, whatever the checkpoint has.
        return init_mxfp4_linear_kernel(kMxfp4Dynamic)

    assert type(kernel_for(None)) is QaRLMxFp4Kernel
    with pytest.raises(ValueError, match="4-bit activations"):
        kernel_for(weights | {"dynamic": True})


def make_engine_apply(name, low_bit, dtype, shape):
    """The product of an engine's layer that holds `low_bit`, on our kernel for CPUs."""
    layer = nn.Module()
    for key, tensor in low_bit.checkpoint_tensors().items():
        layer.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
    if name == "w8a8":
        kernel = object.__new__(QaRLInt8Kernel)
        kernel.config = Int8ScaledMMLinearLayerConfig(False, True, True)
        kernel.layer_param_names = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")
    elif name == "mxfp4a16":
        kernel = QaRLMxFp4Kernel(MxFp4LinearLayerConfig(kMxfp4Dynamic))
        # As vLLM has it before it asks the kernel.
        layer.weight = layer.weight_packed
    elif name == "nvfp4a16":
        kernel = QaRLNvFp4Kernel(NvFp4LinearLayerConfig())
        layer.weight, layer.weight_global_scale = layer.weight_packed, nn.Parameter(1 / layer.weight_global_scale)
    else:
        weight_type = scalar_types.uint8b128 if name == "w8a16" else scalar_types.uint4b8
        config = MPLinearLayerConfig(shape[::-1], shape[::-1], weight_type, dtype, -1, False)
        assert QaRLWeightOnlyKernel.can_implement(config)[0] or weight_type.size_bits == 4
        kernel = QaRLWeightOnlyKernel(config, "weight_packed", "weight_scale")
    if name == "w4a8-int8":
        layer._humming_input_quant_config = {"num_bits": 8}
    kernel.process_weights_after_loading(layer)
    return lambda x, bias: kernel.apply_weights(layer, x, bias)


@pytest.mark.parametrize("has_native_instructions", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["w4a16", "mxfp4a16", "nvfp4a16", "w8a16", "w8a8", "w4a8-int8"])
def test_the_engines_prefill_equals_its_decode(monkeypatch, name, dtype, has_native_instructions):
    """Bit for bit where a learner may repeat the engine, and where sums are of integers."""
    is_exact = name == "w8a8" or (dtype is torch.bfloat16 and cpu.reason_not_to_call() is None)
    monkeypatch.setattr(gemm, "_has_vnni", lambda: has_native_instructions)
    monkeypatch.setattr(gemm, "has_fast_bf16", lambda: has_native_instructions)
    if not has_native_instructions:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for shape in [(64, 128), (33, 96), (256, 2048)] + [(16, 100)] * (name in ("w8a16", "w8a8")):
        torch.manual_seed(0)
        low_bit = LowBitTensor.from_hp(torch.randn(shape), get_scheme(name), dtype)
        apply = make_engine_apply(name, low_bit, dtype, shape)
        x, bias = torch.randn(300, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
        # Decode first: what a layer keeps must serve both.
        decode = torch.cat([apply(row, bias) for row in x[:64].split(1)])
        for rows in (16, 17, 33, 64, 300):
            prefill = apply(x[:rows], bias)[:64]
            if is_exact:
                assert torch.equal(prefill, decode[:rows]), (shape, rows)
            else:
                expected = decode[:rows].float()
                assert (prefill.float() - expected).norm() < 32 * torch.finfo(dtype).eps * expected.norm()
        exact = x.double() @ low_bit.dequantize(torch.float64).t() + bias
        error = (apply(x, bias).double() - exact).norm() / exact.norm()
        assert error < (2e-2 if name in ("w8a8", "w4a8-int8") else 5e-3)


def test_embeddings_are_packed_at_their_first_product(monkeypatch):
    if cpu.reason_not_to_call() is not None:
        pytest.skip(cpu.reason_not_to_call())
    packed, pack = [], cpu.PackedLinear
    monkeypatch.setattr(cpu, "PackedLinear", lambda weight: packed.append(weight.data_ptr()) or pack(weight))
    layer = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        cpu.dispatch_row_invariant(pytest.fail, lambda: True)(layer, remove_weight=False)
        # A reload copies values into the tensor that the engine keeps.
        layer.weight.copy_(torch.randn(96, 64))
        assert not packed
        x = torch.randn(3, 64).bfloat16()
        outputs = [layer.cpu_linear(x, layer.weight, None) for _ in range(2)]
    assert packed == [layer.weight.data_ptr()] and torch.equal(*outputs)
    torch.testing.assert_close(outputs[0], x @ layer.weight.t(), rtol=2**-7, atol=2**-5)
