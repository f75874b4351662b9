"""Installed versions, and the two messages of torchao's import that are hidden from users."""

import logging
import subprocess
import sys

import pytest
import torch

from trl_qarl import packages


OUR_PYTHON = sys.implementation.cache_tag
IMPORT = "import trl_qarl.quantization.tensors"


def stderr_of(*arguments):
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    return result.stderr


@pytest.mark.slow
def test_a_command_says_nothing_of_torchao():
    said = stderr_of("-m", "trl_qarl.cli", "env")
    assert "torchao" not in said and "register_constant" not in said and "Failed to load" not in said


@pytest.mark.slow
def test_who_imports_torchao_first_hears_what_it_says():
    code = f"import logging, sys, torchao; print('ours:', file=sys.stderr); {IMPORT}"
    code += "; assert not logging.getLogger('torchao').filters"
    assert stderr_of("-c", code).partition("ours:")[2].strip() == ""
    assert "Failed to load" not in stderr_of("-c", IMPORT)
    code = "import trl_qarl, logging; logging.getLogger('torchao').warning('about %s', 'you')"
    assert stderr_of("-c", code).strip() == "about you"


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
