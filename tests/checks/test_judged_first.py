"""Everything that is wrong is said at once, before a model is loaded or changed."""

import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset, DatasetDict, Image, IterableDataset, List
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)
from trl.rewards import think_format_reward

from testing_utils import make_problems, make_tiny_model, make_tiny_tokenizer, refused, spread
from testing_utils.pictures import draw, make_picture_config
from testing_utils.trainings import arguments, lora, make
from trl_qarl.checkpoint import marker
from trl_qarl.checks.content import check_tokens, problems_of_prompts
from trl_qarl.checks.model import problems_of_positions, warn_of_length
from trl_qarl.checks.problems import Problems
from trl_qarl.scripts import train
from trl_qarl.scripts.command_line import spell
from trl_qarl.trainer.policy import Policy
from trl_qarl.trainer.qarl_trainer import QaRLTrainer


MESSAGES = Dataset.from_dict({"prompt": [[{"role": "user", "content": "1"}]] * 16})


@pytest.fixture
def not_loaded(monkeypatch):
    monkeypatch.setattr(Policy, "load", lambda *_, **__: pytest.fail("loaded"))


@pytest.fixture
def problems(tiny_model, tmp_path, not_loaded):
    """Finds the problems of a trainer with these options, and these objects in place of the usual ones."""
    names = inspect.signature(QaRLTrainer).parameters

    def find(**given):
        objects = {"model": tiny_model, "reward_funcs": spread, "train_dataset": make_problems()}
        objects |= {name: given.pop(name) for name in [*given] if name in names}
        if "args" not in objects:
            objects["args"] = arguments(**({"output_dir": tmp_path / "out"} | given))
        with pytest.raises(Problems) as said:
            QaRLTrainer(**objects)
        return said.value.problems

    return find


def described(model):
    hooks = [module._forward_pre_hooks for module in model.modules()]
    rates = [getattr(module, "attention_dropout", None) for module in model.modules()]
    return [*map(type, model.modules())], [*map(len, hooks)], rates, model.generation_config.to_dict()


def test_a_refused_model_stays_as_it_was(tmp_path, monkeypatch):
    path = make_tiny_model(tmp_path, "qwen2", dtype="bfloat16", attention_dropout=0.1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    before, weights = described(model), {name: t.clone() for name, t in model.state_dict().items()}
    options = {"disable_dropout": False, "exclude_modules": ["no_such_layer"]}
    # A choice may load vLLM.
    monkeypatch.setattr("trl_qarl.trainer.policy.choose_numerics", lambda *_: pytest.fail("chosen"))
    with pytest.raises(Problems) as said:
        Policy(arguments(tmp_path, **options)).prepare(model)
    starts = ["The masters are bfloat16", "The model drops activations", "exclude_modules: 'no_such_layer'"]
    assert [p.startswith(s) for p, s in zip(said.value.problems, starts, strict=True)] == [True] * 3
    assert described(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_dropout_with_engine_numerics_is_judged_first(tmp_path):
    path = make_tiny_model(tmp_path, "qwen2", attention_dropout=0.1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before, options = described(model), {"disable_dropout": False, "numerics": "engine", "bf16": True}
    with pytest.raises(Problems, match="has attention_dropout=0.1, and engines drop nothing"):
        Policy(arguments(tmp_path, loss_type="grpo", **options)).prepare(model)
    assert described(model) == before


def test_options_set_after_the_configuration_are_judged(problems, tmp_path):
    args = arguments(tmp_path, max_steps=1)
    args.use_transformers_continuous_batching, args.beta = True, -1.0
    assert problems(args=args) == ["beta=-1.0 must be at least 0: a negative value has no meaning."]
    args.beta, args.per_device_train_batch_size = 0.0, 8
    first, second = problems(args=args)
    assert first.startswith("use_transformers_continuous_batching=True is not supported")
    assert "does not fit per_device_train_batch_size=8" in second


def test_folders_that_cannot_be_written_are_named(problems, tmp_path):
    args = arguments(tmp_path)
    args.output_dir = "/proc/out"
    (found,) = problems(args=args)
    assert found.startswith("output_dir='/proc/out': nothing can be written to /proc (")


@pytest.fixture
def classifier(tiny_model, tmp_path):
    """A folder with a model that classifies."""
    config = AutoConfig.from_pretrained(tiny_model, architectures=["Qwen2ForSequenceClassification"])
    config.save_pretrained(tmp_path / "classifier")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "classifier")
    return str(tmp_path / "classifier")


def test_models_of_another_kind_are_named(problems, tiny_model, classifier):
    (found,) = problems(model=classifier)
    assert found.startswith("The model is a Qwen2ForSequenceClassification, which generates no text")
    (found,) = problems(reward_funcs=tiny_model)
    assert "is a Qwen2ForCausalLM, whose scores would come from a random head" in found
    AutoConfig.from_pretrained(classifier, id2label={0: "bad", 1: "good"}).save_pretrained(classifier)
    (found,) = problems(reward_funcs=classifier)
    assert "a score for each of ['bad', 'good']" in found
    found = problems(model="nobody/policy", reward_funcs="nobody/reward", beta=0.1)
    starts = "The reward model 'nobody/reward' cannot be read: ", "The model 'nobody/policy' cannot be read: "
    assert [text.startswith(start) for text, start in zip(found, starts, strict=True)] == [True] * 2


def loaded(tiny_model, cls=AutoModelForCausalLM):
    return cls.from_pretrained(tiny_model)


def on_meta(tiny_model):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model))


