"""Pages that name what the code has."""

import re
import runpy
from pathlib import Path

from test_imports import by_folder, import_graph


ROOT = Path(__file__).parent.parent


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
