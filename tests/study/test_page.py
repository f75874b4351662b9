import itertools
import json
import re
from xml.etree import ElementTree

import pytest

from recorded_runs import CONFIGS, Page, read_page, report, write_run


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
    (section,) = (part for part in html.iter("section") if part.get("id") == "reward-and-entropy")
    swatches = [span.get("style").partition(";")[0] for span in section.iter("span")]
    assert swatches == [f"border-color: var(--{color})" for color in ("blue", "grey", "green", "orange")]
    style = html.find("head/style").text
    drawn = set(re.findall(r"(\w+): (#[0-9a-f]{6})", ElementTree.tostring(body_of(html), encoding="unicode")))
    # A fixed colour would be unreadable on one of the two backgrounds.
    for kind, color in drawn:
        assert f'svg [style*="{kind}: {color}"] {{ {kind}: var(--' in style
    for color in ("blue", "orange", "grey", "green"):
        light = re.search(rf"--{color}: (#\w+)", style)[1]
        assert ("stroke", light) in drawn and f'"stroke: {light}"] {{ stroke: var(--{color}) !important' in style
    assert "prefers-color-scheme: dark" in style


def body_of(html):
    return html.find("body")


def test_png_files_are_written_where_they_are_asked_for(tmp_path):
    path = write_run(tmp_path / "run")
    (tmp_path / "out-length.png").write_bytes(b"of an earlier report")
    report(tmp_path / "out.html", path, "--png")
    names = {"reward", "mismatch", "dropped", "ratio", "mismatch_weight"}
    names |= {f"token_{name}" for name in ("ratio", "mismatch_weight")}
    files = {file.name: file.read_bytes() for file in tmp_path.glob("*.png")}
    assert set(files) == {f"out-{name}.png" for name in names}
    assert all(data.startswith(b"\x89PNG") for data in files.values())


def test_worst_completions_of_each_group_are_on_the_page(tmp_path):
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
        "run: reward is not finite at 2 steps: 3 to 4.",
        "run: The last line of metrics.jsonl is incomplete",
        "No run has a value of entropy.",
        "quant/code_flip_rate is 0 at 39 steps: 2 to 40.",
    ):
        assert line in text, line
    assert "publish/seconds" not in text and "distribution" not in text.lower()