@pytest.mark.parametrize(
    "model", [AutoConfig.from_pretrained, lambda _: Qwen2ForCausalLM, lambda _: None, lambda _: ""], ids=range(4)
)
def test_what_is_no_model_is_named_without_a_configuration(tiny_model, model):
    """Which would be named after the model."""
    with pytest.raises(Problems, match="^`model` is (of type (Qwen2Config|type|NoneType)|empty). Give a causal"):
        QaRLTrainer(model(tiny_model), spread, train_dataset=make_problems())


def test_paths_are_taken_for_models_and_reward_models(tiny_model, classifier, tmp_path):
    for model, rewards in ((Path(tiny_model), Path(classifier)), (tiny_model, (spread, Path(classifier)))):
        with pytest.raises(LookupError, match="loads the policy"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Policy, "load", load_nothing)
            QaRLTrainer(model, rewards, arguments(tmp_path / "out"), make_problems())


def load_nothing(self, name, **kwargs):
    assert type(name) is str
    raise LookupError("loads the policy")


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": False}}


@pytest.mark.parametrize(
    ("described", "options", "text"),
    [
        ({"quant_method": "awq", "bits": 4}, {}, "is quantized with quant_method='awq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {}, "is quantized with quant_method='bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}, {}, "a checkpoint with zero points"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, {}, "other schemes than"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
            {},
            "reordered columns (act-order)",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}, {}, "with zero points"),
        ({"quant_method": "fp8"}, {"scheme": "bf16", "use_vllm": True}, "vLLM would make layers of it too"),
    ],
    ids=lambda value: value.get("quant_method") if isinstance(value, dict) else "",
)
def test_releases_that_cannot_be_trained_are_named(problems, tiny_model, tmp_path, described, options, text):
    folder = shutil.copytree(tiny_model, tmp_path / "release")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    (found,) = problems(model=str(folder), **options)
    assert text in found


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "phi4_multimodal"])
def test_a_tower_without_a_processor_is_named_with_vllm(problems, tmp_path, kind):
    # The latter's configuration is that of its text.
    config = make_picture_config(kind) if kind == "qwen2_5_vl" else AutoConfig.for_model(kind, num_hidden_layers=1)
    config.save_pretrained(tmp_path / "model")
    make_tiny_tokenizer().save_pretrained(tmp_path / "model")
    (found,) = problems(model=str(tmp_path / "model"), use_vllm=True)
    assert "has no processor (processor_config.json, preprocessor_config.json), which vLLM needs" in found


def test_a_package_that_a_model_needs_is_named(problems, monkeypatch):
    def need(*args):
        raise ImportError("\nIts tower requires timm.\n")

    monkeypatch.setattr("trl_qarl.checks.arguments.skeleton", need)
    (found,) = problems()
    assert found == "The model cannot be loaded: Its tower requires timm."


def test_an_unknown_option_of_loading_is_named(tiny_model, tmp_path):
    args = arguments(tmp_path, model_init_kwargs={"attn_implementaton": "eager"})
    with pytest.raises(ValueError, match="`model_init_kwargs`: .* unexpected keyword argument 'attn_implementaton'"):
        QaRLTrainer(tiny_model, spread, args, make_problems())


def test_a_token_without_an_embedding_is_named(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["<new>"])
    args, data = arguments(tmp_path), Dataset.from_dict({"prompt": ["1 <new>"] * 16})
    trainer = QaRLTrainer(tiny_model, spread, args, data, processing_class=tokenizer)
    said = "Prompt 0 of a batch has the token '<new>' .260., and the model has embeddings of 260"
    with pytest.raises(ValueError, match=said):
        trainer.train()
    check_tokens([[1, 300], []], tokenizer, 260, {300})


def test_a_base_that_is_gone_is_named(problems, tiny_model, tmp_path):
    peft = pytest.importorskip("peft")
    base = shutil.copytree(tiny_model, tmp_path / "base")
    folder = str(tmp_path / "adapter")
    peft.get_peft_model(loaded(str(base)), lora()).save_pretrained(folder)
    for file in base.glob("tokenizer*"):
        file.unlink()
    (found,) = problems(model=folder)
    assert found.startswith(f"{base} has no tokenizer")
    shutil.rmtree(base)
    (found,) = problems(model=folder)
    assert found.startswith(f"The base '{base}' of the adapter '{folder}' is not a folder")


