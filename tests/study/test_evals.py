import json
import re
from xml.etree import ElementTree

import pytest

from recorded_runs import Page, read_page, report, write_run


def write_eval(path, model="out/w4a16", task="/data/<b>.jsonl", share=0.75, compare=None, **options):
    """A file as `trl-qarl eval` writes it, of four problems."""
    settings = {"vllm": True, "samples": 2, "temperature": 0.6, "top_p": 0.95, **options}
    rows = [
        {"model": name, "task": task, "pass@1": value, "standard_error": 0.25, "scores": [1.0, 1.0, 1.0, 0.0]}
        for name, value in ((model, share), *([compare] if compare else []))
    ]
    differences = {"differences": {task: {"mean": share - compare[1], "standard_error": 0.125}}} if compare else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"options": settings, "results": rows, **differences}))


def test_results_of_eval_in_the_run_and_its_export_are_on_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path / "run")
    write_eval(path / "w4a16" / "eval.json", compare=("/data/run/masters", 0.5))
    write_eval(path / "eval-aime.json", "org/model", "aime24", 0.25, temperature=0, vllm=False)
    (path / "eval.json").write_text('{"results": []}')
    report(tmp_path / "report.html", path)
    html = ElementTree.fromstring(read_page(tmp_path / "report.html").removeprefix("<!DOCTYPE html>"))
    (section,) = (part for part in html.iter("section") if part.get("id") == "evaluation")
    rows = [["".join(cell.itertext()) for cell in row] for row in section.iter("tr")]
    # On a narrow screen a row is a list, and each cell names its column.
    header, *body = section.iter("tr")
    assert all(
        [cell.get("data-column") for cell in row] == ["".join(cell.itertext()) for cell in header] for row in body
    )
    sampled = ["4", "2", "vLLM, temperature 0.6, top_p 0.95"]
    assert rows == [
        ["model", "task", "pass@1", "difference", "problems", "samples of each", "sampling"],
        ["org/model", "aime24", "25.0% ±25.0%", "-", "4", "2", "transformers, greedy"],
        ["out/w4a16", "<b>.jsonl", "75.0% ±25.0%", "+25.0% ±12.5%", *sampled],
        ["run/masters", "<b>.jsonl", "50.0% ±25.0%", "-", *sampled],
    ]
    assert (
        "run: eval.json has another form than trl-qarl eval writes" in Page(read_page(tmp_path / "report.html")).text
    )


def test_results_of_eval_name_the_run_where_there_are_several(tmp_path):
    pytest.importorskip("matplotlib")
    for seed in (0, 1):
        write_eval(write_run(tmp_path / "runs" / f"run{seed}", seed=seed) / "eval.json")
    report(tmp_path / "report.html", tmp_path / "runs")
    text = Page(read_page(tmp_path / "report.html")).text
    assert re.search(r"runmodeltaskpass@1problems.*run0out/w4a16.*run1out/w4a16", text, re.DOTALL)
