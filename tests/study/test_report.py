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
    pytest.importorskip("matplotlib")
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
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit, match="2"):
        report(output, write_run(tmp_path / "run"))
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_run_that_is_given_twice_is_one_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
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
    path = write_run(tmp_path / "run")
    (path / "run.json").write_text(config)
    with pytest.raises(SystemExit, match="2"):
        report(tmp_path / "report.html", path)
    (line,) = capsys.readouterr().err.splitlines()
    assert "run.json" in line
