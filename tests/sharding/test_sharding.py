"""Requests for slices, and DeepSpeed's settings; two processes train with it in distributed/zero.py."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from transformers import AutoModelForImageTextToText

from testing_utils.pictures import make_picture_config
from trl_qarl.sharding import sharded_by
from trl_qarl.sharding.fsdp2 import MasterShard, choose_units
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


def test_a_model_that_lacks_a_layer_of_its_class_is_sharded():
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(make_picture_config("gemma3"))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    choose_units(plugin, model)
    plugin.set_auto_wrap_policy(model)
    found = {cls.__name__ for cls in plugin.auto_wrap_policy.keywords["transformer_layer_cls"]}
    assert {"Gemma3DecoderLayer", "SiglipEncoderLayer"} <= found