def test_messages_without_a_template_are_named(problems, tiny_model, tmp_path):
    plain = AutoTokenizer.from_pretrained(tiny_model)
    plain.chat_template = None
    folder = shutil.copytree(tiny_model, tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    options = {"exclude_modules": ["no_such_layer"]}
    for given in ({"model": str(folder)}, {"processing_class": plain}):
        found = problems(train_dataset=MESSAGES, **options, **given)
        assert len(found) == 2 and "the tokenizer has no chat template" in found[0]
    assert len(problems(model=str(folder), **options)) == 1


def undescribed(number: int) -> int:
    return number


def described_tool(number: int) -> int:
    """
    Return the number.

    Args:
        number: A number.
    """
    return number


@pytest.mark.parametrize(
    ("template", "options", "tools", "text"),
    [
        ("{{ raise_exception('System role not supported') }}", {}, None, "(TemplateError: System role not supported)"),
        ("{% if is %}{{ 1 / 0 }}{% endif %}", {"chat_template_kwargs": {"is": True}}, None, "(ZeroDivisionError: "),
        ("{{ messages[0].content }}", {}, [described_tool], "(ValueError: it renders no calls of tools"),
        ("{{ messages }}", {}, [described_tool], "failed to add response schema"),
        ("{{ messages }}", {}, [undescribed], "(DocstringParsingException: "),
    ],
)
def test_a_template_that_does_not_fit_is_named(problems, tiny_model, tmp_path, template, options, tools, text):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    (found,) = problems(model=str(folder), train_dataset=MESSAGES, tools=tools, **options)
    assert text in found


@pytest.mark.parametrize(("length", "prompts"), [(8, [[1] * 500, [1] * 505, [1] * 510]), (600, [[1], [1, 1]])])
def test_sequences_beyond_the_context_are_logged_once(tiny_model, caplog, length, prompts):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    longest = 0
    for prompt in prompts:
        longest = warn_of_length(longest, [prompt], model, length)
    assert longest == len(prompts[-1]) and caplog.text.count("are more than the model's context of 512 tokens") == 1
    assert "the engine's context" not in caplog.text
    for before, now in ((0, 1), (1, 3), (3, 4)):
        assert warn_of_length(before, [[1] * now], model, length, length + 2) == now
    assert caplog.text.count(f"are more than the engine's context of {length + 2} tokens, where it cuts") == 1


CHAT = Dataset.from_dict({"prompt": [[{"role": "user", "content": "1 + 1"}]] * 16, "solution": [2] * 16})
WITHOUT_PROMPTS = {
    "table": (make_problems().with_format("arrow"), "arrow"),
    "stream of tables": (make_problems().to_iterable_dataset().with_format("arrow"), "arrow"),
    "arrays": (CHAT.with_format("numpy"), "numpy"),
    "without the column": (CHAT.with_format("torch", columns=["solution"]), "torch"),
}


@pytest.mark.parametrize(("data", "kind"), WITHOUT_PROMPTS.values(), ids=WITHOUT_PROMPTS)
def test_a_format_without_prompts_is_named(problems, data, kind):
    for name, rows, evaluation in (("training", data, None), ("evaluation", make_problems(), {"a": data})):
        (found,) = problems(train_dataset=rows, eval_dataset=evaluation)
        assert found.startswith(f"The {name} dataset has the format {kind!r}, in which no prompt is")


@pytest.mark.parametrize(
    "data",
    [
        make_problems().with_format("numpy"),
        CHAT.with_format("torch"),
        CHAT.with_transform(lambda rows: rows),
        make_problems().to_iterable_dataset().with_format("numpy"),
    ],
    ids=["numpy", "messages in torch", "transform", "stream"],
)
def test_a_format_with_prompts_is_taken(data):
    assert [*problems_of_prompts(data, "training")] == []


def test_a_row_of_a_format_is_named_too():
    data = Dataset.from_dict({"prompt": ["1", None]}).with_format("torch")
    (found,) = problems_of_prompts(data, "training")
    assert found.startswith("Row 1 of the training dataset has the prompt None")


def test_schedules_without_their_options_are_named(tmp_path):
    with pytest.raises(Problems, match="lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs=.*min_lr"):
        arguments(tmp_path, lr_scheduler_type="cosine_with_min_lr")
    arguments(tmp_path, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 0.0})


def test_a_checkpoint_of_another_launch_is_found_before_loading(problems, tmp_path):
    folder = tmp_path / "checkpoint-2"
    marker.begin(folder)
    (folder / "optimizer.bin").touch()
    (folder / "resume.json").write_text(json.dumps({"optim": "adamw_8bit", "hidden_size": 7}))
    marker.complete(folder)
    found = problems(resume_from_checkpoint=str(folder), exclude_modules=["no_such_layer"])
    assert len(found) == 3 and "no_such_layer" in found[0]
    assert "FSDP2 and FULL_STATE_DICT, and this run with one process or DDP" in found[1]
    assert "optim='adamw_8bit' there, 'adamw_torch' here; hidden_size=7 there" in found[2]


