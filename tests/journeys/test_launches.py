"""`trl-qarl train` with each shipped launch, on two processes: trained, killed, resumed, exported, deployed."""

import json

import pytest
from journeys import CONFIGURATIONS, MARKS, two_processes

from testing_utils.trainings import EXPERTS, assert_equal


pytestmark = MARKS
LAUNCHES = sorted(path.stem for path in CONFIGURATIONS.iterdir())
WRAPPED = {"ddp": "DistributedDataParallel", "deepspeed": "DeepSpeedEngine", "fsdp2": "Qwen3ForCausalLM"}
SHARDS = ("fsdp2", "deepspeed_zero3")
# The values that vLLM's class has.
PHIMOE = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "lm_head_bias": True,
    "router_aux_loss_coef": 0.0,
}
LORA = {"use_peft": True, "lora_r": 8, "lora_target_modules": ["all-linear"], "learning_rate": 1e-2}


OFTEN = ("ddp", "fsdp2", "deepspeed_zero3")


def _case(name, kind):
    return pytest.param(name, kind, marks=() if kind == "full" and name in OFTEN else pytest.mark.nightly)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        _case(name, kind)
        for name in LAUNCHES
        for kind in ("full", "lora")
        if (name, kind) != ("deepspeed_zero3", "lora")
    ],
)
def test_a_killed_launch_resumes_and_deploys(user, name, kind):
    recipe = LORA if kind == "lora" else {}
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
        recipe = recipe | {"optim": "adamw_torch_fused"} | ({"lora_mode": "merged"} if recipe else {})
    user.write_recipe(**recipe)
    (user.folder / "dies").write_text("1")
    output = user.launch(name, code=None)
    assert (user.folder / "out" / "checkpoint-1" / "checkpoint_complete").is_file(), output[-6000:]
    assert not (user.folder / "out" / "w4a16").exists()
    output = user.launch(name, "--resume_from_checkpoint", "true")
    trained = user.trained()
    assert trained["shards"] == name.startswith(SHARDS)
    # accelerate would leave out on a CPU what shards, and train on.
    assert trained["wrapped"] == WRAPPED[name.split("_")[0]] or kind == "lora"
    saved = "Adapter" if kind == "lora" else "Master weights"
    assert f"{saved} saved to out." in output and "Policy (w4a16) exported to out/w4a16" in output
    # Files of one form for all launches.
    user.assert_deployed("out/w4a16", engines=("transformers", "vllm") if name == "fsdp2" else ("transformers",))
    exported = user.tensors_of("out/w4a16")
    for source in ("out", "out/checkpoint-3"):
        user.run("trl-qarl", "export", "--model_name_or_path", source, "--output_dir", "again")
        assert_equal(user.tensors_of("again"), exported)


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_launch_resumes_with_another_number_of_processes(user, first, then):
    """Each update is evaluated, and a generation batch is in progress at every other one."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "dataset_test_split": "train"}
    user.write_recipe(max_steps=4, steps_per_generation=2, **evaluation)
    user.environment["DIES_AS"] = "0"
    (user.folder / "dies").write_text("2")
    output = user.launch("fsdp2", "--num_processes", str(first), code=None)
    assert (user.folder / "out" / "checkpoint-1" / "checkpoint_complete").is_file(), output[-6000:]
    user.launch("fsdp2", "--num_processes", str(then), "--resume_from_checkpoint", "true")
    rows = json.loads((user.folder / "out" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in rows if "eval_reward" in row] == [1, 2, 3, 4]
    user.assert_deployed("out/w4a16")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model", [("qwen3_moe", EXPERTS), ("gemma", {}), ("phimoe", PHIMOE)], ids=["experts", "tied", "biased head"]
)
def test_parts_of_other_models_are_read(user, model):
    arch, overrides = model
    user.make_model(arch, **overrides)
    # PhiMoE's router has noise, and a threshold at which roundings exchange experts.
    is_rounded = arch != "phimoe"
    user.write_recipe(disable_dropout=True, bf16=is_rounded)
    user.launch("fsdp2", "--mixed_precision", "bf16" if is_rounded else "no")
    user.assert_deployed("out/w4a16", engines=("transformers",))
    for source in ("out", "out/checkpoint-3"):
        user.run("trl-qarl", "export", "--model_name_or_path", source, "--output_dir", "again")
        assert_equal(user.tensors_of("again"), user.tensors_of("out/w4a16"))


SCRIPT = """
from datasets import load_dataset
from rewards import digits
from trl_qarl import QaRLConfig, QaRLTrainer, export_checkpoint

trainer = QaRLTrainer(
    model="model",
    reward_funcs=digits,
    train_dataset=load_dataset("json", data_files="problems.json", split="train"),
    args=QaRLConfig("out", scheme="w4a16", bf16=True, max_steps=2, num_generations=2, per_device_train_batch_size=2,
                    steps_per_generation=1, max_completion_length=4, learning_rate=1e-2, save_strategy="no"),
)
trainer.train()
trainer.save_model()
export_checkpoint(trainer.model, "policy", trainer.processing_class)
"""


def test_processes_of_a_launch_give_one_message(user):
    user.write_recipe(exclude_modules=["no_such_layer"])
    assert user.launch("ddp", code=2).count("'no_such_layer'") == 1


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_a_script_of_several_processes_deploys(user, name):
    """As in the README; every process reaches the last line."""
    (user.folder / "train.py").write_text(SCRIPT)
    user.run("accelerate", "launch", "--config_file", *two_processes(name), "train.py", JOURNEY_LAUNCH=name)
    user.assert_deployed("policy", engines=("transformers",))
    user.run("trl-qarl", "export", "--model_name_or_path", "out", "--output_dir", "again")
    assert_equal(user.tensors_of("again"), user.tensors_of("policy"))
