"""Names that our sources import from other packages; test_vllm.py has those of vLLM."""

import pytest

from seams import imported_names, resolve


@pytest.mark.parametrize(
    ("module", "name"),
    [each for package in ("peft", "torchao", "transformers", "trl") for each in imported_names(package)],
)
def test_what_is_imported_is_there(module, name):
    pytest.importorskip(module.partition(".")[0])
    assert resolve(module, name) is not None