@pytest.mark.parametrize("one_loads", ["true", "false"])
def test_a_launch_is_judged_with_the_other_arguments(problems, tmp_path, monkeypatch, one_loads):
    args = arguments(tmp_path, exclude_modules=["no_such_layer"])
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    # Where one process loads, accelerate's own plugin looks for a GPU.
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", one_loads)
    monkeypatch.setenv("FSDP_SYNC_MODULE_STATES", one_loads)
    found = problems(args=args)
    assert len(found) == 3
    assert "shards only on GPUs" in found[0] and "FSDP1" in found[1] and "no_such_layer" in found[2]


def needs_solution(completions, solution, **kwargs):
    return [1.0] * len(completions)


def needs_answer(completions, answer, **kwargs):
    return [1.0] * len(completions)


def takes_no_more(prompts, completions):
    return [1.0] * len(completions)


def with_column(name, value="file"):
    """Prompts with another column."""
    return make_problems().add_column(name, [value] * 16)


def own(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


ANSWERED = with_column("answer", "1")
QUESTIONS = make_problems().rename_column("prompt", "question")
CALLBACK = TrainerCallback()
SERVER, COLOCATED = ({"use_vllm": True, "vllm_mode": mode} for mode in ("server", "colocate"))
LONG = {"use_vllm": True, "vllm_max_model_length": 513}
TOO_LONG = (
    "vllm_max_model_length=513 with Qwen2ForCausalLM: vLLM starts no engine with a context beyond the model's, 512"
)
STREAM = make_problems().to_iterable_dataset()
# Arguments and options of a trainer, or a function of the model's folder that makes them, and the one problem.
EVALUATION = {"reward_funcs": needs_answer, "train_dataset": ANSWERED, "eval_strategy": "steps"}
REFUSED = {
    "output below a file": ({"output_dir": "file/out"}, "file is a file. Name another"),
    "output of a long name": ({"output_dir": "x" * 300}, "cannot be a folder: [Errno 36] File name too long"),
    "output over the model": ({"output_dir": "model"}, "output_dir='model' is the folder of the model"),
    "rewards: a number": ({"reward_funcs": 3}, "`reward_funcs` has 3 of type int. Give a function"),
    "rewards: none within": ({"reward_funcs": [spread, None]}, "`reward_funcs` has None of type NoneType"),
    "rewards: none": ({"reward_funcs": None}, "There is no reward. Give `reward_funcs`"),
    "rewards: too few": ({"reward_weights": [1.0, 2.0]}, "has 2 numbers, and there is 1 reward function"),
    "a column is missing": ({"reward_funcs": needs_solution}, "'needs_solution' cannot be called: missing a req"),
    "an argument is missing": ({"reward_funcs": takes_no_more}, "'takes_no_more' cannot be called: got an unex"),
    "a reward of messages": ({"reward_funcs": think_format_reward}, "'think_format_reward' reads messages"),
    "a column of that name": ({"train_dataset": with_column("completions")}, "has the columns ['completions']"),
    "a column of TRL's": ({"train_dataset": with_column("trainer_state")}, "has the columns ['trainer_state']"),
    "no row": ({"train_dataset": Dataset.from_dict({"prompt": []})}, "The training dataset has no rows"),
    "a row": ({"train_dataset": Dataset.from_dict({"prompt": ["1", None]})}, "Row 1 of the training dataset has the"),
    "splits": ({"train_dataset": DatasetDict({"train": make_problems()})}, "DatasetDict with the splits ['train']"),
    "a list": ({"train_dataset": [{"prompt": "1"}]}, "of type list, and must be a `datasets.Dataset`"),
    "columns": ({"train_dataset": {"prompt": ["1"]}}, "is a dictionary with ['prompt']. `Dataset.from_dict(col"),
    "no dataset": ({"train_dataset": None}, "There is no training dataset. Give `train_dataset`"),
    "videos": ({"train_dataset": with_column("videos")}, "column 'videos': videos are unsupported"),
    "targets: absent": ({"peft_config": ["no_such_layer"]}, "peft_config: Target modules"),
    "targets: the head": ({"peft_config": ["q_proj", "lm_head"]}, "target_modules names 'lm_head'"),
    "targets: no pattern": ({"peft_config": "*bad("}, "nothing to repeat"),
    "callback": ({"callbacks": CALLBACK}, f"`callbacks` is {CALLBACK!r}"),
    "no callback": ({"callbacks": [print]}, f"`callbacks` is {[print]!r}"),
    "tool": ({"tools": print}, f"`tools` is {print!r}"),
    "no tool": ({"tools": [3]}, "`tools` is [3]"),
    "tools of texts": ({"tools": [print]}, "`tools` was given, and the prompts are texts"),
    "rollout": ({"rollout_func": 3}, "`rollout_func` is 3"),
    "rollout without the trainer": ({"rollout_func": lambda prompts: {}}, "`rollout_func` cannot be called: too"),
    "environment": ({"environment_factory": {"a": CALLBACK}}, f"`environment_factory` is {{'a': {CALLBACK!r}}}"),
    "no tokenizer": ({"processing_class": "model"}, "`processing_class` is of type str. Give a tokenizer"),
    "a tokenizer without an end": (
        lambda path: {"processing_class": AutoTokenizer.from_pretrained(path, eos_token=None)},
        "The tokenizer has no end token",
    ),
    "a stream": ({"train_dataset": STREAM, "max_steps": -1}, "max_steps=-1 with a streamed dataset"),
    "sleep": (COLOCATED | {"vllm_enable_sleep_mode": True}, "use_cpu=True: vLLM sleeps on GPUs only"),
    "processes": (COLOCATED | {"vllm_tensor_parallel_size": 2}, "must divide the number of processes, 1"),
    "context of an engine": (COLOCATED | LONG, TOO_LONG),
    "context of a server": (SERVER | LONG | {"vllm_server_autostart": True}, TOO_LONG),
    "of masters": ({"rollout_func": print, "quantize_learner": False}, "`rollout_func` was given with quantize_le"),
    **{
        f"ahead: {text}": (SERVER | {"rollout_ahead": 1} | given, f"rollout_ahead=1 is unsupported with {text}")
        for text, given in (
            ("`tools`", {"tools": [print], "train_dataset": MESSAGES}),
            *((f"`{name}`", {name: print}) for name in ("rollout_func", "environment_factory")),
            ("a streamed dataset", {"train_dataset": STREAM}),
            ("pictures, and the dataset has a column 'image'", {"train_dataset": with_column("image")}),
        )
    },
    "model: classifies": (
        lambda path: {"model": loaded(path, AutoModelForSequenceClassification)},
        "a Qwen2ForSequenceClassification, which generates no",
    ),
    "model: headless": (lambda path: {"model": loaded(path, AutoModel)}, "is a Qwen2Model, which generates no text"),
    "model: T5": (
        lambda _: {"model": T5ForConditionalGeneration(T5Config(d_model=8))},
        "whose decoder reads an encoder",
    ),
    "model: a layer": ({"model": torch.nn.Linear(4, 4)}, "The model is a Linear, which generates no text"),
    "model: meta": (lambda path: {"model": on_meta(path)}, "The model is on the meta device, without weights"),
    "model: frozen": (lambda path: {"model": loaded(path).requires_grad_(False)}, "Nothing of the model is trainable"),
    "model: home": ({"model": "~/nowhere"}, "The model '~/nowhere' is not a folder"),
    "model: a file": ({"model": "model/config.json"}, "config.json' is not a folder"),
    "dtype": ({"model_init_kwargs": {"dtype": "fp32"}}, "dtype='fp32' is unknown. Choose one of ['float32', 'au"),
    "old dtype": ({"model_init_kwargs": {"torch_dtype": torch.bfloat16}}, "The masters are bfloat16"),
    "attention": ({"model_init_kwargs": {"attn_implementation": "no"}}, "attn_implementation='no': Specified"),
    "optimizer: of a name": (lambda path: {"optimizers": (own(loaded(path)), None)}, "the model is yet to be loaded"),
    "optimizer: of others": (
        lambda path: {"model": loaded(path), "optimizers": (own(torch.nn.Linear(1, 1)), None)},
        "of another model's parameters",
    ),
    "optimizer: of the base": (
        lambda path: {"model": (model := loaded(path)), "optimizers": (own(model), None), "peft_config": "all-linear"},
        "the model is yet to get the adapter of `peft_config`",
    ),
    "optimizer: a class": ({"optimizers": (torch.optim.SGD, None)}, "which is no optimizer. Make one"),
    "optimizer: alone": (lambda path: {"optimizers": own(loaded(path))}, "`optimizers` is of type SGD. Give a pair"),
    "reward: by folder": ({"reward_funcs": "model"}, "is a Qwen2ForCausalLM, whose scores would come from a random"),
    "reward: generates": (lambda path: {"reward_funcs": loaded(path)}, "a Qwen2ForCausalLM, which has no head for"),
    "reward: a layer": ({"reward_funcs": torch.nn.Linear(3, 3)}, "is a Linear, which has no head for scores"),
    "reward: a name": ({"reward_funcs": "accuracy_reward"}, "Give the function: `from trl.rewards import accuracy"),
    "reward: two labels": (
        lambda path: {"reward_funcs": loaded(path, AutoModelForSequenceClassification)},
        "a score for each of ['LABEL_0', 'LABEL_1']",
    ),
    "reward: tokenizers": (
        {"reward_processing_classes": [None] * 2},
        "has 2 elements, and there is 1 reward function",
    ),
    "reward: a tokenizer": ({"reward_processing_classes": "name"}, "`reward_processing_classes` is of type str"),
    **{
        f"evaluation: {name}": (EVALUATION | {"eval_dataset": data}, text)
        for name, data, text in (
            ("columns", make_problems(), "'needs_answer' cannot be called: missing a required argument: 'answer'"),
            ("one of several", {"a": ANSWERED, "b": make_problems()}, "the columns of the evaluation dataset"),
            ("no prompts", ANSWERED.remove_columns("prompt"), "The evaluation dataset needs a `prompt` column, got"),
            ("text", "test", "`eval_dataset` is the text 'test'. Give a dataset"),
            ("none", None, "asks for an evaluation, and there is no `eval_dataset`"),
            ("no rows", ANSWERED.select([]), "The evaluation dataset has no rows, so nothing would be evaluated"),
            ("one without rows", {"a": ANSWERED, "b": ANSWERED.select([])}, "The evaluation dataset 'b' has no rows"),
            ("no datasets", {}, "`eval_dataset` is an empty dictionary"),
        )
    },
}


@pytest.mark.parametrize(("given", "text"), REFUSED.values(), ids=REFUSED)
def test_an_argument_is_refused_before_loading(problems, tiny_model, tmp_path, monkeypatch, given, text):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    shutil.copytree(tiny_model, "model")
    given = given("model") if callable(given) else given
    if "peft_config" in given:
        given = given | {"peft_config": lora(target_modules=given["peft_config"])}
    found = problems(**({"model": "model", "output_dir": "out"} | given))
    # This model reads no pictures, here or in vLLM, nor has a text a place for them; its template calls no tools.
    number = 1 + 3 * ("column 'image'" in text) + ("with `tools`" in text)
    assert text in "".join(found) and len(found) == number, found


@pytest.mark.parametrize(("name", "value", "text"), [("image", 1, "Value('int64')"), ("images", "file", "Value('st")])
def test_columns_of_no_pictures_are_named(problems, name, value, text):
    found = problems(train_dataset=with_column(name, value))
    assert len(found) == 2 and "the processing class is a tokenizer, which reads no pictures" in found[0]
    assert found[1].startswith(f"The column {name!r} holds {text}")
    assert f"Make it pictures: `dataset.cast_column({name!r}, " in found[1]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            {"image": [draw(0), None]},
            "Row 1 of the training dataset has None for its pictures. Give a column 'images'",
        ),
        ({"images": [[draw(0)] * 2, [draw(1)]]}, "Row 1 of the training dataset does not take its pictures: Number"),
        ({"images": [[draw(0)] * 2, []], "prompt": ["1", "2"]}, "Row 0 of the training dataset has a picture and a"),
    ],
    ids=["none", "placeholders", "texts"],
)
def test_pictures_that_fit_no_prompt_are_named(problems, rows, text):
    two = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Which?"}]}]
    prompts = [two if "images" in rows else [{"role": "user", "content": "What?"}]] * 2
    data = Dataset.from_dict({"prompt": prompts} | rows)
    (name,) = data.features.keys() & {"image", "images"}
    kind = Image() if name == "image" else List(Image())
    found = problems(train_dataset=data.cast_column(name, kind))
    assert sum(text in each for each in found) == 1


