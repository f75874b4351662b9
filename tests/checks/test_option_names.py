"""Names of options that do not exist: what to do about earlier ones, and suggestions that do no harm."""

import dataclasses

import pytest
from accelerate.commands.launch import launch_command_parser

from testing_utils.trainings import config
from trl_qarl import QaRLConfig
from trl_qarl.checks.names import OF_THE_TRAINER, REMOVED, RENAMED
from trl_qarl.checks.problems import Problems
from trl_qarl.scripts.train import known_options, make_parser


FIELDS = {field.name for field in dataclasses.fields(QaRLConfig)}


def test_tables_name_what_is_gone_and_what_is_there():
    known = {name[2:].replace("-", "_") for name in known_options(make_parser(), launch_command_parser())}
    assert not (RENAMED.keys() | REMOVED.keys()) & known
    assert {*RENAMED.values()} <= known and not OF_THE_TRAINER.keys() & FIELDS
    assert not RENAMED.keys() & REMOVED.keys()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("evaluation_strategy", "no", "now called `eval_strategy`"),
        ("no_cuda", True, "now called `use_cpu`"),
        ("warmup_ratio", 0.1, "`warmup_steps` (a number below 1 is a share of the updates)"),
        ("max_prompt_length", 512, "TRL does not truncate prompts"),
        ("overwrite_output_dir", True, "`resume_from_checkpoint` continues a run"),
        ("torch_dtype", "bfloat16", "belongs into `model_init_kwargs`"),
        ("lora_r", 8, "`QaRLTrainer(peft_config=...)`"),
        ("shceme", "fp8", "Did you mean `scheme`?"),
        ("learningrate", 1e-3, "Did you mean `learning_rate`?"),
        ("save_step", 5, "Did you mean `save_steps`?"),
        ("output_dri", "out", "Did you mean `output_dir`?"),
        # Other words, or nothing near.
        ("positive_epsilon_low", 0.1, "unknown option. Remove it."),
        ("max_response_length", 512, "unknown option. Remove it."),
    ],
)
def test_an_unknown_name_says_what_to_do(tmp_path, name, value, says):
    with pytest.raises(Problems) as error:
        config(tmp_path, **{name: value})
    (problem,) = error.value.problems
    assert problem.startswith(f"{name}={value!r}") and says in problem
    assert problem.endswith((".", "?"))


def test_the_value_of_a_renamed_option_is_checked_too(tmp_path):
    with pytest.raises(Problems) as error:
        config(tmp_path, warmup_ratio=-0.1, mismatch_cap=1.0)
    names = ["warmup_ratio", "warmup_steps", "mismatch_cap"]
    assert [problem.split("=")[0] for problem in error.value.problems] == names
