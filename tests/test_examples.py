"""The examples: what they ask, what they reward, and that they run."""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from testing_utils import make_tiny_model, path_without
from testing_utils.pictures import make_tiny_picture_model, needs_torchvision
from trl_qarl.checkpoint.export import is_export
from trl_qarl.scripts import train


EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("2 + 2 = 4\nAnswer: 4", 1),
        ("Answer: $4.00", 1),
        ("Answer: 1,004", 0),
        ("Answer: 3\nAnswer: 4", 1),
        ("Answer: 4\nAnswer: 3", 0),
        ("4", 0),
        ("", 0),
    ],
)
def test_gsm8k_rewards_the_last_answer(text, reward):
    assert load("gsm8k").correct([[{"content": text}]], ["4"]) == [reward]


@pytest.mark.parametrize("number", range(5))
def test_a_drawn_problem_has_as_many_shapes_as_its_answer_says(number):
    row = load("pictures").draw_problem(number)
    color, shape = row["prompt"][0]["content"].split()[2:4]
    pixels = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255)}[color]
    # A shape fills its cell's middle; a square alone fills the corner of its box too.
    count = 0
    for place in range(16):
        left, top = place % 4 * 56 + 7, place // 4 * 56 + 7
        has_color = row["images"][0].getpixel((left + 21, top + 21)) == pixels
        is_square = row["images"][0].getpixel((left + 1, top + 1)) == pixels
        count += has_color and is_square == (shape == "squares")
    assert str(count) == row["answer"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "arch", "says"),
    [
        ("gsm8k", make_tiny_model, "qwen3", "vllm serve"),
        pytest.param(
            "pictures", make_tiny_picture_model, "idefics3", "outside the language model", marks=needs_torchvision
        ),
    ],
    ids=["gsm8k", "pictures"],
)
def test_an_example_trains_and_exports(tmp_path, monkeypatch, capsys, name, make, arch, says):
    out = tmp_path / "out"
    argv = [f"{name}.py", "--smoke", "--model", make(tmp_path, arch), "--output_dir", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    load(name).main()
    assert says in capsys.readouterr().out
    assert is_export(out / "w4a16") and (out / "model.safetensors").is_file()


@pytest.mark.parametrize("path", [*EXAMPLES.glob("*.py"), EXAMPLES / "quickstart.ipynb"], ids=lambda path: path.name)
def test_what_an_example_imports_from_the_package_is_there(path):
    """Also in branches that no test takes."""
    sources = [path.read_text()]
    if path.suffix == ".ipynb":
        cells = json.loads(sources[0])["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    for node in nodes:
        if node.module.partition(".")[0] == "trl_qarl":
            assert all(hasattr(importlib.import_module(node.module), alias.name) for alias in node.names), node.module


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs_with_a_tiny_model(tmp_path, monkeypatch):
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package)
    import nbformat
    from nbclient import NotebookClient

    kernel = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "x"}
    folder = tmp_path / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(kernel | {"language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("NOTEBOOK_MODEL", make_tiny_model(tmp_path / "model"))
    monkeypatch.setenv("NOTEBOOK_UPDATES", "2")
    monkeypatch.setenv("PYTHONPATH", path_without(tmp_path, "vllm", "deepspeed", "bitsandbytes"))
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, startup_timeout=300, resources=resources).execute()
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("trained 2 of 2 updates" in text for text in texts)
    assert re.search(r"\d+ of 20 held-out sums solved", "".join(texts))
    assert (tmp_path / "outputs" / "notebook" / "w4a16" / "config.json").is_file()


def test_settings_of_the_paper_are_what_the_command_line_reads():
    """The numbers are those of Table 2."""
    argv = ["--config", str(EXAMPLES / "deepmath_qwen3_8b.yaml")]
    _, args, model_args, _, rest = train.make_parser().parse_args_and_config(argv, return_remaining_strings=True)
    assert rest == ["--num_processes", "4"]
    completions = 4 * args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert completions == 64 and completions * args.steps_per_generation // args.gradient_accumulation_steps == 512
    assert (args.num_generations, args.max_completion_length, args.temperature) == (8, 16384, 1.0)
    assert (args.optim, args.learning_rate, args.weight_decay, args.beta) == ("muon", 1e-6, 0.01, 0)
    assert (args.loss_type, args.scheme, args.mismatch_cap) == ("tbpo", "w4a16", 2)
    bands = args.positive_epsilon_high, args.negative_epsilon_low, args.negative_epsilon_high
    assert bands == (4e-4, 3e-4, 7e-4)
    assert model_args.model_name_or_path == "Qwen/Qwen3-8B-Base"
    assert args.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
