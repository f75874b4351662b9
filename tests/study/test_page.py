import itertools
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from recorded_runs import CONFIGS, report, rewards_run, write_grid, write_run
from trl_qarl.study.runs import Run, read_run
from trl_qarl.study.sentences import describe_differences, find_gaps
from trl_qarl.study.statistics import make_groups


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def grid_page(grid, tmp_path_factory):
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert report(path, grid) == 0
    return path


def read_page(path):
    """Text of the page, which must be well-formed XML but for the document type."""
    page = path.read_text()
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    return page


class Page(HTMLParser):
    """Text, elements, addresses and values of `class` of a page."""

    def __init__(self, page):
        super().__init__()
        self.text, self.tags, self.addresses, self.classes = "", set(), [], set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "srcset", "data")]
        self.classes |= {value for name, value in attrs if name == "class"}

    def handle_data(self, data):
        self.text += data


def test_gaps_are_told_as_ranges_of_logged_steps():
    rows = {step: {"a": None if step in (2, 4, 8, 12) else 1.0} for step in range(2, 14, 2)}
    assert find_gaps(Run("run", {}, rows)) == ["a is not finite at 4 steps: 2 to 4, 8, 12."]


def test_gaps_at_the_same_steps_are_told_once():
    rows = {step: {"a": None, "b": None if step == 2 else 0.0, "c": None} for step in (1, 2)}
    assert find_gaps(Run("run", {}, rows)) == [
        "a, c are not finite at 2 steps: 1 to 2.",
        "b is not finite at 1 step: 2.",
    ]


@pytest.mark.parametrize("metrics", [("reward",), ("reward", "entropy")])
def test_missing_values_are_a_gap(tmp_path, metrics):
    path = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows[9:30]:
        for metric in metrics:
            del row[metric]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert find_gaps(read_run(path)) == [f"{', '.join(metrics)}: nothing logged between steps 9 and 31."]


def test_sentences_name_groups_difference_and_noise():
    finals = {"x": [0.80, 0.81], "y": [0.2, 0.21], "z": [0.8]}
    runs = [rewards_run(seed, [value], scheme=s) for s, values in finals.items() for seed, value in enumerate(values)]
    found = describe_differences(make_groups(runs))
    assert found["exceeds"] == [
        "QaRL, TBPO, x ends at 0.805, QaRL, TBPO, y at 0.205: the difference of 0.6 exceeds the seed noise of 0.0304."
    ]
    assert found["within"] == []
    assert found["unknown"][0] == (
        "QaRL, TBPO, z ends at 0.8, QaRL, TBPO, y at 0.205: the seed noise of this difference of 0.595 cannot be judged, "
        "with one seed of QaRL, TBPO, z."
    )


def test_pairs_that_differ_in_one_setting_come_first():
    finals = {("x", "a"): 0.0, ("x", "b"): 0.1, ("y", "b"): 0.9}
    runs = [
        rewards_run(seed, [final + seed / 1000], scheme=scheme, objective=objective)
        for (scheme, objective), final in finals.items()
        for seed in (0, 1)
    ]
    sentences = describe_differences(make_groups(runs))["exceeds"]
    assert [re.findall(r"difference of ([\d.]+)", sentence)[0] for sentence in sentences] == ["0.8", "0.1", "0.9"]


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


def test_page_says_what_exceeds_the_noise_and_lists_models(grid_page):
    text = Page(read_page(grid_page)).text
    assert "org/model, org/other, w4a16: 10 runs in 4 groups" in text
    assert "Differences that exceed the seed noise: 2" in text
    assert "Differences that do not exceed the seed noise: 1" in text
    assert "These runs train 2 models: org/model, org/other." in text
    assert "Student's distribution" in text
    assert re.search(r"w4a16\s*INT4\s*128 input features\s*16-bit\s*4\.125\b", text)
    assert re.search(r"bf16\s*16-bit\s*-\s*16-bit\s*16\b", text)
    assert "Irregularities" not in text
    assert re.search(r"All groups share: objective tbpo, use_vllm True, learning_rate 1e-05, max_steps 40\.", text)


def test_one_group_is_judged_by_cards_and_several_by_a_table(tmp_path, grid_page):
    pytest.importorskip("matplotlib")
    report(tmp_path / "report.html", write_run(tmp_path / "run", quantize_learner=False, mismatch=0.2))
    page, grid = Page(read_page(tmp_path / "report.html")), Page(read_page(grid_page))
    assert {"card fine", "card bad"} <= page.classes and "card fine" not in grid.classes
    assert re.search(r"Alignednot healthymismatch 0\.3\d", page.text) and "Set quantize_learner=True." in page.text
    assert "No difference" not in page.text and "to compare" not in page.text
    assert re.search(r"Learningfinereward 0\.\d+ → 0\.\d+", page.text)
    assert {"fine", "watch"} <= grid.classes and "Health of each group" in grid.text


def test_differences_of_an_evaluation_are_judged_by_the_same_rule(tmp_path):
    pytest.importorskip("matplotlib")
    paths = []
    for name, solved in (("QaRL", (80, 82, 81)), ("rollout-only", (20, 25, 30)), ("bf16", (79, 83, 80))):
        for seed, correct in enumerate(solved):
            path = write_run(tmp_path / f"{name}-{seed}", **CONFIGS[name], seed=seed)
            (path / "evaluation.json").write_text(json.dumps({"greedy": {"correct": correct, "total": 100}}))
            paths.append(path)
    report(tmp_path / "report.html", *paths)
    text = Page(read_page(tmp_path / "report.html")).text
    assert "Differences of the greedy evaluation" in text and "Differences of the sampled evaluation" not in text
    # s = sqrt((1 + 25) / 2) points, times 2.776 sqrt(2 / 3).
    assert (
        "QaRL, TBPO has a greedy score of 0.81, rollout-only, TBPO of 0.25: the difference of 0.56 exceeds "
        "the seed noise of 0.0817." in text
    )
    assert "has a greedy score of 0.81, bf16, TBPO of 0.807: the difference of 0.00333 does not" in text


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


def test_one_seed_per_group_leaves_noise_unjudged(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [write_run(tmp_path / name, scheme=name) for name in ("fp8", "bf16")]
    report(tmp_path / "report.html", *runs)
    text = Page(read_page(tmp_path / "report.html")).text
    assert "cannot be judged, with one seed of" in text and "exceed the seed noise:" not in text
    assert "No difference of final reward can be judged" in text


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
