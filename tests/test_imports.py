"""The package's modules import each other in one direction."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import trl_qarl


ROOT = Path(trl_qarl.__file__).parent


def module_files(root):
    """Every module below `root`, `{dotted name: file}`; a folder's name stands for its `__init__.py`."""
    files = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports_of(module, path, files, at_start=False):
    """What a module imports: in functions and for type checkers too, or `at_start`, when it is itself imported."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_start else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            # `from .folder import name` may mean a module of the folder or a name in its `__init__.py`.
            names = {f"{source}.{alias.name}" for alias in node.names}
            yield from {name if name in files else source for name in names}


def import_graph(root):
    """
    `{module: modules it imports}`, at the top, within functions and for type checkers alike.

    The package itself is left out: it offers public names of all modules, loaded on first use, and its version.
    """
    files = module_files(root)
    graph = {name: {*imports_of(name, path, files)} & files.keys() - {name, root.name} for name, path in files.items()}
    del graph[root.name]
    return graph


def by_folder(graph):
    """The same graph with each folder as one node."""
    folder = lambda module: ".".join(module.split(".")[:2])  # noqa: E731
    folders = {folder(module): set() for module in graph}
    for module, imported in graph.items():
        folders[folder(module)] |= {folder(other) for other in imported} - {folder(module)}
    return folders


@pytest.fixture(scope="module")
def graph():
    return import_graph(ROOT)


@pytest.mark.parametrize("part", [dict, by_folder], ids=["module", "folder"])
def test_no_part_imports_itself_over_others(graph, part):
    # Names the circle, if there is one.
    TopologicalSorter(part(graph)).prepare()


def test_quantization_imports_only_models_and_replacing(graph):
    inside = {module: imported for module, imported in graph.items() if module.startswith("trl_qarl.quantization.")}
    outside = {
        f"{module} -> {other}"
        for module, imported in inside.items()
        for other in imported
        if not other.startswith("trl_qarl.quantization") and other not in ("trl_qarl.models", "trl_qarl.replacing")
    }
    assert len(inside) > 5 and not outside and not graph["trl_qarl.models"] and not graph["trl_qarl.replacing"]


def test_protocol_and_run_files_import_nothing_of_the_package(graph):
    assert graph["trl_qarl.wire.protocol"] == graph["trl_qarl.telemetry.run_files"] == set()


def test_the_trainers_side_does_not_import_what_runs_in_vllm(graph):
    importers = {module for module, imported in graph.items() if any("vllm_plugin" in other for other in imported)}
    assert importers and all(module.startswith("trl_qarl.vllm_plugin") for module in importers)


@pytest.mark.parametrize("command", ["vllm_serve", "doctor", "estimate", "report"])
def test_a_command_that_does_not_train_loads_no_trainer(command):
    """TRL's clients and trainers import vLLM and PEFT, which takes seconds."""
    files = module_files(ROOT)
    seen, waiting = {}, [(f"trl_qarl.scripts.{command}", None)]
    for module, importer in waiting:
        if module not in seen:
            seen[module] = importer
            # The command's own functions run; those of what it imports may not.
            found = imports_of(module, files[module], files, at_start=importer is not None) if module in files else ()
            waiting += [(name, module) for name in found]
    heavy = {name: importer for name, importer in seen.items() if name.split(".")[0] in ("trl", "vllm", "peft")}
    assert len(seen) > 10 and not heavy


def test_no_class_is_assigned():
    """A layer's behaviour is its parts: sources, products, operations."""
    stores = {
        f"{module}:{node.lineno}"
        for module, path in module_files(ROOT).items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
    }
    assert not stores
