"""A training that begins where another one, or another tool, ended."""

import json
import shutil
from pathlib import Path

import pytest
from journeys import MARKS
from safetensors.torch import load_file

from testing_utils.trainings import assert_equal


pytestmark = MARKS
GPTQ = Path(__file__).parents[1] / "checkpoint" / "llm_compressor" / "gptq"


def train(user, code=0, **changes):
    name = user.write_recipe("stage.yaml", output_dir="second", **changes)
    return user.run("trl-qarl", "train", "--config", name, code=code)


def test_a_second_stage_starts_from_masters(user):
    user.write_recipe(scheme="w8a8")
    user.run("trl-qarl", "train", "--config", "recipe.yaml")
    output = train(user, code=2, model_name_or_path="out/w8a8")
    assert "as 'int8', and scheme 'w4a16' is 'int4-packed'" in output
    train(user, model_name_or_path="out/checkpoint-2")
    user.assert_deployed("second/w4a16")
    # Tokens tell a policy from the one with which its training began.
    user.run("trl-qarl", "export", "--model_name_or_path", "out", "--output_dir", "first")
    with pytest.raises(AssertionError):
        user.assert_deployed("first", engines=("transformers",))


@pytest.mark.nightly
@pytest.mark.parametrize("launch", [None, "fsdp2"])
def test_the_export_of_a_first_stage_gets_an_adapter(user, launch):
    user.run("trl-qarl", "train", "--config", "recipe.yaml")
    lora = {"use_peft": True, "lora_r": 8, "lora_target_modules": ["all-linear"], "learning_rate": 3e-2}
    if launch is None:
        train(user, model_name_or_path="out/w4a16", **lora)
    else:
        user.write_recipe(model_name_or_path="out/w4a16", output_dir="second", **lora)
        user.launch(launch)
    user.assert_deployed("second/w4a16")


@pytest.mark.nightly
def test_a_second_stage_starts_from_the_parts_that_fsdp2_saved(user):
    user.launch("fsdp2")
    train(user, model_name_or_path="out/checkpoint-2", scheme="w8a8")
    user.assert_deployed("second/w8a8")


@pytest.mark.nightly
@pytest.mark.parametrize("launch", [None, "fsdp2"])
def test_a_training_starts_from_gptq(user, launch):
    shutil.copytree(GPTQ, user.folder / "gptq")
    make_tokenizer_of_16().save_pretrained(user.folder / "gptq")
    # Keys and values in low bits, without effect here.
    config = json.loads((user.folder / "gptq" / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    (user.folder / "gptq" / "config.json").write_text(json.dumps(config))
    if launch is None:
        train(user, model_name_or_path="gptq")
    else:
        user.write_recipe(model_name_or_path="gptq", output_dir="second")
        user.launch(launch)
    user.assert_deployed("second/w4a16")
    # Masters keep the scales of the file.
    user.run("trl-qarl", "export", "--model_name_or_path", "second/checkpoint-2", "--output_dir", "again")
    exports = (load_file(user.folder / name / "model.safetensors") for name in ("gptq", "second/w4a16", "again"))
    scales = [{name: t for name, t in each.items() if name.endswith("weight_scale")} for each in exports]
    assert len(scales[0]) == 7
    for theirs in scales[1:]:
        assert_equal(scales[0], theirs)


CELL = """
from datasets import load_dataset
from rewards import digits
from transformers import AutoModelForCausalLM
from trl_qarl import QaRLConfig, QaRLTrainer, restore_model

model = AutoModelForCausalLM.from_pretrained("model", dtype="float32")


def run_cell():
    args = QaRLConfig("out", scheme="w4a16", bf16=True, max_steps=2, num_generations=2, per_device_train_batch_size=2,
                      steps_per_generation=1, max_completion_length=4, learning_rate=1e-2, save_strategy="no")
    data = load_dataset("json", data_files="problems.json", split="train")
    trainer = QaRLTrainer(model=model, reward_funcs=digits, train_dataset=data, args=args)
    trainer.train()
    return trainer


run_cell()
try:
    run_cell()
except ValueError as error:
    print(f"The second time: {error}")
restore_model(model)
print(run_cell().export_model())
"""


def test_a_cell_runs_twice_once_the_model_is_restored(user):
    (user.folder / "train.py").write_text(CELL)
    output = user.run("python", "train.py")
    assert "The second time: The model has been prepared already. Call `restore_model(model)` before" in output
    user.assert_deployed("out/w4a16", engines=("transformers",))


def make_tokenizer_of_16():
    """One token for each character of sums, and four special ones."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>", *"0123456789+="]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<|unk|>"))
    special = {"pad_token": words[0], "eos_token": words[2], "unk_token": words[3]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)
