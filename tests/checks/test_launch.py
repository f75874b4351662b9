from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from trl_qarl import QaRLConfig
from trl_qarl.checks.launch import check_agreement, check_launch


def launched(plugin=None, **state):
    state = {"deepspeed_plugin": None, "dynamo_plugin": SimpleNamespace(backend="NO"), **state}
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin, **state),
        device=torch.device("cpu"),
        num_processes=2,
        parallelism_config=None,
    )


def fsdp(**options):
    return FullyShardedDataParallelPlugin(
        **({"fsdp_version": 2, "reshard_after_forward": True, "cpu_ram_efficient_loading": True} | options)
    )


def config(**options):
    return QaRLConfig("out", use_cpu=True, report_to=[], **options)


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_sharding_that_accelerate_leaves_out_is_refused(monkeypatch, name):
    # With `use_cpu: true` it trains with whole masters and says nothing.
    args = config()
    check_launch(launched(), args, nn.Linear(2, 2))
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(ValueError, match=f"launched with {name}, but it shards on GPUs alone"):
        check_launch(launched(), args, nn.Linear(2, 2))


def test_what_cannot_shard_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="Use `fsdp_version: 2`"):
        check_launch(
            launched(fsdp(fsdp_version=1, reshard_after_forward="FULL_SHARD", cpu_ram_efficient_loading=False)),
            config(),
            nn.Linear(2, 2),
        )
    plugin = fsdp()
    plugin.reshard_after_forward = 2
    with pytest.raises(ValueError, match="fsdp_reshard_after_forward=2: .* Use true or false"):
        check_launch(launched(plugin), config(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="SIZE_BASED_WRAP"):
        check_launch(launched(fsdp(auto_wrap_policy="size_based_wrap")), config(), nn.Linear(2, 2))
    for options, message in (
        ({"optim": "adafactor"}, "optim='adafactor' with FSDP2"),
        ({"optim": "galore_adamw"}, "optim='galore_adamw' with FSDP2"),
        ({"beta": 0.1}, "beta=0.1 with fsdp_cpu_ram_efficient_loading=true"),
        ({"sync_ref_model": True}, "sync_ref_model=True with FSDP2"),
        ({"quantize_learner": False}, "quantize_learner=False with FSDP2"),
        ({"push_to_hub": True}, "hub_strategy='every_save' with FSDP2"),
    ):
        args = config()
        vars(args).update(options)
        with pytest.raises(ValueError, match=message):
            check_launch(launched(fsdp()), args, nn.Linear(2, 2))
    for name in ("muon", "adamw_torch", "adamw_torch_fused", "sgd"):
        check_launch(launched(fsdp()), config(optim=name), nn.Linear(2, 2))


def test_bitsandbytes_is_refused_with_its_replacement():
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match="optim='adamw_8bit' with FSDP2: .* Use 'adamw_torch_8bit'"):
        check_launch(launched(fsdp()), config(optim="adamw_8bit"), nn.Linear(2, 2))


def test_gradients_are_added_up_in_float32():
    plugin = fsdp()
    plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    check_launch(launched(plugin), config(), nn.Linear(2, 2))
    expected = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    assert plugin.mixed_precision_policy == expected


def test_one_process_agrees_with_itself():
    check_agreement(SimpleNamespace(num_processes=1), {"scheme": "w4a16"})
