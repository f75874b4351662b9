"""Tables of benchmarks/schemes.md."""

import runpy
from pathlib import Path

import pytest


@pytest.mark.parametrize(("name", "make"), [("grids", "table"), ("choose", "choices")])
def test_the_table_is_what_the_command_writes(name, make):
    pieces = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/grids.py"))
    page = pieces["PAGE"].read_text()
    assert pieces["fill"](page, name, pieces[make]()) == page, f"run `python benchmarks/grids.py {name}`"
