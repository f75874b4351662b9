import json
import shutil

import pytest

from recorded_runs import report, write_run


def break_run(path, name):
    if name == "missing":
        shutil.rmtree(path)
    elif name == "a file":
        shutil.rmtree(path)
        path.write_text("")
    elif name == "empty":
        shutil.rmtree(path)
        path.mkdir()
    elif name == "no rows":
        (path / "metrics.jsonl").write_text("")
    elif name == "only a half row":
        (path / "metrics.jsonl").write_text('{"step"')
    elif name == "no configuration":
        (path / "run.json").unlink()
    elif name == "half a configuration":
        (path / "run.json").write_text('{"seed": 0, ')
    elif name == "a list as configuration":
        (path / "run.json").write_text("[]")
    elif name == "a seed that is a list":
        (path / "run.json").write_text('{"seed": [1]}')
    elif name == "only cells without rows":
        (path / "metrics.jsonl").rename(path / "cell.json")
        path.rename(path.parent / "cell")
        path.mkdir()
        (path.parent / "cell").rename(path / "cell")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "does not exist; give directories"),
        ("a file", "is not a directory; give directories"),
        ("empty", "has no metrics.jsonl, nor has a directory in it"),
        ("no rows", "has no complete row"),
        ("only a half row", "has no complete row"),
        ("no configuration", "has no run.json"),
        ("half a configuration", "run.json is not JSON"),
        ("a list as configuration", "must hold a mapping"),
        ("a seed that is a list", "`seed` must be one value, not '[1]'"),
        ("only cells without rows", "has no metrics.jsonl: no step of it was logged"),
    ],
)
def test_unusable_run_is_one_line_and_exit_code_two(tmp_path, capsys, name, message):
    path = write_run(tmp_path / "run")
    break_run(path, name)
    with pytest.raises(SystemExit, match="2"):
        report(tmp_path / "report.html", path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trl-qarl: error: ") and message in line and "run" in line
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("output", "message"), [("folder", "must name a file that ends in .html"), ("a.pdf", "'a.pdf'")]
)
def test_output_that_cannot_be_a_page_is_one_line(tmp_path, capsys, monkeypatch, output, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit, match="2"):
        report(output, write_run(tmp_path / "run"))
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_run_that_is_given_twice_is_one_line(tmp_path, capsys):
    path = write_run(tmp_path / "run")
    with pytest.raises(SystemExit, match="2"):
        report(tmp_path / "report.html", path, path)
    assert "run is given twice" in capsys.readouterr().err


def test_missing_matplotlib_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        report(tmp_path / "report.html", write_run(tmp_path / "run"))
    (line,) = capsys.readouterr().err.splitlines()
    assert 'Run `pip install "trl-qarl[report]"`.' in line


@pytest.mark.parametrize(
    "config", ['{"group_size": [128]}', '{"group_size": "128"}', '{"group_size": 0}', '{"a":' * 20_000]
)
def test_configuration_of_another_form_is_one_line(tmp_path, capsys, config):
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path / "run")
    (path / "run.json").write_text(config)
    with pytest.raises(SystemExit, match="2"):
        report(tmp_path / "report.html", path)
    (line,) = capsys.readouterr().err.splitlines()
    assert "run.json" in line


def test_one_run_is_summarized_and_the_address_is_printed(tmp_path, capsys):
    report(tmp_path / "a b.html", write_run(tmp_path / "run"))
    first, last = capsys.readouterr().out.splitlines()
    assert (
        first.startswith("reward 0.") and "mismatch 0.0" in first and first.endswith("Not fine: Updating (look at it)")
    )
    assert last == f"1 run in 1 group: {(tmp_path / 'a b.html').as_uri()}" and "a%20b.html" in last


def test_a_run_is_followed_until_it_is_finished(tmp_path, monkeypatch, capsys):
    rows = [{"step": step, "time": 1e9, "reward": 0.1 * step} for step in range(1, 5)]
    path = write_run(tmp_path / "run", rows=[], max_steps=4)
    (path / "distributions.jsonl").unlink()
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--timeout", "5"], "needs --follow"),
        (["--follow", "--timeout", "-1"], "must be positive"),
        (["--follow"], "not a directory"),
    ],
)
def test_following_what_cannot_be_followed_is_one_line(tmp_path, capsys, options, message):
    path = tmp_path / "missing" if options == ["--follow"] else write_run(tmp_path / "run")
    with pytest.raises(SystemExit, match="2"):
        report(tmp_path / "report.html", path, *options)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
