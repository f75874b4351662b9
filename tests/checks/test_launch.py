"""Launches with FSDP2 and DeepSpeed that are refused, and what is set for them; tests/distributed trains with both."""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from trl_qarl import QaRLConfig
from trl_qarl.checks import launch
from trl_qarl.checks.launch import check_launch, check_resumed_launch


@pytest.fixture(autouse=True)
def environment_of_before(monkeypatch):
    # accelerate's plugin writes this variable.
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")


def launched(plugin=None, deepspeed_plugin=None, parallelism_config=None):
    dynamo_plugin = SimpleNamespace(backend="NO")
    state = SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=deepspeed_plugin, dynamo_plugin=dynamo_plugin)
    device = torch.device("cpu")
    return SimpleNamespace(state=state, device=device, num_processes=2, parallelism_config=parallelism_config)


def fsdp(**options):
    return FullyShardedDataParallelPlugin(
        **({"fsdp_version": 2, "reshard_after_forward": True, "cpu_ram_efficient_loading": True} | options)
    )


def config(**options):
    return QaRLConfig("out", **({"use_cpu": True, "report_to": [], "optim": "adamw_torch_fused"} | options))


def refused(accelerator, message, model=None, **options):
    """Expect an error of a launch with options that the configuration takes, or would refuse itself."""
    args = config()
    vars(args).update(options)
    with pytest.raises(ValueError, match=message):
        check_launch(accelerator, args, model or nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_sharding_that_accelerate_leaves_out_is_refused(monkeypatch, name):
    # With `use_cpu: true` it trains with whole masters and says nothing.
    args = config()
    check_launch(launched(), args, nn.Linear(2, 2))
    # A configuration that is made under this variable asks for DeepSpeed.
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(ValueError, match=f"launched with {name}"):
        check_launch(launched(), args, nn.Linear(2, 2))


def test_what_cannot_shard_is_refused_by_name():
    plugin = fsdp(fsdp_version=1, reshard_after_forward="FULL_SHARD", cpu_ram_efficient_loading=False)
    refused(launched(plugin), "Use `fsdp_version: 2`")
    refused(launched(fsdp(auto_wrap_policy="size_based_wrap")), "SIZE_BASED_WRAP")
    for options, message in (
        ({"optim": "adafactor"}, "optim='adafactor' with FSDP2"),
        ({"optim": "galore_adamw"}, "optim='galore_adamw' with FSDP2"),
        ({"sync_ref_model": True}, "sync_ref_model=True with FSDP2"),
        ({"save_only_model": True}, "save_only_model=True with fsdp_state_dict_type: SHARDED_STATE_DICT"),
        ({"quantize_learner": False}, "quantize_learner=False with FSDP2"),
    ):
        refused(launched(fsdp()), message, **options)
    for name in ("muon", "muon_8bit", "adamw_torch", "adamw_torch_fused", "sgd"):
        check_launch(launched(fsdp()), config(optim=name), nn.Linear(2, 2))


def test_replicas_of_shards_split_no_row_and_are_allowed(monkeypatch):
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    check_launch(launched(fsdp(), parallelism_config=sizes), config(), nn.Linear(2, 2))
    refused(launched(parallelism_config=sizes), "`parallelism_config` and without FSDP2")
    sizes.cp_size = sizes.sp_size = 2
    said = "launched with cp_size=2, sp_size=2, which splits matrices or sequences"
    refused(launched(fsdp(), parallelism_config=sizes), said)
    # As `accelerate launch` says it, before there is an accelerator.
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert launch.Launch.of_arguments(config()).parallelism.tp_size == 2


def test_an_optimizer_that_cannot_step_on_the_host_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "_kind_of_optimizer", lambda args: "apex")
    refused(launched(fsdp(cpu_offload=True)), "'adamw_torch_fused' with fsdp_offload_params: true")
    check_launch(launched(fsdp()), config(), nn.Linear(2, 2))


def test_whole_gradients_on_the_gpu_are_warned_of(caplog):
    for options, is_warned in (({}, False), ({"gradient_accumulation_steps": 2}, True)):
        check_launch(launched(fsdp(cpu_offload=True)), config(**options), nn.Linear(2, 2))
        assert ("sync_each_batch" in caplog.text) == is_warned


ZERO_2 = SimpleNamespace(zero_stage=2, deepspeed_config={"zero_optimization": {"stage": 2}})


@pytest.mark.parametrize("state", [{}, {"deepspeed_plugin": ZERO_2}], ids=["ddp", "deepspeed"])
def test_rounded_gradients_need_fsdp2_where_a_launcher_is(monkeypatch, state):
    args = config(optim="muon_8bit", gradient_dtype="bfloat16")
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_launch(launched(fsdp()), args, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="gradient_dtype='bfloat16' with DDP or DeepSpeed"):
        check_launch(launched(**state), args, nn.Linear(2, 2))


def test_bitsandbytes_is_refused_with_its_replacement():
    pytest.importorskip("bitsandbytes")
    refused(launched(fsdp()), "optim='adamw_8bit'", optim="adamw_8bit")


def test_gradients_are_added_up_in_float32():
    plugin = fsdp()
    plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    check_launch(launched(plugin), config(), nn.Linear(2, 2))
    expected = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    assert plugin.mixed_precision_policy == expected


