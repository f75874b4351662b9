"""The notebook of the quickstart: it runs, and the outputs stored in it are fit to be read."""

import json
import re
import sys
from pathlib import Path

import pytest

from testing_utils import make_tiny_model, path_without


NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"


@pytest.mark.slow
def test_every_cell_runs_with_a_tiny_model(tmp_path, monkeypatch):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    import nbformat
    from nbclient import NotebookClient

    kernel = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "x"}
    folder = tmp_path / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(kernel | {"language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("NOTEBOOK_MODEL", make_tiny_model(tmp_path / "model"))
    monkeypatch.setenv("NOTEBOOK_UPDATES", "2")
    monkeypatch.setenv("PYTHONPATH", path_without(tmp_path, "vllm", "deepspeed", "bitsandbytes"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=600, startup_timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("trained 2 of 2 updates" in text for text in texts)
    assert re.search(r"\d+ of 20 held-out sums solved", "".join(texts))
    assert (tmp_path / "outputs" / "notebook" / "w4a16" / "config.json").is_file()
