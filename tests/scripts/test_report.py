import json
import shutil
from pathlib import Path

import pytest

from testing_utils.recorded_runs import report, write_run


def refused(capsys, *argv):
    with pytest.raises(SystemExit, match="2"):
        report(*argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trl-qarl: error: ")
    return line


@pytest.mark.parametrize(
    ("file", "text", "names"),
    [
        (None, None, "is not a directory"),
        (".", None, "has no metrics.jsonl"),
        ("metrics.jsonl", "", "has no complete row"),
        ("metrics.jsonl", '{"step"', "has no complete row"),
        ("run.json", None, "has no run.json"),
        ("run.json", '{"seed": 0, ', "run.json does not hold"),
        ("run.json", "3", "run.json"),
    ],
)
def test_a_run_that_cannot_be_read_is_named(tmp_path, capsys, file, text, names):
    path = write_run(tmp_path / "run")
    if file is None or file == ".":
        shutil.rmtree(path)
        (path if file else tmp_path).mkdir(exist_ok=True)
    elif text is None:
        (path / file).unlink()
    else:
        (path / file).write_text(text)
    assert names in refused(capsys, tmp_path / "report.html", path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("output", "options", "names"),
    [
        ("a.pdf", [], "'a.pdf'"),
        ("a.html", ["--timeout", "5"], "--follow"),
        ("a.html", ["--follow", "--timeout", "-1"], "positive"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path, capsys, monkeypatch, output, options, names):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    assert names in refused(capsys, output, "run", *options)


def test_missing_matplotlib_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "trl-qarl[report]" in refused(capsys, tmp_path / "report.html", write_run(tmp_path / "run"))


def test_one_run_is_summarized_and_the_address_is_printed(tmp_path, capsys):
    report(tmp_path / "a b.html", write_run(tmp_path / "run"))
    first, last = capsys.readouterr().out.splitlines()
    assert (
        first.startswith("QaRL, tbpo, w4a16, step 40 of 40: reward 0.")
        and "mismatch 0.0" in first
        and "Not fine: Updating" in first
    )
    assert last == (tmp_path / "a b.html").as_uri() and "a%20b.html" in last


def test_a_run_is_followed_until_it_is_finished(tmp_path, monkeypatch, capsys):
    rows = [{"step": step, "time": 1e9, "reward": 0.1 * step} for step in range(1, 5)]
    path = write_run(tmp_path / "run", rows=[], max_steps=4)
    (path / "distributions.jsonl").unlink()

    def find(folder, pattern, glob=Path.glob):
        """Finds, too, a file that is gone before its size is read."""
        return [*glob(folder, pattern), *[folder / "gone"] * (pattern == "metrics.jsonl")]

    monkeypatch.setattr(Path, "glob", find)
    output = tmp_path / "report.html"
    pages = []

    def train_on(seconds):
        """A run that logs two rows while the command sleeps, and ends."""
        pages.append(output.read_text() if output.exists() else None)
        with open(path / "metrics.jsonl", "a") as file:
            for row in rows[:2] or [{"step": 4, "train_runtime": 1.0}]:
                file.write(json.dumps(row) + "\n")
        del rows[:2]

    monkeypatch.setattr("trl_qarl.scripts.report.time.sleep", train_on)
    assert report(output, path, "--follow") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Following: {output.as_uri()}" and "has no complete row" in lines[1]
    steps = [line.split(", step ")[1].split(":")[0] for line in lines[2:-1]]
    assert steps == ["2 of 4", "4 of 4", "4 of 4"] and lines[-1] == "All runs are finished."
    refreshing = ['http-equiv="refresh"' in page for page in pages if page]
    assert refreshing and all(refreshing) and 'http-equiv="refresh"' not in output.read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "run"]


def test_following_ends_with_ctrl_c_or_after_the_timeout(tmp_path, monkeypatch, capsys):
    path = write_run(tmp_path / "run", rows=[])

    def interrupt(seconds):
        raise KeyboardInterrupt

    assert report(tmp_path / "report.html", path, "--follow", "--timeout", "0.01") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Nothing was logged for 0.01 seconds."
    monkeypatch.setattr("trl_qarl.scripts.report.time.sleep", interrupt)
    assert report(tmp_path / "report.html", path, "--follow") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Stopped."
