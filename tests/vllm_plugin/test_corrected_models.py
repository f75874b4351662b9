"""Classes of models that are put right; the zoo has engines of them."""

import pytest
import torch
from torch import nn


pytest.importorskip("vllm")

from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn

import trl_qarl.vllm_plugin.corrected.olmo_hybrid  # noqa: F401


pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_convolution_of_olmo_is_loaded_whole_or_from_parts(is_whole):
    load = olmo_gdn_linear_attn._make_fused_conv1d_weight_loader([2, 2, 4], 1, 0)
    whole, param = torch.randn(8, 1, 4), nn.Parameter(torch.empty(8, 1, 4), requires_grad=False)
    if is_whole:
        load(param, whole)
    for number, part in enumerate(() if is_whole else whole.split([2, 2, 4])):
        part.shard_id = number
        load(param, part)
    assert torch.equal(param, whole)
