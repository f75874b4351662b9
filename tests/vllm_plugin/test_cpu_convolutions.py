"""Short convolutions of an engine on a CPU; LFM2 in the zoo has an engine."""

import pytest
import torch
from torch import nn


pytest.importorskip("vllm")

from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mamba import short_conv
from vllm.platforms import current_platform

from trl_qarl.vllm_plugin.cpu_convolutions import register_convolutions


pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM packs weights on CPUs")]


class Layer:
    def __init__(self):
        self.conv = nn.Module()
        self.conv.weight = nn.Parameter(torch.arange(192.0).view(64, 1, 3), requires_grad=False)

    def load(self) -> torch.Tensor:
        UnquantizedLinearMethod().process_weights_after_loading(self.conv)
        return self.conv.weight.flatten()


def test_the_weight_stays_in_the_order_of_the_checkpoint(monkeypatch):
    monkeypatch.setattr(short_conv, "ShortConv", Layer)
    monkeypatch.setattr(Layer, "__init__", Layer.__init__)
    # With these instructions vLLM packs it, and does not read it so.
    assert torch.equal(Layer().load(), torch.arange(192.0)) != torch.cpu._is_avx512_bf16_supported()
    register_convolutions()
    ours = Layer.__init__
    register_convolutions()
    assert Layer.__init__ is ours and torch.equal(Layer().load(), torch.arange(192.0))
