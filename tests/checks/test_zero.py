"""Settings for DeepSpeed; distributed/zero.py trains with it on two processes."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_qarl import QaRLConfig
from trl_qarl.checks.launch import check_launch


SLICES = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}


def launched(stage=2, **config):
    zero = stage if isinstance(stage, dict) else {"stage": stage}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, "fp16": {"enabled": False}} | config
    return SimpleNamespace(
        state=SimpleNamespace(
            fsdp_plugin=None,
            deepspeed_plugin=SimpleNamespace(deepspeed_config=config, zero_stage=zero["stage"]),
            dynamo_plugin=SimpleNamespace(backend="NO"),
        ),
        device=torch.device("cpu"),
        num_processes=2,
        parallelism_config=None,
    )


def config(**options):
    return QaRLConfig("out", **({"use_cpu": True, "report_to": [], "optim": "adamw_torch_fused"} | options))


@pytest.mark.parametrize("stage", [1, 2, SLICES])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_masters_stay_in_float32(stage, optim):
    accelerator = launched(stage)
    check_launch(accelerator, config(optim=optim), nn.Linear(2, 2))
    # accelerate's doing, for `mixed_precision: bf16`.
    assert accelerator.state.deepspeed_plugin.deepspeed_config["bf16"] == {"enabled": False}


def test_what_zero_cannot_serve_is_refused_by_name(monkeypatch, tmp_path):
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme"}}
    pushes = {"push_to_hub": True, "hub_strategy": "every_save"}
    for state, options, message in (
        ({"stage": 0}, {}, "zero_stage=0 shards nothing. Use 1, 2 or 3"),
        ({"stage": 3}, {}, "zero3_save_16bit_model=false with zero_stage=3: .* Use true"),
        ({"stage": SLICES | {"zero_quantized_weights": True}}, {}, "zero_quantized_weights=true .* rounded to 8 bits"),
        ({"stage": SLICES}, {"precisions": [4, 3]}, r"precisions=\[4, 3\] with zero_stage=3: it has not been tried"),
        ({"stage": SLICES}, pushes, "hub_strategy='every_save' with zero_stage=3 .* Use hub_strategy='end'"),
        ({"zero_optimization": zero}, {}, "offload_optimizer_device='nvme' with DeepSpeed: .* Use none or cpu"),
        ({"fp16": {"enabled": True}}, {}, r"fp16.enabled=true .* rounds the model's weights to 16 bits"),
        ({"torch_autocast": {"enabled": True}}, {}, "torch_autocast.enabled=true"),
        ({"optimizer": {}}, {}, "'optimizer' in DeepSpeed's configuration: `optim` chooses it"),
        ({"scheduler": {}}, {}, "'scheduler' in DeepSpeed's configuration"),
        ({}, {"optim": "muon"}, "optim='muon' with DeepSpeed: .* Use 'adamw_torch_fused'"),
        ({}, {"optim": "adafactor"}, "optim='adafactor' with DeepSpeed"),
        ({"stage": SLICES}, {"numerics": "engine"}, "numerics='engine' with zero_stage=3: .* Use numerics='fast'"),
        ({"stage": SLICES}, {"sync_ref_model": True}, "sync_ref_model=True with zero_stage=3"),
    ):
        args = config()
        vars(args).update(options)
        with pytest.raises(ValueError, match=message):
            check_launch(launched(**state), args, nn.Linear(2, 2))
    file = tmp_path / "zero.json"
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    for given in ("auto", False):
        file.write_text(json.dumps({"bf16": {"enabled": given}}))
        check_launch(launched(), config(), nn.Linear(2, 2))
    file.write_text(json.dumps({"bf16": {"enabled": True}}))
    with pytest.raises(ValueError, match="enabled=true"):
        check_launch(launched(), config(), nn.Linear(2, 2))


def test_adapters_are_refused_but_within_whole_weights():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), peft.LoraConfig(target_modules=["0"]))
    with pytest.raises(ValueError, match="lora_mode='adapter'"):
        check_launch(launched(), config(), model)
    with pytest.raises(ValueError, match="zero_stage=3"):
        check_launch(launched(SLICES), config(lora_mode="merged"), model)
    accelerator = launched()
    check_launch(accelerator, config(lora_mode="merged"), model)
    # Else accelerate puts another optimizer into the place of `optim`, where its state is offloaded.
    assert accelerator.state.deepspeed_plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] is False
