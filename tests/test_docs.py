"""Pages that name what the code has."""

import json
import re
import runpy
from pathlib import Path

import pytest
from test_imports import by_folder, import_graph


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def modules_of_architecture():
    """Files of the tree in docs/architecture.md, in its order; a folder's line stands for its `__init__.py`."""
    tree = re.search(r"```text\ntrl_qarl/\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)[1]
    files, folder = [], ""
    for indent, name in re.findall(r"^( +)(\S+)  ", tree, re.MULTILINE):
        if len(indent) == 2:
            folder = ""
        if name.endswith("/"):
            folder, name = name, "__init__.py"
        files.append(folder + name)
    return files


def test_architecture_names_every_module_and_no_other():
    package = ROOT / "trl_qarl"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py")} - {"__init__.py"}
    assert sorted(modules_of_architecture()) == sorted(files)


def test_architecture_lists_folders_in_the_order_of_imports():
    order = list(dict.fromkeys(re.split(r"/|\.py", name)[0] for name in modules_of_architecture()))
    position = {f"trl_qarl.{name}": index for index, name in enumerate(order)}
    graph = by_folder(import_graph(ROOT / "trl_qarl"))
    assert [(a, b) for a, imported in graph.items() for b in imported if position[a] < position[b]] == []


def test_tables_of_options_are_those_of_the_code():
    fill = runpy.run_path(str(ROOT / "docs/tables.py"))["fill"]
    page = (ROOT / "docs/options.md").read_text()
    assert fill(page) == page, "run `python docs/tables.py`"


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_python_of_the_documentation_compiles(page):
    for code in python_blocks(page):
        compile(re.sub(r"^>>> ?|^\.\.\. ?", "", code, flags=re.MULTILINE), page.name, "exec")


@pytest.mark.vllm
@pytest.mark.slow
def test_script_of_the_readme_runs_with_another_model_and_dataset(tmp_path, monkeypatch):
    for package in ("vllm", "math_verify"):
        pytest.importorskip(package)
    from testing_utils import make_tiny_model
    from trl_qarl.quantization.export import is_export
    from trl_qarl.rollout.server import cpu_environment

    # Set here, so that the test's end takes back what the engine sets.
    for name, value in {**cpu_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (row,) = [{"prompt": [{"role": "user", "content": "What is 1/2?"}], "solution": "$0.5$"}]
    (tmp_path / "train.jsonl").write_text(8 * (json.dumps(row) + "\n"))
    (code,) = python_blocks(ROOT / "README.md")
    for theirs, ours in {
        '"Qwen/Qwen3-0.6B-Base"': repr(make_tiny_model(tmp_path)),
        '"trl-lib/DeepMath-103K"': '"json", data_files="train.jsonl"',
    }.items():
        assert code.count(theirs) == 1
        code = code.replace(theirs, ours)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert "master weights" in (tmp_path / "qwen3-qarl" / "README.md").read_text()
    assert is_export(tmp_path / "qwen3-qarl-w4a16")
