import json
import re
from xml.etree import ElementTree

import pytest

from testing_utils.recorded_runs import Page, read_page, report, write_run


def test_page_is_self_contained(grid_page):
    text = read_page(grid_page)
    page = Page(text)
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "img", "image", "foreignObject"}
    assert all(address.startswith("#") for address in page.addresses)
    # Names of SVG's namespaces are no addresses.
    assert "://" not in re.sub(r' xmlns(:xlink)?="[^"]*"', "", text) and "@import" not in text
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert {path.name for path in grid_page.parent.iterdir()} == {"report.html"}
    # A screen reader says what a picture shows.
    assert text.count("<svg") == text.count('role="img" aria-label="') > 1


@pytest.mark.slow
def test_png_files_are_written_where_they_are_asked_for(tmp_path):
    path = write_run(tmp_path / "run")
    (tmp_path / "out-length.png").write_bytes(b"of an earlier report")
    report(tmp_path / "out.html", path, "--png")
    names = {"reward", "mismatch", "dropped", "distributions"}
    files = {file.name: file.read_bytes() for file in tmp_path.glob("*.png")}
    assert set(files) == {f"out-{name}.png" for name in names}
    assert all(data.startswith(b"\x89PNG") for data in files.values())


def test_gaps_zeros_broken_lines_and_missing_metrics_are_on_the_page(tmp_path):
    rows = [
        {"step": step, "reward": None if step in (3, 4) else 0.1 * step, "quant/code_flip_rate": 0.0}
        for step in range(1, 41)
    ]
    path = write_run(tmp_path / "run", rows=rows)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step"')
    (path / "distributions.jsonl").unlink()
    report(tmp_path / "out.html", path)
    text = Page(read_page(tmp_path / "out.html")).text
    for line in (
        "run: reward: not finite at steps 3, 4.",
        "run: The last line of metrics.jsonl is incomplete",
        "run: quant/code_flip_rate: 0 at steps 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and more.",
    ):
        assert line in text, line
    assert "publish/seconds" not in text and "distribution" not in text.lower()


def test_evaluation_is_in_the_tables(tmp_path):
    for seed, correct in ((0, 80), (1, 90)):
        path = write_run(tmp_path / f"run{seed}", seed=seed)
        scores = {"greedy": {"correct": correct, "total": 100}, "before": {"correct": 13, "total": 100}}
        (path / "evaluation.json").write_text(json.dumps(scores))
    report(tmp_path / "report.html", tmp_path)
    text = Page(read_page(tmp_path / "report.html")).text
    assert "85.0% (80.0% to 90.0%)" in text and "90 of 100 (90.0%)" in text and "13 of 100 (13.0%)" in text


def test_what_runs_wrote_is_escaped(tmp_path):
    evil = "<script>alert('$x_$')</script>&\"\x07"
    path = write_run(tmp_path / "a<b>&amp;", scheme=evil, model="$\\frac", versions={evil: evil})
    (path / "evaluation.json").write_text(json.dumps({evil: {"correct": 1, "total": 2}}))
    rows = [{"step": 40, "reward": 1, evil: None}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report(tmp_path / "report.html", path)
    page = Page(read_page(tmp_path / "report.html"))
    assert "script" not in page.tags and "b" not in page.tags
    assert "<script>alert('$x_$')</script>&\"\N{REPLACEMENT CHARACTER}" in page.text and "a<b>&amp;" in page.text


def test_page_says_what_exceeds_the_noise_and_lists_models(grid_page):
    text = Page(read_page(grid_page)).text
    assert "org/model, org/other: 10 runs in 4 groups" in text
    assert "2 differences of final reward above the seed noise, 1 within it, 0 that cannot be judged" in text
    assert "Differences that exceed the seed noise: 2" in text
    assert "Differences that do not exceed the seed noise: 1" in text
    assert "These runs have 2 models: org/model; org/other." in text
    assert "Student's distribution" in text
    assert "Irregularities" not in text


@pytest.mark.slow
def test_one_group_is_judged_by_cards_and_several_by_a_table(tmp_path, grid_page):
    report(tmp_path / "report.html", write_run(tmp_path / "run", quantize_learner=False, mismatch=0.2))
    page, grid = Page(read_page(tmp_path / "report.html")), Page(read_page(grid_page))
    assert {"card fine", "card bad"} <= page.classes and "card fine" not in grid.classes
    assert re.search(r"Aligned\s*not healthy\s*mismatch 0\.3\d", page.text)
    assert "Set quantize_learner=True." in page.text
    assert "No difference" not in page.text and "to compare" not in page.text
    assert re.search(r"Learning\s*fine\s*reward 0\.\d+ → 0\.\d+", page.text)
    assert {"fine", "watch"} <= grid.classes and "Health of each group" in grid.text


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


@pytest.mark.slow
def test_results_of_eval_in_the_run_and_its_export_are_on_the_page(tmp_path):
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
    assert "run: eval.json has another form" in "".join(html.itertext())


def section_of(path, name):
    """Text of a section of the page, its tables as lists of rows, and the number of its panels."""
    html = ElementTree.fromstring(read_page(path).removeprefix("<!DOCTYPE html>"))
    for section in html.iter("section"):
        if section.get("id") == name:
            rows = [["".join(cell.itertext()) for cell in row] for row in section.iter("tr")]
            svgs = [element for element in section.iter() if element.tag.endswith("svg")]
            return " ".join("".join(section.itertext()).split()), rows, len(svgs)
    return None


MISMATCH = ("mismatch/abs_logp_mean", "mismatch/abs_logp_max", "mismatch/k3")


def write_changed_run(path, change, **config):
    """A run whose rows have gone through `change`, a function of the step that returns metrics."""
    write_run(path, **config)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row | change(row["step"])) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_exact_run_says_that_its_mismatch_is_zero(tmp_path):
    path = write_changed_run(tmp_path / "run", lambda step: dict.fromkeys(MISMATCH, 0.0))
    report(tmp_path / "report.html", path)
    text, _, num_panels = section_of(tmp_path / "report.html", "mismatch-between-learner-and-rollout")
    assert num_panels == 0 and "Exactly 0 at every logged update: mean |log-prob difference|" in text
    assert "Red" not in text
    assert section_of(tmp_path / "report.html", "irregularities") is None


@pytest.mark.slow
def test_models_of_one_content_are_one_model(tmp_path):
    pairs = [("one/base_model", "a" * 64), ("two/base_model", "a" * 64), ("three/base_model", "b" * 64)]
    for seed, (model, digest) in enumerate(pairs):
        write_run(tmp_path / "runs" / f"run{seed}", seed=seed, model=model, model_sha256=digest)
    report(tmp_path / "report.html", tmp_path / "runs")
    text = Page(read_page(tmp_path / "report.html")).text
    assert "3 runs in 2 groups" in text and "These runs have 2 models: one/base_model; three/base_model." in text
