"""
Code and commands of the pages, executed with a tiny model and a file of this machine in place of the named ones, for
one update. What a page assumes (`trainer`, a dataset, a reward) is made by the block before it, or here.

Not run here: what installs, needs a GPU or other machines (`pip`, `docker`, `ssh`, `make`, several nodes), llama.cpp,
lm-evaluation-harness (tests/test_lm_eval.py) and GGUF (tests/checkpoint/test_gguf.py), servers (tests/journeys), and
the engine of a page, `load_engine` (tests/engines/test_in_process.py).
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from accelerate.commands import launch
from safetensors.torch import load_file
from test_docs import ROOT, blocks, shell_commands

import trl_qarl
from testing_utils import make_problems, make_tiny_model
from testing_utils.releases import make_release
from testing_utils.trainings import assert_equal
from trl_qarl.cli import main
from trl_qarl.scripts import train


MODELS = ("Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct", "MODEL")
MODELS += ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B-Base")
DATASETS = ("trl-lib/DeepMath-103K", "DATASET")
QUICK = {
    **dict.fromkeys(("per_device_train_batch_size", "num_generations", "gradient_accumulation_steps"), 2),
    "steps_per_generation": 2,
    "max_completion_length": 4,
    "max_steps": 1,
    "report_to": "none",
    # As on a GPU.
    "bf16": True,
    "use_cpu": True,
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with what a reader of the pages has."""
    Path(make_tiny_model(tmp_path / "made", "qwen2")).rename(tmp_path / "model")
    row = {"prompt": [{"role": "user", "content": "What is 1/2?"}], "solution": "$0.5$"}
    (tmp_path / "problems.jsonl").write_text(8 * (json.dumps(row) + "\n"))
    (tmp_path / "my_rewards.py").write_text("def correct(completions, **_):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def here(text):
    for name in MODELS:
        text = text.replace(f'"{name}"', '"model"')
    return text


def quick_config(*args, **given):
    return trl_qarl.trainer.qarl_config.QaRLConfig(*args, **{**given, **QUICK})


PYTHON = {
    "adapters.md": [0],
    "objectives.md": [0, 1, 2, 3],
    "publish_and_serve.md": [1],
    "schemes.md": [0, 1],
    "trainer.md": [0],
    "vllm.md": [0, 1],
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON)
def test_python_of_a_page_runs(place, monkeypatch, page):
    monkeypatch.setattr(trl_qarl, "QaRLConfig", quick_config, raising=False)
    found = blocks(ROOT / "docs" / page, "python")
    if page == "publish_and_serve.md":
        assert main(["export", "--model_name_or_path", "model", "--scheme", "w4a16", "--output_dir", "out/w4a16"]) == 0
    names = {"__name__": "page", "QaRLConfig": quick_config, "train_dataset": make_problems()}
    names["brevity"] = lambda completions, **kwargs: [-len(completion) / 100 for completion in completions]
    for number in PYTHON[page]:
        if file := re.match(r"# (\w+\.py)\n", found[number]):
            (place / file[1]).write_text(found[number])
        exec(compile(here(found[number]), f"{page}, block {number}", "exec"), names)
    if "trainer" in names:
        assert names["trainer"].state.global_step == 1


def commands():
    """The commands of the pages that one process can run, in order."""
    for page in ("options", "adapters", "publish_and_serve", "schemes", "sharding", "moe", "models"):
        for words in shell_commands(ROOT / "docs" / f"{page}.md"):
            is_ours = words[0] == "trl-qarl" and words[1] in ("train", "export", "estimate", "doctor")
            if is_ours and not {"--gguf", "--push_to_hub", "--accelerate_config"} & {*words}:
                yield page, words[1:]


def group(page):
    return [words for each, words in commands() if each == page]


@pytest.mark.slow
@pytest.mark.parametrize("page", [*dict.fromkeys(page for page, _ in commands())])
def test_commands_of_a_page_run_one_after_the_other(place, monkeypatch, page):
    pytest.importorskip("math_verify")
    # As `accelerate launch` would, in this process.
    monkeypatch.setattr(launch, "launch_command", run_here)
    (place / "run.yaml").write_text(blocks(ROOT / "docs" / "options.md", "yaml")[0].replace("num_processes: 2", ""))
    if page == "schemes":
        words = "--model_name_or_path model --dataset_name problems.jsonl --reward_funcs my_rewards.correct"
        run("train", *words.split(), "--output_dir", "out")
        make_release("model", "RELEASE")
    for command, *words in group(page):
        if "--engine" in words and find_spec("vllm") is None:
            continue
        words = ["model" if word in MODELS else "problems.jsonl" if word in DATASETS else word for word in words]
        if command == "export" and "out" in words and not Path("out").exists():
            # Where a training writes that names no folder.
            words[words.index("out")] = "trainer_output"
        run(command, *words)
        if "RELEASE" in words:
            folders = place / "RELEASE", place / "trainer_output" / "w4a16"
            theirs, ours = (load_file(folder / "model.safetensors") for folder in folders)
            assert_equal(scales(ours), scales(theirs))


def scales(tensors):
    """Scales by the names of their layers; there are some."""
    found = {name: tensor for name, tensor in tensors.items() if name.endswith(".weight_scale")}
    assert found
    return found


def run(command, *words):
    if command == "train":
        words += tuple(str(word) for name, value in QUICK.items() for word in (f"--{name}", value))
        if "--config" in words:
            words += ("--model_name_or_path", "model")
    assert main([command, *words]) == 0, words


def run_here(args):
    argv = args.training_script_args
    train.main(*train.make_parser().parse_args_and_config(argv, fail_with_unknown_args=False))
