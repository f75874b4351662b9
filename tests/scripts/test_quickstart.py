import pytest

from testing_utils import make_tiny_model
from trl_qarl.cli import main
from trl_qarl.scripts import quickstart


def run(tmp_path, *options):
    pytest.importorskip("matplotlib")
    folders = ["--model_name_or_path", make_tiny_model(tmp_path), "--output_dir", str(tmp_path / "out")]
    assert main(["quickstart", *folders, "--num_eval", "8", *options]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_short_run_writes_masters_export_and_report(tmp_path, capsys, scheme):
    run(tmp_path, "--scheme", scheme, "--max_steps", "2")
    printed, output_dir = capsys.readouterr().out, tmp_path / "out"
    assert "352 sums to train on, 8 held out." in printed and "trained 2 of 2 updates" in printed
    assert "before training   0 of 8 (0%)" in printed and "after training    0 of 8 (0%)" in printed
    assert "mismatch, nats per token" in (output_dir / "report.html").read_text()
    assert (output_dir / "masters" / "qarl.json").is_file() and (output_dir / scheme / "config.json").is_file()


def test_time_budget_ends_training(tmp_path, capsys):
    run(tmp_path, "--max_steps", "500", "--max_minutes", "0")
    assert "trained 1 of 500 updates" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("31", 1.0), (" 31", 1.0), (" 31 ", 1.0), ("31\n", 0.0), ("311", 0.0), ("31.", 0.0), ("", 0.0), ("3 1", 0.0)],
)
def test_reward_is_one_for_exactly_the_sum(completion, reward):
    assert quickstart.exact_sum([completion], answer=["31"], prompts=["23 + 8 ="]) == [reward]


def test_problems_are_right_and_disjoint():
    train, held_out = quickstart.make_problems(100, eos_token="</s>")
    prompts = [problem["prompt"] for problem in train + held_out]
    assert (len(train), len(held_out), len(set(prompts))) == (260, 100, 360)
    for problem in train + held_out:
        *examples, question = problem["prompt"].splitlines()
        left, right = question.removesuffix(" =").split(" + ")
        assert int(left) + int(right) == int(problem["answer"]) and all(e.endswith("</s>") for e in examples)


@pytest.mark.parametrize("num_eval", [0, 181])
def test_too_many_held_out_problems_are_refused(num_eval):
    with pytest.raises(ValueError, match="between 1 and 180"):
        quickstart.make_problems(num_eval, eos_token="")
