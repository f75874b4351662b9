import json
from xml.etree import ElementTree

import pytest

from trl_qarl.cli import main
from trl_qarl.scripts.report import read_run


CONFIG = {"model": "org/model", "loss_type": "tbpo", "scheme": "w4a16", "quantize_learner": True, "max_steps": 8}


def write_run(path, rows=None, **config):
    """A folder as a run of 8 updates writes it. Returns its path."""
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({**CONFIG, "seed": 0, **config}))
    same = {"tbpo/dropped/total": 0.1, "quant/code_flip_rate": 1e-4}
    same |= {"rollout/seconds": 2.0, "step/optimizer_seconds": 0.5}
    steps = range(1, 9)
    rows = rows or [{"step": n, "reward": n / 10, "mismatch/abs_logp_mean": 0.01 * n, **same} for n in steps]
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return path


def report(output, *run_dirs):
    """Run the command; skip the test where matplotlib is not installed."""
    pytest.importorskip("matplotlib")
    return main(["report", *map(str, run_dirs), "--output", str(output)])


def refused(capsys, *argv):
    with pytest.raises(SystemExit, match="2"):
        report(*argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trl-qarl: error: ")
    return line


def read_page(path):
    """Text of the page, which must be well-formed XML but for the document type, and its elements."""
    page = path.read_text()
    return page, ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>")).iter()


def test_two_runs_are_drawn_and_listed(tmp_path, capsys):
    runs = write_run(tmp_path / "first"), write_run(tmp_path / "second", seed=1)
    assert report(tmp_path / "a b.html", *runs) == 0
    (page, _), lines = read_page(tmp_path / "a b.html"), capsys.readouterr().out.splitlines()
    said = "step 8 of 8, reward 0.75"
    assert lines == [f"first: {said}", f"second: {said}", (tmp_path / "a b.html").as_uri()]
    assert "<h1>2 runs</h1>" in page and page.count("first") >= 3 and page.count("second") >= 3
    for title in ("mean reward", "mismatch, nats", "TBPO drops", "codes that change", "seconds, means"):
        assert title in page
    assert "<td>org/model</td>" in page and "not logged" not in page


def test_a_page_loads_nothing(tmp_path):
    report(tmp_path / "r.html", write_run(tmp_path / "run"))
    _, elements = read_page(tmp_path / "r.html")
    for element in elements:
        assert element.tag.rpartition("}")[2] not in ("script", "img", "link", "iframe")
        for name, value in element.attrib.items():
            is_address = name.rpartition("}")[2] in ("src", "href", "action", "srcset")
            assert not is_address or value.startswith("#")


def test_what_runs_write_is_escaped_on_page_and_terminal(tmp_path, capsys):
    bad = "\x1b[31m<script>alert(1)</script>$x^2$ & more"
    run = write_run(tmp_path / "run$\x1b[2J<b>$", model=bad, max_steps=bad)
    report(tmp_path / "r.html", run)
    (page, _), printed = read_page(tmp_path / "r.html"), capsys.readouterr().out
    assert "\x1b" not in page + printed and "<script" not in page and "<b>" not in page
    assert "&lt;script&gt;" in page and "\ufffd[2J" in printed and "\ufffd[31m" in printed
    report(tmp_path / "r.html", run, write_run(tmp_path / "$other$"))
    assert "$other$" in read_page(tmp_path / "r.html")[0]


def test_half_lines_and_resumed_steps_are_read(tmp_path, capsys):
    rows = [{"step": step, "reward": 0.0} for step in (1, 2, 3, 4)]
    rows += [{"step": 3, "reward": 0.5}, {"step": 4, "reward": None}, '{"step": 5, "rew', "[1]", '{"step": 1e999}']
    assert report(tmp_path / "r.html", write_run(tmp_path / "run", rows)) == 0
    assert "step 4 of 8, reward -" in capsys.readouterr().out
    rewards = read_run(tmp_path / "run").metrics["reward"]
    assert [*rewards] == [1, 2, 3, 4] and rewards[3] == 0.5 and rewards[4] != rewards[4]


def test_zeros_and_missing_metrics_are_said(tmp_path):
    rows = [{"step": step, "reward": 1.0, "mismatch/abs_logp_mean": 0.0} for step in (1, 2)]
    report(tmp_path / "r.html", write_run(tmp_path / "run", rows))
    page, _ = read_page(tmp_path / "r.html")
    assert page.count("0 at every update") == 1 and page.count("not logged") == 3


@pytest.mark.parametrize(
    ("file", "text", "names"),
    [
        ("metrics.jsonl", None, "does not exist"),
        ("metrics.jsonl", "", "has no complete row"),
        ("metrics.jsonl", '{"step"', "has no complete row"),
        ("run.json", '{"seed": 0, ', "is not the record of a run"),
        ("run.json", "3", "is not the record of a run"),
    ],
)
def test_a_run_that_cannot_be_read_is_named(tmp_path, capsys, file, text, names):
    path = write_run(tmp_path / "run")
    (path / file).unlink() if text is None else (path / file).write_text(text)
    line = refused(capsys, tmp_path / "report.html", path)
    assert names in line and file in line and not (tmp_path / "report.html").exists()


def test_the_suffix_of_a_picture_decides_its_format(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    report(tmp_path / "report.png", run)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG") and "report.png" in capsys.readouterr().out
    assert "Format 'txt' is not supported" in refused(capsys, tmp_path / "report.txt", run)


def test_missing_matplotlib_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trl_qarl.scripts.report.find_spec", lambda name: None)
    assert '".[report]"' in refused(capsys, tmp_path / "report.html", write_run(tmp_path / "run"))
