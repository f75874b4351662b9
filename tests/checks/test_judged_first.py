"""Everything that is wrong is said at once, before a model is loaded or changed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from testing_utils import make_problems, make_tiny_model, refused, spread
from testing_utils.trainings import arguments, lora
from trl_qarl.checkpoint import marker
from trl_qarl.checks.arguments import warn_of_length
from trl_qarl.checks.problems import Problems
from trl_qarl.scripts import train
from trl_qarl.trainer.policy import Policy
from trl_qarl.trainer.qarl_trainer import QaRLTrainer


@pytest.fixture
def not_loaded(monkeypatch):
    monkeypatch.setattr(Policy, "load", lambda *_, **__: pytest.fail("loaded"))


def problems(*args, **kwargs):
    with pytest.raises(Problems) as said:
        QaRLTrainer(*args, **kwargs)
    return said.value.problems


def described(model):
    hooks = [module._forward_pre_hooks for module in model.modules()]
    rates = [getattr(module, "attention_dropout", None) for module in model.modules()]
    return [*map(type, model.modules())], [*map(len, hooks)], rates, model.generation_config.to_dict()


def test_a_refused_model_stays_as_it_was(tmp_path):
    path = make_tiny_model(tmp_path, "qwen2", dtype="bfloat16", attention_dropout=0.1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    before, weights = described(model), {name: t.clone() for name, t in model.state_dict().items()}
    options = {"disable_dropout": False, "exclude_modules": ["no_such_layer"]}
    with pytest.raises(Problems) as said:
        Policy(arguments(tmp_path, **options)).prepare(model)
    starts = ["The masters are bfloat16", "The model drops activations", "exclude_modules: 'no_such_layer'"]
    assert [p.startswith(s) for p, s in zip(said.value.problems, starts, strict=True)] == [True] * 3
    assert described(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_options_set_after_the_configuration_are_judged(tiny_model, tmp_path, not_loaded):
    args = arguments(tmp_path, max_steps=1)
    args.use_transformers_continuous_batching, args.beta = True, -1.0
    assert problems(tiny_model, spread, args, make_problems()) == [
        "beta=-1.0 must be at least 0: a negative value has no meaning."
    ]
    args.beta, args.per_device_train_batch_size = 0.0, 8
    first, second = problems(tiny_model, spread, args, make_problems())
    assert first.startswith("use_transformers_continuous_batching=True is not supported")
    assert "does not fit per_device_train_batch_size=8" in second


def test_folders_without_permission_are_named(tiny_model, tmp_path, not_loaded, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (found,) = problems(tiny_model, spread, arguments(tmp_path / "out"), make_problems())
    assert f"nothing can be written to {tmp_path}" in found


@pytest.fixture
def classifier(tiny_model, tmp_path):
    """A folder with a model that classifies."""
    config = AutoConfig.from_pretrained(tiny_model, architectures=["Qwen2ForSequenceClassification"])
    config.save_pretrained(tmp_path / "classifier")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "classifier")
    return str(tmp_path / "classifier")


def test_models_of_another_kind_are_named(tiny_model, tmp_path, not_loaded, classifier):
    (found,) = problems(classifier, spread, arguments(tmp_path / "out"), make_problems())
    assert found.startswith("The model is a Qwen2ForSequenceClassification, which generates no text")
    (found,) = problems(tiny_model, tiny_model, arguments(tmp_path / "out"), make_problems())
    assert "is a Qwen2ForCausalLM, whose scores would come from a random head" in found
    found = problems("nobody/policy", "nobody/reward", arguments(tmp_path / "out", beta=0.1), make_problems())
    assert [text.split(" cannot be read: ")[0] for text in found] == [
        "The reward model 'nobody/reward'",
        "The model 'nobody/policy'",
    ]


def test_messages_without_a_template_are_named(tiny_model, tmp_path, not_loaded):
    plain = AutoTokenizer.from_pretrained(tiny_model)
    plain.chat_template = None
    folder = shutil.copytree(tiny_model, tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    messages = Dataset.from_dict({"prompt": [[{"role": "user", "content": "1 + 1"}]] * 16})
    args = arguments(tmp_path / "out", exclude_modules=["no_such_layer"])
    for model, options in ((str(folder), {}), (tiny_model, {"processing_class": plain})):
        found = problems(model, spread, args, messages, **options)
        assert len(found) == 2 and "the tokenizer has no chat template" in found[0]
    assert len(problems(str(folder), spread, args, make_problems())) == 1


@pytest.mark.parametrize(("length", "prompts"), [(8, [[1] * 500, [1] * 505, [1] * 510]), (600, [[1], [1, 1]])])
def test_sequences_beyond_the_context_are_logged_once(tiny_model, tmp_path, caplog, length, prompts):
    model, args = AutoModelForCausalLM.from_pretrained(tiny_model), arguments(tmp_path, max_completion_length=length)
    longest = 0
    for prompt in prompts:
        longest = warn_of_length(longest, [prompt], model, args)
    assert longest == len(prompts[-1]) and caplog.text.count("are more than the model's context of 512 tokens") == 1


def test_schedules_without_their_options_are_named(tmp_path):
    with pytest.raises(Problems, match="lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs=.*min_lr"):
        arguments(tmp_path, lr_scheduler_type="cosine_with_min_lr")
    arguments(tmp_path, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 0.0})


def test_layers_dataset_and_rewards_are_judged_before_loading(tiny_model, tmp_path, not_loaded):
    args = arguments(tmp_path, scheme={"re:.*no_such_layer": "w4a16"})
    found = problems(tiny_model, spread, args, Dataset.from_dict({"question": ["1"] * 16}))
    starts = ["The training dataset needs a `prompt` column", "scheme: pattern 're:.*no_such_layer'"]
    assert [p.startswith(s) for p, s in zip(found, starts, strict=True)] == [True] * 2, found


def test_a_checkpoint_of_another_launch_is_found_before_loading(tiny_model, tmp_path, not_loaded):
    folder = tmp_path / "checkpoint-2"
    marker.begin(folder)
    (folder / "optimizer.bin").touch()
    (folder / "resume.json").write_text(json.dumps({"optim": "adamw_8bit", "hidden_size": 7}))
    marker.complete(folder)
    args = arguments(tmp_path, resume_from_checkpoint=str(folder), exclude_modules=["no_such_layer"])
    found = problems(tiny_model, spread, args, make_problems())
    assert len(found) == 3 and "no_such_layer" in found[0]
    assert "FSDP2 and FULL_STATE_DICT, and this run with one process or DDP" in found[1]
    assert "optim='adamw_8bit' there, 'adamw_torch' here; hidden_size=7 there" in found[2]


@pytest.mark.parametrize("one_loads", ["true", "false"])
def test_a_launch_is_judged_with_the_other_arguments(tiny_model, tmp_path, not_loaded, monkeypatch, one_loads):
    args = arguments(tmp_path, exclude_modules=["no_such_layer"])
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    # Where one process loads, accelerate's own plugin looks for a GPU.
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", one_loads)
    monkeypatch.setenv("FSDP_SYNC_MODULE_STATES", one_loads)
    found = problems(tiny_model, spread, args, make_problems())
    assert (
        len(found) == 3 and "shards only on GPUs" in found[0] and "FSDP1" in found[1] and "no_such_layer" in found[2]
    )


def needs_solution(completions, solution, **kwargs):
    return [1.0] * len(completions)


def takes_no_more(prompts, completions):
    return [1.0] * len(completions)


def with_column(name):
    """Prompts with another column, of nothing."""
    return make_problems().add_column(name, [None] * 16)


PICTURES = with_column("image")
SERVER = {"use_vllm": True, "vllm_mode": "server"}
# Arguments of the trainer, options, and the one problem.
REFUSED = {
    "output in a file": ({}, {"output_dir": "file"}, "output_dir='file' cannot be a folder"),
    "output below a file": ({}, {"output_dir": "file/out"}, "file is a file. Name another"),
    "output over the model": ({}, {"output_dir": "model"}, "output_dir='model' is the folder of the model"),
    "rewards: a number": ({"reward_funcs": 3}, {}, "`reward_funcs` has 3 of type int. Give a function"),
    "rewards: none within": ({"reward_funcs": [spread, None]}, {}, "`reward_funcs` has None of type NoneType"),
    "rewards: a dictionary": ({"reward_funcs": {"spread": spread}}, {}, "of type dict"),
    "rewards: none": ({"reward_funcs": None}, {}, "There is no reward. Give `reward_funcs`"),
    "rewards: empty": ({"reward_funcs": []}, {}, "There is no reward. Give `reward_funcs`"),
    "rewards: too few": ({}, {"reward_weights": [1.0, 2.0]}, "has 2 numbers, and there is 1 reward function"),
    "a column is missing": ({"reward_funcs": needs_solution}, {}, "'needs_solution' cannot be called: missing a req"),
    "an argument is missing": ({"reward_funcs": takes_no_more}, {}, "'takes_no_more' cannot be called: got an unex"),
    "a column of that name": ({"train_dataset": with_column("completions")}, {}, "has the columns ['completions']"),
    "no row": ({"train_dataset": Dataset.from_dict({"prompt": []})}, {}, "The training dataset has no rows"),
    "splits": ({"train_dataset": DatasetDict({"train": PICTURES})}, {}, "is a DatasetDict with the splits ['train']"),
    "a list": ({"train_dataset": [{"prompt": "1"}]}, {}, "of type list, and must be a `datasets.Dataset`"),
    "columns": ({"train_dataset": {"prompt": ["1"]}}, {}, "is a dictionary with ['prompt']. `Dataset.from_dict(col"),
    "no dataset": ({"train_dataset": None}, {}, "There is no training dataset. Give `train_dataset`"),
    "videos": ({"train_dataset": with_column("videos")}, {}, "column 'videos': videos are not supported"),
    "targets: absent": ({"peft_config": ["no_such_layer"]}, {}, "peft_config: Target modules"),
    "targets: the head": ({"peft_config": ["q_proj", "lm_head"]}, {}, "target_modules names 'lm_head'"),
    "of masters": (
        {"rollout_func": print},
        {"quantize_learner": False},
        "`rollout_func` was given with quantize_learner",
    ),
    **{
        f"ahead: {text}": (given, SERVER | {"rollout_ahead": 1}, f"rollout_ahead=1 is unsupported with {text}")
        for text, given in (
            *((f"`{name}`", {name: print}) for name in ("tools", "rollout_func", "environment_factory")),
            ("a streamed dataset", {"train_dataset": make_problems().to_iterable_dataset()}),
            ("pictures, and the dataset has a column 'image'", {"train_dataset": PICTURES}),
        )
    },
}


@pytest.mark.parametrize(("given", "options", "text"), REFUSED.values(), ids=REFUSED)
def test_an_argument_is_refused_before_loading(tiny_model, tmp_path, not_loaded, monkeypatch, given, options, text):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    shutil.copytree(tiny_model, "model")
    if "peft_config" in given:
        given = {"peft_config": lora(target_modules=given["peft_config"])}
    args = arguments(**({"output_dir": "out"} | options))
    found = problems("model", **({"reward_funcs": spread, "args": args, "train_dataset": make_problems()} | given))
    # The class of this model has not been compared with pictures, which is a second problem.
    assert text in found[0] and len(found) == 1 + ("column 'image'" in text), found


@pytest.fixture
def bad_inputs(train_argv, tmp_path, monkeypatch):
    """A command whose dataset has no prompts, and whose rewards cannot be imported."""
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1"}\n' * 8)
    (tmp_path / "broken_rewards.py").write_text("def broken(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    return [*train_argv, "--dataset_name", "rows.jsonl", "--reward_funcs", "broken_rewards.broken"]


STARTS = [
    "Could not import reward function 'broken_rewards.broken': SyntaxError",
    "The training dataset needs a `prompt` column",
]


def test_the_command_names_unread_options_and_content_at_once(bad_inputs, capsys):
    said = refused(capsys, "train", *bad_inputs, "--scheme", "int3")
    lines = [line.removeprefix("- ") for line in said.splitlines() if line.startswith("- ")]
    assert len(lines) == 3 and "'int3'" in lines[0]
    assert [line.startswith(start) for line, start in zip(lines[1:], STARTS, strict=True)] == [True] * 2, lines


def test_the_training_process_names_content_and_layers_at_once(bad_inputs, not_loaded, capsys):
    argv = [*bad_inputs, "--exclude_modules", "no_such_layer"]
    with pytest.raises(SystemExit, match="2"):
        train.main(*train.make_parser().parse_args_and_config(argv, fail_with_unknown_args=False))
    lines = [line.removeprefix("- ") for line in capsys.readouterr().err.splitlines() if line.startswith("- ")]
    assert [line.startswith(start) for line, start in zip(lines[:2], STARTS, strict=True)] == [True] * 2, lines
    assert len(lines) == 3 and lines[2].startswith("exclude_modules: 'no_such_layer'")
