"""
Scripts as people copy them, with QaRLConfig and QaRLTrainer in the place of TRL's classes: the first start names all
that has to change, and the mended script trains a policy that deploys.
"""

import sys

from journeys import MARKS


pytestmark = MARKS

SCRIPT = """
import json
from datasets import Dataset
from rewards import digits
from trl_qarl import QaRLConfig as GRPOConfig, QaRLTrainer as GRPOTrainer

rows = [json.loads(line) for line in open("problems.json")][:4]
messages = [[{"role": "system", "content": "Answer."}, {"role": "user", "content": row["prompt"]}] for row in rows]
dataset = Dataset.from_dict({"prompt": messages, "answer": [row["solution"] for row in rows]})


def contains(completions, answer, **kwargs):
    return [float(expected in each[0]["content"]) for each, expected in zip(completions, answer, strict=True)]


def varied(completions, **kwargs):
    return digits([each[0]["content"] for each in completions], **kwargs)


trainer = GRPOTrainer(model="model", reward_funcs=[contains, varied], args=GRPOConfig(**OPTIONS), train_dataset=dataset)
trainer.train()
trainer.save_model()
trainer.export_model("policy")
"""

# GSM8K with Qwen2.5 and vLLM, in hundreds of copies: https://gist.github.com/willccbb/4676755236bb08cab5f4e54a0475d6fb
GSM8K = {
    "output_dir": "out",
    "run_name": "grpo-gsm8k",
    "learning_rate": 5e-6,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
    "warmup_ratio": 0.1,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "bf16": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "num_generations": 16,
    "max_prompt_length": 256,
    "max_completion_length": 4,
    "num_train_epochs": 1,
    "save_steps": 100,
    "max_grad_norm": 0.1,
    "log_on_each_node": False,
    "use_vllm": True,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_device": "cuda:0",
    "report_to": "none",
}


def write_script(user, options) -> None:
    (user.folder / "train.py").write_text(SCRIPT.replace("**OPTIONS", f"**{options!r}"))


def test_a_copied_script_is_mended_once_and_deploys(user):
    unknown, renamed = ("max_prompt_length", "vllm_device"), {"warmup_ratio": "warmup_steps"}
    write_script(user, GSM8K)
    output = user.run(sys.executable, "train.py", code=1)
    message = output[output.rindex(" problems:") :]
    for name in (*unknown, *renamed):
        assert message.count(f"{name}=") == 1, (name, message)
    assert message.count("\n- ") == len(unknown) + len(renamed), message
    mended = {renamed.get(name, name): value for name, value in GSM8K.items() if name not in unknown}
    # What a laptop cannot do is not the script's fault: GPUs, and an engine beside every other test.
    write_script(user, mended | {"use_vllm": False, "learning_rate": 1e-2})
    user.run(sys.executable, "train.py")
    user.assert_deployed("policy", engines=("transformers",))
