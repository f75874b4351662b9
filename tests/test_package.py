"""The package as installed: what importing it loads, what it exports, what its files hold."""

import ast
import re
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest

import trl_qarl


ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "torchao", "transformers", "trl", "vllm", "datasets", "accelerate")


def test_import_loads_no_heavy_package():
    code = f"import sys, trl_qarl; dir(trl_qarl); print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_version_is_the_installed_one():
    assert metadata.version("trl-qarl") == trl_qarl.__version__


def test_package_declares_its_types():
    assert resources.files("trl_qarl").joinpath("py.typed").is_file()


@pytest.mark.parametrize("name", trl_qarl.__all__)
def test_public_name_resolves(name):
    assert getattr(trl_qarl, name) is not None
    assert name in dir(trl_qarl)


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        trl_qarl.NoSuchName  # noqa: B018


def test_type_checking_imports_match_the_lazy_ones():
    tree = ast.parse((ROOT / "trl_qarl" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    imported = {alias.name: node.module for node in block.body for alias in node.names}
    assert imported == trl_qarl._MODULES
    assert set(trl_qarl.__all__) == {*imported, "__version__"}


def test_no_tracked_file_names_a_directory_of_one_machine():
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    local = re.compile(rb"(?<![\w.~-])/(?:work|opt|root|home|Users|tmp/uv)[a-z-]*/[\w.]")
    found = [
        name
        for name in listing.stdout.split("\0")
        if (ROOT / name).is_file() and local.search((ROOT / name).read_bytes())
    ]
    assert found == []


def test_what_tests_share_is_made_by_one_worker(tmp_path):
    # As `make test` runs them.
    (tmp_path / "test_group.py").write_text(
        """
import os
import pytest

@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("number", range(6))
def test_of_a_group(number):
    with open("workers", "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], file=file)
"""
    )
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "-q"]
    result = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 6 and len(set(workers)) == 1
