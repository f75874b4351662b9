"""
What TRL's example scripts and docs for GRPO do, in scripts that differ by the names of the two classes: agents with
tools and with environments, pictures, and rewards of several kinds.
"""

import json
import sys
from pathlib import Path

import pytest
import trl
from journeys import MARKS

from testing_utils import make_tiny_tokenizer
from testing_utils.pictures import make_tiny_picture_model, needs_torchvision


pytestmark = MARKS

WORDS = "--model_name_or_path model --output_dir out --learning_rate 3e-2 --max_steps 2 --num_generations 2 "
WORDS += "--per_device_train_batch_size 2 --gradient_accumulation_steps 1 --steps_per_generation 1 --report_to none "

START = """
from datasets import Dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from trl_qarl import QaRLConfig as GRPOConfig, QaRLTrainer as GRPOTrainer

"""
PARSED = """
script_args, training_args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
"""
END = """
trainer.train()
trainer.save_model(training_args.output_dir)
if training_args.push_to_hub:
    trainer.push_to_hub(dataset_name=script_args.dataset_name)
trainer.export_model("policy")
"""

AGENT = f"""{START}
def look_up(part: int) -> str:
    '''
    Tell how many pieces of a part are in stock.

    Args:
        part: The number of the part.
    '''
    return str(part * 7 % 10)


async def order(part: int) -> str:
    '''
    Order a piece of a part.

    Args:
        part: The number of the part.
    '''
    return f"Ordered {{part}}."


def asks(completions, **kwargs):
    return [len(turns) + len(str(turns)) / 1000 for turns in completions]


def answers(completions, stock, log_extra, log_metric, **kwargs):
    found = [float(each in turns[-1]["content"]) for turns, each in zip(completions, stock, strict=True)]
    log_extra("expected", list(stock))
    log_metric("answered", sum(found) / len(found))
    return found
{PARSED}
rows = [{{"question": f"How many pieces of part {{n}} are there?", "stock": str(n * 7 % 10)}} for n in range(8)]
dataset = Dataset.from_list(rows).map(
    lambda row: {{"prompt": [{{"role": "user", "content": row["question"]}}]}}, remove_columns=["question"]
)
training_args.chat_template_kwargs = {{"enable_thinking": False}}
trainer = GRPOTrainer(
    model=model_args.model_name_or_path,
    train_dataset=dataset,
    eval_dataset=None,
    tools=[look_up, order],
    reward_funcs=[answers, asks],
    args=training_args,
)
{END}"""

ENVIRONMENT = f"""{START}
from peft import LoraConfig


class Countdown:
    def reset(self, **kwargs):
        self.number = 21
        return f"number={{self.number}}"

    def take(self, part: int) -> str:
        '''
        Take some of what is left.

        Args:
            part: The number to take.

        Returns:
            What is left.
        '''
        if part > self.number:
            raise ValueError("Too many.")
        self.number -= part
        return f"number={{self.number}}"


def taken(environments, completions, **kwargs):
    return [21 - each.number + len(str(turns)) / 1000 for each, turns in zip(environments, completions, strict=True)]


training_args = GRPOConfig(
    output_dir="out",
    chat_template_kwargs={{"enable_thinking": False}},
    max_steps=2,
    learning_rate=3e-2,
    logging_steps=1,
    log_completions=True,
    num_completions_to_print=2,
    max_completion_length=48,
    num_generations=2,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=1,
    report_to="none",
)
trainer = GRPOTrainer(
    model="model",
    train_dataset=Dataset.from_dict({{"prompt": [[{{"role": "user", "content": "Take parts."}}] for _ in range(20)]}}),
    reward_funcs=taken,
    args=training_args,
    environment_factory=Countdown,
    peft_config=LoraConfig(),
)
{END}"""


def make_agent(user):
    """A random model that calls functions, as its vocabulary has tokens that are whole calls."""
    calls = [{"name": name, "arguments": {"part": n}} for name in ("look_up", "order", "take") for n in range(4)]
    user.make_model("qwen3", vocab_size=272, max_position_embeddings=4096)
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens([f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls])
    tokenizer.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath("qwen3.jinja").read_text()
    tokenizer.save_pretrained(user.folder / "model")