def test_pictures_that_fit_are_counted_in_order(problems):
    """Of a dataset whose rows are in another order than in its file."""
    prompts = [[{"role": "user", "content": [{"type": "image"}] * number}] for number in range(3)]
    rows = {"prompt": prompts, "images": [[draw(0)] * number for number in range(3)]}
    data = Dataset.from_dict(rows).cast_column("images", List(Image())).select([2, 0, 1])
    assert not [each for each in problems(train_dataset=data) if "Row" in each]


@pytest.mark.parametrize("column", ["image", "images", "texts"])
def test_a_picture_that_is_no_file_is_named_before_loading(problems, tmp_path, column):
    there = str(tmp_path / "there.png")
    draw(0).save(there)
    paths = [there, str(tmp_path / "missing.png"), "https://example.com/0.png"]
    prompts = [[{"role": "user", "content": "What?"}]] * len(paths)
    data = Dataset.from_dict({"prompt": prompts, "image": paths})
    if column != "texts":
        data = data.cast_column("image", Image())
    if column == "images":
        data = Dataset.from_dict({"prompt": prompts, "images": [[there, path] for path in paths]})
        data = data.cast_column("images", List(Image()))
    (found,) = [each for each in problems(train_dataset=data) if "not a file" in each]
    assert found.startswith(f"The training dataset names the picture {paths[1]!r}")
    assert not [each for each in problems(train_dataset=data.select([2, 0])) if "not a file" in each]


