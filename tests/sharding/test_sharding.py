"""Conversions of shards, and the names of what shards; tests/distributed trains with both."""

from types import SimpleNamespace

import pytest
import torch

from trl_qarl.sharding import sharded_by
from trl_qarl.sharding.fsdp2 import MasterShard


def test_a_shard_of_masters_is_converted_like_a_tensor():
    shard = torch.ones(2, 4).as_subclass(MasterShard)
    assert shard.to("cpu") is shard and shard.to(torch.float32) is shard
    for converted in (shard.to(torch.bfloat16), shard.to(dtype=torch.bfloat16), shard.to("cpu", torch.bfloat16)):
        assert type(converted) is torch.Tensor and converted.dtype is torch.bfloat16


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
