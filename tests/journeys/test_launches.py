"""`trl-qarl train` with each shipped launch, on two processes: trained, killed, resumed, exported, deployed."""

import shlex

import pytest
import yaml
from journeys import CONFIGURATIONS, RECIPE, two_processes

from testing_utils.trainings import EXPERTS, assert_equal
from trl_qarl.engines.server_process import free_port


pytestmark = [
    *(pytest.mark.distributed, pytest.mark.slow, pytest.mark.vllm),
    *(pytest.mark.xdist_group("journeys"), pytest.mark.timeout(900)),
]
LAUNCHES = sorted(path.stem for path in CONFIGURATIONS.iterdir())
WRAPPED = {"ddp": "DistributedDataParallel", "deepspeed": "DeepSpeedEngine", "fsdp2": "FSDPQwen3ForCausalLM"}
SHARDS = ("fsdp2", "deepspeed_zero3")
LORA = {"use_peft": True, "lora_r": 8, "lora_target_modules": ["all-linear"], "learning_rate": 3e-2}


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
    options, recipe = [], LORA if kind == "lora" else {}
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
        recipe = recipe | {"optim": "adamw_torch_fused"} | ({"lora_mode": "merged"} if recipe else {})
    elif name.startswith("fsdp2") and recipe:
        # As the file says.
        options = ["--fsdp_cpu_ram_efficient_loading", "false"]
    user.write_recipe(**recipe)
    (user.folder / "dies").write_text("1")
    output = user.launch(name, *options, code=None)
    assert (user.folder / "out" / "checkpoint-1" / "checkpoint_complete").is_file(), output[-6000:]
    assert not (user.folder / "out" / "w4a16").exists()
    output = user.launch(name, *options, "--resume_from_checkpoint", "true")
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
def test_an_adapter_with_zero3_is_refused(user):
    pytest.importorskip("deepspeed")
    user.write_recipe(**LORA, optim="adamw_torch_fused")
    assert "an adapter with zero_stage=3" in user.launch("deepspeed_zero3", code=None)


@pytest.mark.nightly
@pytest.mark.parametrize("model", [("qwen3_moe", EXPERTS), ("gemma", {})], ids=["experts", "tied"])
def test_parts_of_other_models_are_read(user, model):
    arch, overrides = model
    user.make_model(arch, **overrides)
    user.launch("fsdp2")
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


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_a_script_of_several_processes_deploys(user, name):
    """As in the README; every process reaches the last line."""
    (user.folder / "train.py").write_text(SCRIPT)
    user.run("accelerate", "launch", "--config_file", *two_processes(name), "train.py", JOURNEY_LAUNCH=name)
    user.assert_deployed("policy", engines=("transformers",))
    user.run("trl-qarl", "export", "--model_name_or_path", "out", "--output_dir", "again")
    assert_equal(user.tensors_of("again"), user.tensors_of("policy"))


# What has no place on a CPU, and the sizes of a real run.
TINY = {
    **{name: RECIPE[name] for name in ("model_name_or_path", "dataset_name", "reward_funcs", "output_dir")},
    **{name: RECIPE[name] for name in ("num_generations", "max_completion_length", "max_steps", "report_to")},
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "use_vllm": False,
    "learning_rate": 1e-2,
}
MOE = ("30b_a3b_8x80gb", "235b_lora_8x80gb")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=() if path.stem == "8b_24gb" else pytest.mark.nightly)
        for path in sorted((CONFIGURATIONS.parent / "recipes").glob("*.yaml"))
    ],
)
def test_a_recipe_trains_at_tiny_scale(user, name):
    path = CONFIGURATIONS.parent / "recipes" / f"{name}.yaml"
    text = path.read_text()
    command = shlex.split(text[text.index("trl-qarl train") :].partition("\n#\n")[0].replace("\\\n#", ""))
    assert command[3] == f"examples/recipes/{name}.yaml"
    if name in MOE:
        user.make_model("qwen3_moe", **EXPERTS)
    options = yaml.safe_load(text)
    for option in ("vllm_mode", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_max_model_length"):
        options.pop(option, None)
    (user.folder / "recipe.yaml").write_text(yaml.safe_dump(options | TINY))
    launch, given = command[5], command[6:]
    number = min(int(given[given.index("--num_processes") + 1]), 2)
    given[given.index("--num_processes") + 1] = str(number)
    file = CONFIGURATIONS / launch.rpartition("/")[2]
    argv = ["trl-qarl", "train", "--config", "recipe.yaml", "--accelerate_config", str(file), *given]
    output = user.run(*argv, "--main_process_port", str(free_port()), JOURNEY_LAUNCH=file.stem)
    assert "Policy (w4a16) exported to out/w4a16" in output
    assert user.trained()["shards"] == file.stem.startswith("fsdp2")