PARTS = {
    "ZeRO-1 or 2": ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    "ZeRO-3": ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
}
WRITTEN = {
    "one process or DDP": ["optimizer.pt", "model.safetensors"],
    "FSDP2 and FULL_STATE_DICT": ["optimizer.bin", "model.safetensors.index.json"],
    "FSDP2 and SHARDED_STATE_DICT": ["optimizer_0/.metadata"],
    **{name: [*(f"global_step2/{part}" for part in parts), "model.safetensors"] for name, parts in PARTS.items()},
}


def test_a_checkpoint_of_another_launch_is_refused(tmp_path, monkeypatch):
    # transformers resumes some of them, and leaves out the optimizer's state without a word.
    monkeypatch.setattr("trl_qarl.checks.launch.gather_object", list)
    launches = {
        "one process or DDP": launched(),
        "ZeRO-1 or 2": launched(deepspeed_plugin=SimpleNamespace(zero_stage=2)),
        "ZeRO-3": launched(deepspeed_plugin=SimpleNamespace(zero_stage=3)),
    }
    for kind in ("FULL", "SHARDED"):
        launches[f"FSDP2 and {kind}_STATE_DICT"] = launched(fsdp(state_dict_type=f"{kind}_STATE_DICT"))
    for written, files in WRITTEN.items():
        folder = tmp_path / written
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).touch()
        for name, accelerator in launches.items():
            accelerator.num_processes = 1
            if name == written:
                check_resumed_launch(accelerator, folder)
                continue
            with pytest.raises(ValueError, match=f"written with {written}, and this run with {name}") as said:
                check_resumed_launch(accelerator, folder)
            assert str(said.value).endswith("passing it as the model.") == ("SHARDED" not in written)
    launches["ZeRO-3"].num_processes = 3
    with pytest.raises(ValueError, match="this run has 3. Launch with `--num_processes 1`"):
        check_resumed_launch(launches["ZeRO-3"], tmp_path / "ZeRO-3")
    # `save_only_model=True`.
    (tmp_path / "one process or DDP" / "optimizer.pt").unlink()
    check_resumed_launch(launches["ZeRO-3"], tmp_path / "one process or DDP")


SLICES = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}


def launched_zero(stage=2, **config):
    zero = stage if isinstance(stage, dict) else {"stage": stage}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, "fp16": {"enabled": False}} | config
    return launched(deepspeed_plugin=SimpleNamespace(deepspeed_config=config, zero_stage=zero["stage"]))


def test_masters_stay_in_float32():
    for stage, optim in ((1, "adamw_torch"), (2, "adamw_torch_fused"), (SLICES, "adamw_torch_fused")):
        accelerator = launched_zero(stage)
        check_launch(accelerator, config(optim=optim), nn.Linear(2, 2))
        # accelerate's doing, for `mixed_precision: bf16`.
        assert accelerator.state.deepspeed_plugin.deepspeed_config["bf16"] == {"enabled": False}


def test_what_zero_cannot_serve_is_refused_by_name(monkeypatch, tmp_path):
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme"}}
    for state, options, message in (
        ({"stage": 0}, {}, "zero_stage=0 shards nothing. Use 1, 2 or 3"),
        ({"stage": 3}, {}, "zero3_save_16bit_model=false with zero_stage=3: .* Use true"),
        ({"stage": SLICES | {"zero_quantized_weights": True}}, {}, "zero_quantized_weights=true .* rounded to 8 bits"),
        ({"stage": SLICES}, {"precisions": [4, 3]}, r"precisions=\[4, 3\] with zero_stage=3: it is untested"),
        ({"zero_optimization": zero}, {}, "offload_optimizer_device='nvme' with DeepSpeed: .* Use none or cpu"),
        ({"fp16": {"enabled": True}}, {}, r"fp16.enabled=true .* rounds the model's weights to 16 bits"),
        ({"torch_autocast": {"enabled": True}}, {}, "torch_autocast.enabled=true"),
        ({"optimizer": {}}, {}, "'optimizer' in DeepSpeed's configuration: `optim`"),
        ({"scheduler": {}}, {}, "'scheduler' in DeepSpeed's configuration"),
        ({}, {"optim": "muon"}, "optim='muon' with DeepSpeed: .* Use 'adamw_torch_fused'"),
        ({}, {"optim": "adafactor"}, "optim='adafactor' with DeepSpeed"),
        ({"stage": SLICES}, {"numerics": "engine"}, "numerics='engine' with zero_stage=3: .* Use numerics='fast'"),
        ({"stage": SLICES}, {"sync_ref_model": True}, "sync_ref_model=True with zero_stage=3"),
    ):
        refused(launched_zero(**state), message, **options)
    file = tmp_path / "zero.json"
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    for given in ("auto", False):
        file.write_text(json.dumps({"bf16": {"enabled": given}}))
        check_launch(launched_zero(), config(), nn.Linear(2, 2))
    file.write_text(json.dumps({"bf16": {"enabled": True}}))
    refused(launched_zero(), "enabled=true")


def test_adapters_are_refused_but_within_whole_weights():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), peft.LoraConfig(target_modules=["0"]))
    refused(launched_zero(), "lora_mode='adapter'", model)
    refused(launched_zero(SLICES), "zero_stage=3", model, lora_mode="merged")
    accelerator = launched_zero()
    check_launch(accelerator, config(lora_mode="merged"), model)
    # Else accelerate puts another optimizer into the place of `optim`, where its state is offloaded.
    assert accelerator.state.deepspeed_plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] is False
