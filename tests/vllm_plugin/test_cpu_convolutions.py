"""Convolutions of an engine on a CPU; hybrid families in the zoo have engines."""

import pytest
import torch
from torch import nn


pytest.importorskip("vllm")

from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform

from trl_qarl.vllm_plugin.cpu_convolutions import register_convolutions


pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM packs weights on CPUs")]


@pytest.mark.parametrize(
    ("dtype", "width", "is_marked", "is_packed"),
    [
        ("float32", 4, False, False),
        ("bfloat16", 3, False, False),
        ("bfloat16", 4, True, False),
        ("bfloat16", 4, False, True),
    ],
)
def test_weights_that_the_kernel_cannot_take_stay_as_loaded(monkeypatch, dtype, width, is_marked, is_packed):
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    register_convolutions()
    ours = utils.dispatch_cpu_unquantized_gemm
    register_convolutions()
    assert utils.dispatch_cpu_unquantized_gemm is ours
    layer = nn.Module()
    if is_marked:
        layer.is_read_as_loaded = True
    loaded = torch.randn(64, 1, width).to(getattr(torch, dtype))
    layer.weight = nn.Parameter(loaded.clone(), requires_grad=False)
    UnquantizedLinearMethod().process_weights_after_loading(layer)
    changed = layer.weight.shape != loaded.shape or not torch.equal(layer.weight, loaded)
    assert changed == (is_packed and torch.cpu._is_avx512_bf16_supported())
