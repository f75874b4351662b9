"""What accelerate is about to shard; two processes train with it in distributed/sharded_trainers.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_qarl.sharding.accelerate import shard_when_prepared, sharded_by


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


def test_models_that_stay_whole_are_left_alone():
    model, seen = nn.Linear(2, 2), []
    accelerator = SimpleNamespace(prepare=lambda *models: models)
    shard_when_prepared(accelerator, seen.append)
    assert accelerator.prepare(model, None) == (model, None) and not seen and type(model.weight.data) is torch.Tensor
