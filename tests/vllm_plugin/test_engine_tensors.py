"""Tensors of an engine's model."""

import pytest
import torch
from torch import nn


pytest.importorskip("vllm")

from trl_qarl.vllm_plugin.engine_tensors import convolution_copies
from trl_qarl.vllm_plugin.weight_transfer import _in_order


pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_copy_of_a_convolution_has_the_loaded_weight(is_packed):
    model = nn.ModuleDict({"mixer": nn.Module()})
    mixer, weight = model["mixer"], torch.arange(12.0).view(4, 1, 3)
    mixer.conv1d = nn.Module()
    mixer.conv1d.weight = nn.Parameter(weight.flip(0) if is_packed else weight)
    mixer.register_buffer("conv_weights", torch.zeros(4, 3), persistent=False)
    if is_packed:
        mixer.conv1d._cpu_unpacked_conv_weight = weight.view(4, 3)
    [(name, buffer, found)] = convolution_copies(model)
    assert name == "mixer.conv_weights" and buffer is mixer.conv_weights
    assert torch.equal(found, weight.view(4, 3))


def test_shards_are_in_the_order_of_the_rows_that_they_fill():
    assert _in_order({"v": "v_proj", "q": "q_proj", "k": "k_proj"}) == ["q_proj", "k_proj", "v_proj"]
    assert _in_order({1: "up_proj", 0: "gate_proj"}) == ["gate_proj", "up_proj"]
    assert _in_order({None: "A_log"}) == ["A_log"]
