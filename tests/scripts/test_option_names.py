import pytest

from trl_qarl.scripts import option_names, train
from trl_qarl.scripts.option_names import check_names, names_of_train, spell


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("--group-size", "--group_size", "--group_size"),
        ("--group-size=a-b", "--group_size", "--group_size=a-b"),
        ("--group_size", "--group-size", "--group-size"),
        ("--group_size", "--group_size", "--group_size"),
        ("--max-len", "--group_size", "--max-len"),
        ("a-b", "--a_b", "a-b"),
    ],
)
def test_an_option_may_be_spelled_with_dashes_or_underscores(word, known, expected):
    assert spell(["--x", word], {known}) == ["--x", expected]


@pytest.mark.parametrize("argv", [["--scheme", "fp8", "folder"], ["--group", "32"], ["--", "-1"], ["--scheme=--x"]])
def test_what_argparse_takes_is_let_through(argv):
    check_names(argv, {"--scheme", "--group_size"})


def test_what_is_read_from_sources_has_every_name_of_the_parsers_of_train():
    from accelerate.commands.launch import launch_command_parser

    real = option_names.option_names(train.make_parser()) | option_names.option_names(launch_command_parser())
    assert len(real) > 500 and real <= names_of_train()


@pytest.mark.parametrize(
    "change", [{"trl/no_such_file.py": ("GRPOConfig",)}, {"trl/trainer/grpo_config.py": ("Gone",)}]
)
def test_sources_that_a_release_has_moved_are_not_read(monkeypatch, change):
    monkeypatch.setattr(option_names, "_DATACLASSES", option_names._DATACLASSES | change)
    assert names_of_train() is None


def test_a_new_base_of_a_dataclass_is_not_passed_over(monkeypatch):
    without = {key: names for key, names in option_names._DATACLASSES.items() if "TrainingArguments" not in names}
    monkeypatch.setattr(option_names, "_DATACLASSES", without)
    assert names_of_train() is None
