"""
A recipe for another script, open-r1's GRPO on Qwen2.5-1.5B-Instruct: one start of `trl-qarl train` names everything in
it that has to change, and the mended recipe trains.
"""

import json
import os
import subprocess
import sys

import pytest
import yaml

from testing_utils import path_without


RECIPE = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: ./problems.jsonl
dataset_prompt_column: problem
system_prompt: "Think first."
bf16: true
use_vllm: true
vllm_device: auto
do_eval: false
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
hub_model_id: Qwen2.5-1.5B-Open-R1-GRPO
hub_strategy: every_save
learning_rate: 2.0e-05
log_completions: false
log_level: info
logging_first_step: true
logging_steps: 1
logging_strategy: steps
lr_scheduler_type: cosine
max_prompt_length: 512
max_completion_length: 8
max_steps: -1
num_generations: 16
num_train_epochs: 1
output_dir: data/Qwen2.5-1.5B-Open-R1-GRPO
overwrite_output_dir: true
per_device_eval_batch_size: 16
per_device_train_batch_size: 16
push_to_hub: true
report_to:
- wandb
reward_funcs:
- accuracy
- format_of.answers
reward_weights:
- 1.0
- 1.0
save_strategy: "epoch"
save_total_limit: 1
seed: 42
warmup_ratio: 0.1
beta: none of it
# One of our own, too.
torch_compile: true
"""
WRONG = {
    "torch_dtype='bfloat16': the option is now called `dtype`",
    "dataset_prompt_column='problem' is not supported: it is an option of open-r1's own script; name the column",
    "system_prompt='Think first.' is not supported",
    "vllm_device='auto' is not supported",
    "max_prompt_length=512 is not supported: TRL does not truncate prompts",
    "overwrite_output_dir=True is not supported",
    "warmup_ratio=0.1: the option is now called `warmup_steps`",
    "torch_compile=True is not supported",
    "push_to_hub was given, but HF_HUB_OFFLINE is set",
    "The masters are bfloat16",
    "attn_implementation='flash_attention_2' runs on GPUs only",
    "report_to='wandb': its package is not installed",
    "Unknown reward function 'accuracy'",
    "Could not import reward function 'format_of.answers'",
    "--dataset_name='./problems.jsonl': there is no such file",
    "learning_rates='3': unknown option. Did you mean `learning_rate`?",
    "--num_generations: invalid int value: 'four'",
    "--beta: invalid float value: 'none of it'",
}


def run(folder, *words):
    command = [sys.executable, "-m", "trl_qarl.cli", "train", "--config", "recipe.yaml", *words]
    hidden = path_without(folder, "vllm", "deepspeed", "bitsandbytes", "wandb", "flash_attn", "kernels")
    environment = os.environ | {"PYTHONPATH": hidden, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_one_start_names_all_that_is_wrong_in_a_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    result = run(tmp_path, "--use_cpu", "true", "--learning_rates", "3", "--num_generations", "four")
    assert result.returncode == 2
    text = result.stderr[result.stderr.index("trl-qarl: error:") :]
    problems = [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]
    counts = {wrong: sum(problem.startswith(wrong) for problem in problems) for wrong in WRONG}
    assert counts == dict.fromkeys(WRONG, 1) and len(problems) == len(WRONG), text


@pytest.mark.nightly
@pytest.mark.slow
def test_the_mended_recipe_trains(tiny_model, tmp_path):
    recipe = yaml.safe_load(RECIPE)
    for name in (
        *("torch_dtype", "dataset_prompt_column", "system_prompt", "vllm_device", "max_prompt_length"),
        *("overwrite_output_dir", "torch_compile", "beta", "push_to_hub", "attn_implementation"),
    ):
        del recipe[name]
    recipe |= {"warmup_steps": recipe.pop("warmup_ratio"), "report_to": "none", "model_name_or_path": tiny_model}
    recipe |= {"reward_funcs": ["think_format_reward", "format_of.answers"], "use_vllm": False, "use_cpu": True}
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 1"}]} for i in range(4)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "format_of.py").write_text(
        "def answers(completions, **kwargs):\n    return [float(len(c[0]['content'])) for c in completions]\n"
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    result = run(tmp_path)
    assert result.returncode == 0, result.stderr
    assert "exported to" in result.stdout