def test_many_pairs_are_folded_and_all_on_the_page(tmp_path):
    for index, (scheme, seed) in enumerate(itertools.product("abcdef", (0, 1))):
        rows = [{"step": 40, "reward": index // 2 + seed / 1000}]
        path = write_run(tmp_path / f"{scheme}{seed}", scheme=scheme, seed=seed, rows=rows)
        (path / "distributions.jsonl").unlink()
    report(tmp_path / "report.html", tmp_path)
    page = Page(read_page(tmp_path / "report.html"))
    assert "Differences that exceed the seed noise: 15" in page.text and "5 more" in page.text
    assert page.text.count(" exceeds the seed noise of ") == 15 + 1 and "details" in page.tags


def test_evaluation_is_in_the_tables(tmp_path):
    for seed, correct in ((0, 80), (1, 90)):
        path = write_run(tmp_path / f"run{seed}", seed=seed)
        scores = {"greedy": {"correct": correct, "total": 100}, "before": {"correct": 13, "total": 100}}
        (path / "evaluation.json").write_text(json.dumps(scores))
    report(tmp_path / "report.html", tmp_path)
    text = Page(read_page(tmp_path / "report.html")).text
    assert "85.0% (80.0% to 90.0%, 2 runs)" in text and "90 of 100 (90.0%)" in text and "13 of 100 (13.0%)" in text


def test_what_runs_wrote_is_escaped(tmp_path):
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


def test_page_says_what_exceeds_the_noise_and_lists_models(grid_page):
    text = Page(read_page(grid_page)).text
    assert "org/model, org/other, w4a16: 10 runs in 4 groups" in text
    assert "Differences that exceed the seed noise: 2" in text
    assert "Differences that do not exceed the seed noise: 1" in text
    assert "These runs train 2 models: org/model, org/other." in text
    assert "Student's distribution" in text
    assert re.search(r"w4a16\s*INT4, signed scales\s*128 input features\s*16-bit\s*4\.125\b", text)
    assert re.search(r"bf16\s*16-bit\s*-\s*16-bit\s*16\b", text)
    assert "Irregularities" not in text
    assert re.search(r"All groups share: objective tbpo, use_vllm True, learning_rate 1e-05, max_steps 40\.", text)


def test_one_group_is_judged_by_cards_and_several_by_a_table(tmp_path, grid_page):
    report(tmp_path / "report.html", write_run(tmp_path / "run", quantize_learner=False, mismatch=0.2))
    page, grid = Page(read_page(tmp_path / "report.html")), Page(read_page(grid_page))
    assert {"card fine", "card bad"} <= page.classes and "card fine" not in grid.classes
    assert (
        re.search(r"Aligned\s*not healthy\s*mismatch 0\.3\d", page.text) and "Set quantize_learner=True." in page.text
    )
    assert "No difference" not in page.text and "to compare" not in page.text
    assert re.search(r"Learning\s*fine\s*reward 0\.\d+ → 0\.\d+", page.text)
    assert {"fine", "watch"} <= grid.classes and "Health of each group" in grid.text


def test_differences_of_an_evaluation_are_judged_by_the_same_rule(tmp_path):
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


def test_one_seed_per_group_leaves_noise_unjudged(tmp_path):
    runs = [write_run(tmp_path / name, scheme=name) for name in ("fp8", "bf16")]
    report(tmp_path / "report.html", *runs)
    text = Page(read_page(tmp_path / "report.html")).text
    assert "cannot be judged, with one seed of" in text and "exceed the seed noise:" not in text
    assert "No difference of final reward can be judged" in text


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
    for seed in (0, 1):
        write_eval(write_run(tmp_path / "runs" / f"run{seed}", seed=seed) / "eval.json")
    report(tmp_path / "report.html", tmp_path / "runs")
    text = Page(read_page(tmp_path / "report.html")).text
    assert re.search(r"runmodeltaskpass@1problems.*run0out/w4a16.*run1out/w4a16", text, re.DOTALL)


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


def test_exact_run_says_that_its_mismatch_is_zero(tmp_path):
    path = write_changed_run(tmp_path / "run", lambda step: dict.fromkeys(MISMATCH, 0.0))
    worst = [
        {"step": 1, "kind": kind, "nats": nats, "advantage": 1.0, "prompt": "2 + 2", "completion": f"⟦{kind}⟧"}
        for kind, nats in (("mismatch", 0.0), ("improbable", 6.0))
    ]
    (path / "worst_completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in worst))
    report(tmp_path / "report.html", path)
    text, _, num_panels = section_of(tmp_path / "report.html", "mismatch-between-learner-and-rollout")
    assert num_panels == 0 and "Exactly 0 at every logged update: mean |log-prob difference|" in text
    assert "triangle" not in text and "Red" not in text
    assert section_of(tmp_path / "report.html", "irregularities") is None
    _, rows, _ = section_of(tmp_path / "report.html", "worst-completions")
    assert [row[3] for row in rows[1:]] == ["improbable"]


def test_exact_group_is_said_to_be_next_to_one_that_is_drawn(tmp_path):
    exact = write_changed_run(tmp_path / "exact", lambda step: dict.fromkeys(MISMATCH, 0.0))
    report(tmp_path / "report.html", exact, write_run(tmp_path / "other", quantize_learner=False))
    text, _, num_panels = section_of(tmp_path / "report.html", "mismatch-between-learner-and-rollout")
    assert num_panels == 3 and "QaRL, TBPO: exactly 0 at every logged update: mean" in text and "triangle" not in text


def test_updates_that_change_nothing_are_irregular_but_for_the_first(tmp_path):

    def change(step):
        value = 0.0 if step in (1, 7) else 1e-3
        return {"quant/code_flip_rate": value, "quant/update_to_step": 0.0 if step == 1 else 1e-4}

    report(tmp_path / "report.html", write_changed_run(tmp_path / "run", change))
    text, _, _ = section_of(tmp_path / "report.html", "irregularities")
    assert text == "Irregularities run: quant/code_flip_rate is 0 at 1 step: 7."


@pytest.mark.parametrize(("rate", "is_red"), [(1e-3, False), (1e-8, True)])
def test_caption_names_red_where_something_is_red(tmp_path, rate, is_red):
    path = write_changed_run(tmp_path / "run", lambda step: {"quant/code_flip_rate": rate * (1 + step / 40)})
    report(tmp_path / "report.html", path)
    text, _, _ = section_of(tmp_path / "report.html", "codes-changed")
    assert ("Red: the low-bit policy is stalled." in text) == is_red
    assert ("fill: #cf222e" in read_page(tmp_path / "report.html").partition('id="codes-changed"')[2]) == is_red


def test_rows_of_panels_are_full(grid_page):
    html = ElementTree.fromstring(read_page(grid_page).removeprefix("<!DOCTYPE html>"))
    grids = [div for div in html.iter("div") if (div.get("class") or "").startswith("panels")]
    assert {len(div) for div in grids} >= {2, 3, 4}
    for div in grids:
        columns = 2 if div.get("class") == "panels wide" else 3
        assert len(div) % columns == 0


def test_times_of_a_run_are_a_table(tmp_path):
    report(tmp_path / "report.html", write_run(tmp_path / "run"))
    text, rows, num_panels = section_of(tmp_path / "report.html", "time")
    assert num_panels == 0 and "but the optimizer" not in text
    assert rows[0] == ["group", "update without optimizer, s", "weight sync, s", "tokens per second of rollouts"]
    assert rows[1][0] == "QaRL, TBPO" and 8 < float(rows[1][1]) < 9 and 0.4 < float(rows[1][2]) < 0.5


def test_lists_and_what_is_not_set_are_words_in_tables(tmp_path):
    paths = [
        write_run(tmp_path / "a", grids=["int4-signed", "int8"], scheme="mixed"),
        write_run(tmp_path / "b", grids=None, group_size=None, scheme="w8a16"),
    ]
    report(tmp_path / "report.html", *paths)
    _, rows, _ = section_of(tmp_path / "report.html", "groups-and-runs")
    cells = [dict(zip(rows[0], row, strict=True)) for row in rows[1:3]]
    assert [(row["grids"], row["group_size"]) for row in cells] == [("int4-signed, int8", "128"), ("-", "-")]


def test_labels_of_groups_are_not_broken_inside_words(tmp_path):
    paths = [write_run(tmp_path / name, model=f"outputs/{name}_quickstart/base_model") for name in ("a", "b")]
    report(tmp_path / "report.html", *paths)
    html = ElementTree.fromstring(read_page(tmp_path / "report.html").removeprefix("<!DOCTYPE html>"))
    (figure,) = (element for element in html.iter("figure") if element.get("class") == "result")
    texts = {element.text for element in figure.iter() if element.tag.endswith("text")}
    assert {"outputs/a_quickstart/base_model", "outputs/b_quickstart/base_model"} <= texts


def test_models_of_one_content_are_one_model(tmp_path):
    pairs = [("one/base_model", "a" * 64), ("two/base_model", "a" * 64), ("three/base_model", "b" * 64)]
    for seed, (model, digest) in enumerate(pairs):
        write_run(tmp_path / "runs" / f"run{seed}", seed=seed, model=model, model_sha256=digest)
    report(tmp_path / "report.html", tmp_path / "runs")
    text = Page(read_page(tmp_path / "report.html")).text
    assert "3 runs in 2 groups" in text and "These runs train 2 models: one/base_model, three/base_model." in text
