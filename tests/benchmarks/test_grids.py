"""The table of squared errors in docs/schemes.md."""

import runpy
from pathlib import Path


def test_the_table_is_what_the_command_writes():
    pieces = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/grids.py"))
    page = pieces["PAGE"].read_text()
    assert pieces["fill"](page, "grids", pieces["table"]()) == page, "run `python benchmarks/grids.py`"