def test_a_context_that_vllm_takes_is_not_refused(tiny_model, tmp_path, monkeypatch):
    model, options = on_meta(tiny_model), COLOCATED | {"vllm_max_model_length": 1025}
    # The context of another's server is its own.
    assert not [*problems_of_positions(model, arguments(tmp_path, **(options | SERVER)))]
    args = arguments(tmp_path, **options)
    for factor, is_refused in ((2.0, True), (4.0, False)):
        model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": factor}
        assert len([*problems_of_positions(model, args)]) == is_refused
    model.config.rope_parameters["factor"] = 1.0
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert not [*problems_of_positions(model, args)]


def test_a_rank_of_zero_says_nothing_of_targets(problems):
    (found,) = problems(peft_config=lora(r=0))
    assert found.startswith("peft_config: `r` should be a positive integer") and found.endswith("is 0")


def test_columns_of_an_evaluation_are_judged_as_it_begins(tiny_model, tmp_path, caplog):
    """A training that does not evaluate does not read them."""
    trainer = make(tiny_model, tmp_path, needs_answer, ANSWERED, eval_dataset=QUESTIONS)
    with pytest.raises(Problems, match="The evaluation dataset needs a `prompt` column"):
        trainer.evaluate(QUESTIONS)
    with pytest.raises(Problems, match="'needs_answer' cannot be called"):
        trainer.evaluate({"a": make_problems(2)})
    caplog.clear()
    assert "eval_a_loss" in trainer.evaluate({"a": ANSWERED.select([0])})
    assert "eval_loss" in trainer.evaluate(ANSWERED.select([0]).to_iterable_dataset()) and not caplog.text
    trainer.evaluate(IterableDataset.from_generator(lambda: iter(())))
    assert "The evaluation had no rows" in caplog.text


