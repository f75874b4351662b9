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
def test_a_checkpoint_with_activations_of_4_bits_is_not_served_without_them(monkeypatch):
    from vllm.model_executor.kernels.linear import init_mxfp4_linear_kernel
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic

    from trl_qarl.vllm_plugin import cpu_kernels, linear_kernels

    cpu_kernels.register_kernels()
    weights = get_scheme("mxfp4a16").weight_args(32)

    def kernel_for(input_activations):
        group = {"weights": weights, "input_activations": input_activations}
        hf_config = SimpleNamespace(quantization_config={"config_groups": {"group_0": group}})
        config = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config))
        monkeypatch.setattr(linear_kernels, "get_current_vllm_config_or_none", lambda: config)
        # What vLLM asks for, whatever the checkpoint has.
        return init_mxfp4_linear_kernel(kMxfp4Dynamic)

    assert type(kernel_for(None)) is linear_kernels.QaRLMxFp4Kernel
    with pytest.raises(ValueError, match="the checkpoint has activations of 4 bits"):
        kernel_for(weights | {"dynamic": True})
