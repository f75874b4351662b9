"""The package as installed: what importing it loads, what it exports, what its files hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trl_qarl


ROOT = Path(__file__).parent.parent
# The last one is a third of the import when it is loaded, which each process of a server pays.
HEAVY = ("torch", "torchao", "transformers", "trl", "vllm", "datasets", "accelerate", "importlib.metadata")


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import trl_qarl; dir(trl_qarl)", []),
        ("import trl_qarl.options as o; print(o.QuantOptions().plan.name)", ["w4a16"]),
    ],
    ids=["package", "options"],
)
def test_import_loads_no_heavy_package(code, printed):
    code += f"; import sys; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [*printed, "[]"]


@pytest.mark.parametrize("name", trl_qarl.__all__)
def test_public_name_resolves(name):
    assert getattr(trl_qarl, name) is not None
    assert name in dir(trl_qarl)


def test_type_checking_imports_match_the_lazy_ones():
    tree = ast.parse((ROOT / "trl_qarl" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    imported = {alias.name: node.module for node in block.body for alias in node.names}
    assert imported == trl_qarl._MODULES
    assert set(trl_qarl.__all__) == {*imported, "__version__"}
