import itertools
import json
import re
from xml.etree import ElementTree

import pytest

from recorded_runs import Page, read_page, report, write_run


def test_page_is_self_contained(grid_page):
    text = read_page(grid_page)
    page = Page(text)
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "img", "image", "foreignObject"}
    assert all(address.startswith("#") for address in page.addresses)
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert {path.name for path in grid_page.parent.iterdir()} == {"report.html"}


def test_page_may_load_nothing_and_every_link_has_its_target(grid_page):
    html = ElementTree.fromstring(grid_page.read_text().removeprefix("<!DOCTYPE html>"))
    head, body = html
    policies = [meta for meta in head if meta.get("http-equiv") == "Content-Security-Policy"]
    # Before the style and the title: a policy holds for what comes after it.
    assert [element.tag for element in head][: list(head).index(policies[0]) + 1] == ["meta", "meta"]
    allowed = dict(rule.split(" ", 1) for rule in policies[0].get("content").split("; "))
    assert allowed == {"default-src": "'none'", "style-src": "'unsafe-inline'"}
    assert not [name for element in html.iter() for name in element.attrib if name.startswith("on")]
    ids = [element.get("id") for element in html.iter() if element.get("id")]
    assert len(set(ids)) == len(ids)
    used = {e.get("href")[1:] for e in html.iter() if e.get("href")}
    used |= set(re.findall(r"url\(#([^)]*)\)", grid_page.read_text()))
    assert used <= set(ids) and {e.get("href")[1:] for e in body.find("nav").iter("a")} == {
        section.get("id") for section in body.find("main")
    }
    for figure in body.iter("figure"):
        assert len(list(figure.iter("svg"))) == 1 and figure.find("svg").get("aria-label")
    for table in body.iter("table"):
        assert len({len(row) for row in table.iter("tr")}) == 1 and len(table.findall(".//th")) > 1


def test_colours_follow_the_page_and_belong_to_the_setting(grid_page):
    html = ElementTree.fromstring(grid_page.read_text().removeprefix("<!DOCTYPE html>"))
    (section,) = (part for part in html.iter("section") if part.get("id") == "reward")
    swatches = [span.get("style").partition(";")[0] for span in section.iter("span")]
    assert swatches == [f"border-color: var(--{color})" for color in ("blue", "grey", "green", "orange")]
    drawn = ElementTree.tostring(next(section.iter("svg")), encoding="unicode")
    assert all(f"stroke: var(--{color})" in drawn for color in ("blue", "orange", "grey", "green"))
    # A fixed colour would be unreadable on one of the two backgrounds.
    assert not re.search(r"#[0-9a-fA-F]{6}", drawn)
    assert "prefers-color-scheme: dark" in html.find("head/style").text


def test_png_files_are_written_where_they_are_asked_for(tmp_path):
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path / "run")
    (tmp_path / "out-length.png").write_bytes(b"of an earlier report")
    report(tmp_path / "out.html", path, "--png")
    names = {"reward", "mismatch", "dropped", "length", "time", "ratio", "mismatch_weight"}
    names |= {f"token_{name}" for name in ("ratio", "mismatch_weight")}
    files = {file.name: file.read_bytes() for file in tmp_path.glob("*.png")}
    assert set(files) == {f"out-{name}.png" for name in names}
    assert all(data.startswith(b"\x89PNG") for data in files.values())


def test_worst_completions_of_each_group_are_on_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path / "run")
    rows = [
        {
            "step": step,
            "kind": kind,
            "nats": nats,
            "advantage": 1.0,
            "prompt": "2 +\n<b>",
            "completion": f"⟦{nats}⟧\x00",
        }
        for step, nats in enumerate((1.25, 3.5, 2.75), 1)
        for kind in ("mismatch", "improbable")
    ]
    lines = [json.dumps(row) for row in rows] + ['{"step": 4, "kind": "mismatch", "nats": "NaN"}', '{"step"']
    (path / "worst_completions.jsonl").write_text("\n".join(lines))
    report(tmp_path / "report.html", path)
    text = read_page(tmp_path / "report.html")
    assert text.count("⟦3.5⟧") == text.count("⟦2.75⟧") == 2 and "⟦1.25⟧" not in text
    assert "2 +⏎&lt;b&gt;" in text and "\x00" not in text
    assert "worst_completions.jsonl: 1 unreadable lines" in text and "The last line of worst_completions.jsonl" in text


def test_gaps_zeros_broken_lines_and_missing_metrics_are_on_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"step": step, "reward": None if step in (3, 4) else 0.1 * step, "mismatch/k3": 0.0} for step in range(1, 41)
    ]
    path = write_run(tmp_path / "run", rows=rows)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step"')
    (path / "distributions.jsonl").unlink()
    report(tmp_path / "out.html", path)
    text = Page(read_page(tmp_path / "out.html")).text
    for line in (
        "run: reward is not finite at 2 steps: 3 to 4.",
        "run: The last line of metrics.jsonl is incomplete",
        "No run has a value of entropy.",
        "mismatch/k3 is 0 or below at 40 steps: 1 to 40.",
    ):
        assert line in text, line
    assert "publish/seconds" not in text and "distribution" not in text.lower()


def test_many_pairs_are_folded_and_all_on_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    for index, (scheme, seed) in enumerate(itertools.product("abcdef", (0, 1))):
        rows = [{"step": 40, "reward": index // 2 + seed / 1000}]
        path = write_run(tmp_path / f"{scheme}{seed}", scheme=scheme, seed=seed, rows=rows)
        (path / "distributions.jsonl").unlink()
    report(tmp_path / "report.html", tmp_path)
    page = Page(read_page(tmp_path / "report.html"))
    assert "Differences that exceed the seed noise: 15" in page.text and "5 more" in page.text
    assert page.text.count(" exceeds the seed noise of ") == 15 + 1 and "details" in page.tags


def test_evaluation_is_in_the_tables(tmp_path):
    pytest.importorskip("matplotlib")
    for seed, correct in ((0, 80), (1, 90)):
        path = write_run(tmp_path / f"run{seed}", seed=seed)
        scores = {"greedy": {"correct": correct, "total": 100}, "before": {"correct": 13, "total": 100}}
        (path / "evaluation.json").write_text(json.dumps(scores))
    report(tmp_path / "report.html", tmp_path)
    text = Page(read_page(tmp_path / "report.html")).text
    assert "85.0% (80.0% to 90.0%, 2 runs)" in text and "90 of 100 (90.0%)" in text and "13 of 100 (13.0%)" in text


def test_what_runs_wrote_is_escaped(tmp_path):
    pytest.importorskip("matplotlib")
    evil = "<script>alert('$x_$')</script>&\"\x07\ud800"
    path = write_run(tmp_path / "a<b>&amp;", scheme=evil, model="$\\frac", versions={evil: evil})
    (path / "evaluation.json").write_text(json.dumps({evil: {"correct": 1, "total": 2}}))
    rows = [{"step": 40, "reward": 1, evil: None}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report(tmp_path / "report.html", path)
    page = Page(read_page(tmp_path / "report.html"))
    assert "script" not in page.tags and "b" not in page.tags
    assert "<script>alert('$x_$')</script>&\"\N{REPLACEMENT CHARACTER}" in page.text and "a<b>&amp;" in page.text


def test_page_over_an_earlier_one_is_the_same(grid, grid_page):
    before = grid_page.read_bytes()
    report(grid_page, grid)
    assert grid_page.read_bytes() == before