def run_script(user, text, words=""):
    """Run a script; returns the rows of its log."""
    (user.folder / "train.py").write_text(text)
    user.run(sys.executable, "train.py", *words.split())
    return [json.loads(line) for line in (user.folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_an_agent_with_tools_trains_and_deploys(user):
    make_agent(user)
    rows = run_script(user, AGENT, f"{WORDS} --max_completion_length 160 --max_tool_calling_iterations 1")
    assert max(row.get("tools/call_frequency", 0) for row in rows) > 0
    user.assert_deployed("policy", engines=("transformers",))


def test_an_agent_in_an_environment_trains_an_adapter(user):
    make_agent(user)
    rows = run_script(user, ENVIRONMENT)
    assert max(row.get("tools/call_frequency", 0) for row in rows) > 0
    assert any(row.get("reward") for row in rows)
    user.assert_deployed("policy", engines=("transformers",))


PICTURES = f"""{START}
import torch
from testing_utils.pictures import draw
from trl.rewards import accuracy_reward, think_format_reward


def varied(completions, **kwargs):
    return [sum(map(ord, each[0]["content"])) % 97 / 97 for each in completions]

{PARSED}
dtype = model_args.dtype if model_args.dtype in ["auto", None] else getattr(torch, model_args.dtype)
training_args.model_init_kwargs = dict(
    revision=model_args.model_revision, attn_implementation=model_args.attn_implementation, dtype=dtype
)
rows = {{"problem": [f"What is {{n}}?" for n in range(10)], "solution": [f"${{n}}$" for n in range(10)]}}
dataset = Dataset.from_dict(rows | {{"image": [draw(n).convert("RGBA") for n in range(10)]}})
dataset = dataset.train_test_split(test_size=2, seed=42)
begin = {{"role": "system", "content": "Think first."}}
dataset = dataset.map(lambda row: {{"prompt": [begin, {{"role": "user", "content": row["problem"]}}]}})
dataset = dataset.filter(lambda row: row["image"].size[0] < 512)
dataset = dataset.map(lambda row: {{"image": row["image"].convert("RGB")}})
trainer = GRPOTrainer(
    model=model_args.model_name_or_path,
    args=training_args,
    reward_funcs=[think_format_reward, accuracy_reward, varied],
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"] if training_args.eval_strategy != "no" else None,
    quantization_config=get_quantization_config(model_args),
    peft_config=get_peft_config(model_args),
)
{END}"""


@needs_torchvision
def test_a_script_with_pictures_trains_an_adapter(user):
    pytest.importorskip("math_verify")
    make_tiny_picture_model(user.folder, "qwen2_5_vl")
    # The answers that journeys compare have no pictures.
    del user.environment["JOURNEY_TOKENS"]
    words = WORDS.replace("path model", "path qwen2_5_vl") + "--max_completion_length 8 --log_completions "
    rows = run_script(user, PICTURES, f"{words} --use_peft --lora_target_modules q_proj v_proj --dtype bfloat16")
    assert any(row.get("reward_std") for row in rows)
    assert (user.folder / "policy" / "processor_config.json").is_file()


REWARDS = f"""{START}
from rewards import digits
from transformers import AutoModelForSequenceClassification, AutoTokenizer
{PARSED}

async def brevity(completions, **kwargs):
    return [-float(len(each)) for each in completions]


def some(prompts, completions, task, **kwargs):
    return [float(len(text)) if kind == "code" else None for text, kind in zip(completions, task, strict=True)]


judge = AutoModelForSequenceClassification.from_pretrained("reward")
trainer = GRPOTrainer(
    model=model_args.model_name_or_path,
    args=training_args,
    reward_funcs=["reward", judge, digits, brevity, some],
    reward_processing_classes=[None, AutoTokenizer.from_pretrained("reward"), None, None, None],
    train_dataset=Dataset.from_dict({{"prompt": [f"{{n}} +" for n in range(4)], "task": ["math", "code"] * 2}}),
)
{END}"""


MAKES_REWARD_MODEL = """
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

config = AutoConfig.from_pretrained("model", num_labels=1, pad_token_id=0)
AutoModelForSequenceClassification.from_config(config).save_pretrained("reward")
AutoTokenizer.from_pretrained("model").save_pretrained("reward")
"""


def test_models_and_functions_reward_with_weights(user):
    (user.folder / "make.py").write_text(MAKES_REWARD_MODEL)
    user.run(sys.executable, "make.py")
    words = f"{WORDS} --max_completion_length 4 --reward_weights 0.5 0.25 1.0 0.01 0.1"
    rows = run_script(user, REWARDS, words)
    names = {name.split("/")[1] for row in rows for name in row if name.startswith("rewards/")}
    assert {"reward", "digits", "brevity", "some"} <= names and any(row.get("reward_std") for row in rows)
    user.assert_deployed("policy", engines=("transformers",))
