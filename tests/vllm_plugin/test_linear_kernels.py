from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_qarl.quantization.schemes import get_scheme


@pytest.mark.vllm
def test_any_engine_serves_an_export_in_float32_and_no_other_layout():
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    from trl_qarl.vllm_plugin.linear_kernels import QaRLWeightOnlyKernel

    config = MPLinearLayerConfig((128, 64), (128, 64), scalar_types.uint4b8, torch.float32, 32, False)
    # vLLM's own kernel claims it and fails at the first request.
    assert QaRLWeightOnlyKernel.can_implement(config) == (True, None)
    for name, layer in (("qweight", nn.Module()), ("weight_packed", nn.Module())):
        if name == "weight_packed":
            layer.weight_g_idx = torch.arange(128)
        with pytest.raises(ValueError, match=r"pack-quantized compressed-tensors .*--dtype bfloat16"):
            QaRLWeightOnlyKernel(config, name, "weight_scale").process_weights_after_loading(layer)


@pytest.mark.vllm
def test_int8_activations_are_never_left_to_vllms_kernel_which_has_none(monkeypatch):
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    from trl_qarl.vllm_plugin import linear_kernels

    def make(weight_type, scheme):
        group = {"weights": scheme.weight_args(128), "input_activations": scheme.activation_args}
        hf_config = SimpleNamespace(quantization_config={"config_groups": {"group_0": group}})
        engine = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config), weight_transfer_config=None)
        monkeypatch.setattr(linear_kernels, "get_current_vllm_config_or_none", lambda: engine)
        config = MPLinearLayerConfig((128, 64), (128, 64), weight_type, torch.bfloat16, 128, False)
        return linear_kernels.QaRLWeightOnlyKernel.can_implement(config)[0], config

    is_ours, config = make(scalar_types.uint4b8, get_scheme("w4a8-int8"))
    assert is_ours and make(scalar_types.uint4b8, get_scheme("w4a16"))[0] != torch.cpu._is_avx512_supported()
    layer = nn.Module()
    layer._humming_input_quant_config = {"num_bits": 8}
    _, other = make(scalar_types.uint8b128, get_scheme("w8a16"))
    with pytest.raises(ValueError, match="multiplies uint8b128 weights by INT8 activations"):
        linear_kernels.QaRLWeightOnlyKernel(other, "weight_packed", "weight_scale").process_weights_after_loading(
            layer
        )
    kernel = linear_kernels.QaRLWeightOnlyKernel(config, "weight_packed", "weight_scale")
    kernel.process_weights_after_loading(layer)
    assert kernel._scheme == get_scheme("w4a8-int8")


@pytest.mark.vllm
def test_a_checkpoint_with_activations_of_4_bits_is_not_served_without_them(monkeypatch):
    from vllm.model_executor.kernels.linear import init_mxfp4_linear_kernel
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic
    from vllm.platforms.interface import PlatformEnum

    from trl_qarl.vllm_plugin import linear_kernels

    linear_kernels.register_kernels(PlatformEnum.CPU)
    weights = get_scheme("mxfp4a16").weight_args(32)

    def kernel_for(input_activations):
        group = {"weights": weights, "input_activations": input_activations}
        hf_config = SimpleNamespace(quantization_config={"config_groups": {"group_0": group}})
        config = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config))
        monkeypatch.setattr(linear_kernels, "get_current_vllm_config_or_none", lambda: config)
        # What vLLM asks for, whatever the checkpoint has.
        return init_mxfp4_linear_kernel(kMxfp4Dynamic)

    assert type(kernel_for(None)) is linear_kernels.QaRLMxFp4Kernel
    with pytest.raises(ValueError, match="4-bit activations"):
        kernel_for(weights | {"dynamic": True})
