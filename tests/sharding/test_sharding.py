"""Requests for slices, and DeepSpeed's settings; two processes train with it in distributed/zero.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_qarl.sharding import sharded_by
from trl_qarl.sharding.fsdp2 import MasterShard
from trl_qarl.sharding.zero3 import compute_in_bfloat16


def test_a_shard_of_masters_is_converted_like_a_tensor():
    shard = torch.ones(2, 4).as_subclass(MasterShard)
    assert shard.to("cpu") is shard and shard.to(torch.float32) is shard
    for converted in (shard.to(torch.bfloat16), shard.to(dtype=torch.bfloat16), shard.to("cpu", torch.bfloat16)):
        assert type(converted) is torch.Tensor and converted.dtype is torch.bfloat16


def test_the_forward_computes_in_bfloat16_and_returns_float32():
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    compute_in_bfloat16(model)
    assert expected.dtype is torch.bfloat16 and model.weight.dtype is torch.float32
    assert model(x).dtype is torch.float32 and torch.equal(model(x), expected.float())


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, None),
        ({"fsdp_plugin": object()}, "FSDP2"),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, "ZeRO-3"),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=2)}, "DeepSpeed"),
    ],
)
def test_who_shards_is_said_by_name(state, expected):
    assert sharded_by(SimpleNamespace(state=SimpleNamespace(**state))) == expected
