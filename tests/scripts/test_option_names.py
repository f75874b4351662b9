import pytest

from trl_qarl.scripts.option_names import check_names, spell


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
