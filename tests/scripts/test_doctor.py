import json

import pytest

from testing_utils import make_tiny_config
from trl_qarl.cli import main


@pytest.fixture
def config_only(tmp_path):
    """Folder with the configuration of a tiny model and no weights."""
    make_tiny_config("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_is_judged_by_its_configuration(config_only, capsys):
    assert main(["doctor", "--model", str(config_only), "--scheme", "w8a8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in ("ok", "warning") for line in lines[:-1])
    assert sum("kernel w8a8" in line for line in lines) == sum("kernel" in line for line in lines) == 2
    assert any("14 linear layers" in line for line in lines)
    assert any("the learner needs" in line and line.startswith("ok") for line in lines)


def test_an_error_gives_exit_code_one(config_only, capsys):
    config = json.loads((config_only / "config.json").read_text())
    (config_only / "config.json").write_text(json.dumps(config | {"intermediate_size": 200}))
    assert main(["doctor", "--model", str(config_only), "--scheme", "w4a16"]) == 1
    assert "in_features=200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "./no_such_model"], "--model ./no_such_model: "),
        (["--scheme", "w8a8", "--group_size", "32"], "has no groups"),
        (["--scheme", "w4a16", "--group_size", "7"], "group_size=7 is not supported"),
        (["--group_size", "32"], "--group_size needs"),
        (["--scheme", "int3"], "--scheme: Unknown scheme 'int3'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options_are_one_line_and_exit_code_two(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", *options])
    assert message in capsys.readouterr().err.splitlines()[-1]