def test_columns_that_only_rows_tell_are_judged_there(tiny_model, tmp_path):
    with_transform = QUESTIONS.with_transform(lambda rows: {"prompt": rows["question"]})
    trainer = make(tiny_model, tmp_path / "out", train_dataset=with_transform, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
    stream = IterableDataset.from_generator(lambda: iter([{"question": "1"}] * 16))
    with pytest.raises(ValueError, match=r"Row 0 of a batch has no `prompt`, only \['question'\]. Rename"):
        make(tiny_model, tmp_path / "out", train_dataset=stream, max_steps=1).train()


def test_an_optimizer_that_cannot_be_made_is_named(problems, monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    for options in ({"optim": "schedule_free_adamw"}, {"optim": "adamw_torch", "optim_args": "betas"}):
        (found,) = problems(**options)
        assert found.startswith(f"optim={options['optim']!r}, optim_args=") and "cannot be made: " in found


def logs_a_metric(completions, log_metric, **kwargs):
    return spread(completions)


@pytest.mark.parametrize(
    ("metric", "reward", "text"),
    [
        ("accuracy", spread, "metric_for_best_model='accuracy' is no metric of an evaluation"),
        ("eval_reward", spread, "loaded"),
        ("rewards/spread/mean", spread, "loaded"),
        ("accuracy", logs_a_metric, "loaded"),
    ],
)
def test_a_metric_that_no_evaluation_has_is_named(tiny_model, tmp_path, not_loaded, metric, reward, text):
    args = arguments(tmp_path, metric_for_best_model=metric, eval_strategy="steps", eval_steps=1)
    with pytest.raises((Problems, pytest.fail.Exception), match=text):
        QaRLTrainer(tiny_model, reward, args, make_problems(), make_problems())


def test_a_reward_model_without_a_tokenizer_is_named(problems, tiny_model, classifier):
    for file in Path(classifier).glob("tokenizer*"):
        file.unlink()
    (found,) = problems(reward_funcs=classifier)
    assert found.startswith(f"{classifier} has no tokenizer") and "`reward_processing_classes`" in found
    with pytest.raises(pytest.fail.Exception, match="loaded"):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        problems(reward_funcs=classifier, reward_processing_classes=tokenizer)


@pytest.fixture
def bad_inputs(train_argv, tmp_path, monkeypatch):
    """A command whose dataset has no prompts, and whose rewards cannot be imported."""
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1"}\n' * 8)
    (tmp_path / "broken_rewards.py").write_text("def broken(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    return [*train_argv, "--dataset_name", "rows.jsonl", "--reward_funcs", "broken_rewards.broken"]


STARTS = [
    "Could not import reward function 'broken_rewards.broken': SyntaxError",
    "The training dataset needs a `prompt` column",
]


def listed(text):
    return [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]


def said_by_training(argv, capsys):
    """What the training process says of these options, with exit code 2."""
    with pytest.raises(SystemExit, match="2"):
        train.main(*train.make_parser().parse_args_and_config(argv, fail_with_unknown_args=False))
    return capsys.readouterr().err


def test_the_command_names_unread_options_and_content_at_once(bad_inputs, capsys):
    lines = listed(refused(capsys, "train", *bad_inputs, "--scheme", "int3"))
    assert len(lines) == 3 and "'int3'" in lines[0]
    assert [line.startswith(start) for line, start in zip(lines[1:], STARTS, strict=True)] == [True] * 2, lines


def test_the_training_process_names_content_and_layers_at_once(bad_inputs, not_loaded, capsys):
    lines = listed(said_by_training([*bad_inputs, "--exclude_modules", "no_such_layer"], capsys))
    starts = [*STARTS, "exclude_modules: 'no_such_layer'"]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 3, lines


def test_the_training_process_says_why_a_file_cannot_be_read(bad_inputs, not_loaded, capsys):
    Path("rows.jsonl").write_text('{"prompt": "1"}\n{"prompt" 2}\n')
    assert re.search("--dataset_name='rows.jsonl' cannot be read: .*: .*JSON", said_by_training(bad_inputs, capsys))


def test_a_missing_split_of_an_evaluation_is_one_problem(train_argv, not_loaded, capsys):
    said = said_by_training([*train_argv, "--eval_on_start", "true", "--dataset_test_split", "dev"], capsys)
    assert "error: The dataset has no split 'dev', only ['train', 'test']. Set `--dataset_test_split`." in said


def read(tmp_path, argv, text="{}", launches=False, without=()):
    """Options of a command with this YAML file, `without` some of `argv`, which come in pairs."""
    (tmp_path / "run.yaml").write_text(text)
    pairs = zip(argv[::2], argv[1::2], strict=False) if without else []
    kept = [word for pair in pairs if pair[0][2:] not in without for word in pair] if without else argv
    known = ["--config", str(tmp_path / "run.yaml"), *kept]
    return train.read_options(known, train.make_parser(), launch_command_parser(), launches)


def test_a_command_counts_the_processes_that_it_launches(train_argv, tmp_path):
    file = tmp_path / "launch.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 3\nmixed_precision: bf16\n")
    argv = [*train_argv, "--per_device_train_batch_size", "1", "--steps_per_generation", "1", "--ddp_backend", "gloo"]
    for words, count in ((["--num_processes", "4"], 4), (["--accelerate_config", str(file)], 3)):
        (_, args, *_), *_ = read(tmp_path, [*argv, "--num_generations", str(count), *words], launches=True)
        assert args.generation_batch_size == count
        said = f"generation_batch_size .{count}. must be divisible by num_generations .5."
        with pytest.raises(Problems, match=said):
            read(tmp_path, [*argv, "--num_generations", "5", *words], launches=True)
    with pytest.raises(Problems, match="^--num_processes: invalid int value: 'two'.$"):
        read(tmp_path, [*train_argv, "--num_processes", "two"], launches=True)


def test_a_yaml_file_is_read_as_it_is_meant(train_argv, tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2024").symlink_to(tiny_dataset)
    text = "dataset_name: 2024\nlearning-rate: 0.5\nnum-processes: 1\neval_strategy: no\nsave_strategy: no\n"
    (script_args, args, *_), launch, _ = read(tmp_path, train_argv, text, without=["dataset_name"])
    assert (script_args.dataset_name, args.learning_rate, launch) == ("2024", 0.5, ["--num_processes", "1"])
    assert (args.eval_strategy, args.save_strategy) == ("no", "no")


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [("dataset_name", ["a.json"], "list"), ("model_name_or_path", {"a": 1}, "dict"), ("export_dir", False, "bool")],
)
def test_what_is_no_path_in_a_yaml_file_is_named(train_argv, tmp_path, name, value, kind):
    with pytest.raises(Problems) as said:
        read(tmp_path, train_argv, f"{name}: {json.dumps(value)}\n", without=[name])
    assert said.value.problems[0] == f"--{name}={value!r} is of type {kind}, and must be one text."


def test_an_address_that_is_a_number_is_named(tmp_path):
    said = "vllm_server_base_url=8000: a server of `trl-qarl vllm-serve` has no other form"
    with pytest.raises(Problems, match=said):
        arguments(tmp_path, vllm_server_base_url=8000)


@pytest.mark.parametrize(
    ("argv", "text", "said"),
    [
        (["--lora_r", "4"], "{}", "lora_r=4 has no effect without `--use_peft`"),
        # The default, but asked for.
        (["--lora-r=16"], "{}", "lora_r=16 has no effect"),
        ([], "lora_r: 16\nuse_dora: true\nlora_dropout: 0\n", "lora_r=16, use_dora=True has no effect"),
        ([], "bnb_4bit_quant_type: fp4\n", "bnb_4bit_quant_type='fp4' has no effect without `--load_in_4bit`"),
    ],
    ids=["word", "default", "file", "4 bits"],
)
def test_options_of_a_missing_adapter_are_named(train_argv, tmp_path, argv, text, said):
    with pytest.raises(Problems, match=re.escape(said)):
        read(tmp_path, [*train_argv, *spell(argv, ["--lora_r"])], text)


def test_a_recipe_may_switch_its_adapter_off(train_argv, tmp_path):
    for argv, text in ((["--use_peft", "false"], ""), ([], "\nuse_peft: false"), (["--use_peft"], "")):
        (_, _, model_args, _), *_ = read(tmp_path, [*train_argv, *argv], f"lora_r: 4{text}")
        assert model_args.lora_r == 4 and model_args.use_peft == (argv == ["--use_peft"])


@pytest.mark.parametrize(
    ("mixture", "text"),
    [
        ("[{path: json, data_filez: a}]", "`datasets` got an unexpected keyword argument 'data_filez'"),
        (
            "a.jsonl",
            "^datasets='a.jsonl' is of type str, and must be a list, each entry with a `path`.*`dataset_name`.$",
        ),
    ],
    ids=["unknown", "text"],
)
def test_a_malformed_mixture_is_named(train_argv, tmp_path, mixture, text):
    with pytest.raises(Problems, match=text):
        read(tmp_path, train_argv, f"datasets: {mixture}\n", without=["dataset_name"])
