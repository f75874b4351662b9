import pytest

from trl_qarl.cli import main


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group_size", "48"], "group_size=48 is not supported"),
        (["--tokens", "0"], "must be at least 1"),
        (["--model_name_or_path", "./no_such_model"], "no_such_model"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_option_is_one_line(options, message, tiny_model, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "learner", "--model_name_or_path", tiny_model, *options])
    error = capsys.readouterr().err
    assert "trl-qarl: error: " in error
    assert message in error


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("adapter", ["--num_layers", "2"], "unrecognized arguments: --num_layers 2"),
        ("publish", ["--num_layers", "2"], "Give `--shapes` too"),
        ("publish", ["--sizes", "0.1", "--shapes", "tiny"], "`--sizes` are models of their own"),
        ("publish", ["--in_process", "--megabits", "20"], "`--in_process` sends nothing"),
        ("learner", ["--shapes", "tiny", "--model_name_or_path", "x"], "two models"),
        ("decode", ["--sequence_length", "8"], "unrecognized arguments: --sequence_length 8"),
        ("alignment", ["--repeats", "2"], "unrecognized arguments: --repeats 2"),
        ("learner", ["--schemes", "bf16"], "invalid choice: 'bf16' (choose from 'w4a16'"),
    ],
)
def test_mode_has_only_the_options_that_it_uses(capsys, mode, options, message):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", mode, *options])
    assert message in capsys.readouterr().err
