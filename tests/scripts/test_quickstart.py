import pytest

from testing_utils import make_tiny_model
from trl_qarl.scripts import quickstart


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16", "bf16"])
def test_short_run_writes_everything_and_reloads_to_the_same_answers(tmp_path, capsys, scheme):
    pytest.importorskip("matplotlib")
    model = make_tiny_model(tmp_path, "llama")
    output_dir = tmp_path / "out"
    options = ["--model_name_or_path", model, "--output_dir", str(output_dir), "--scheme", scheme]
    quickstart.main(quickstart.make_parser().parse_args([*options, "--max_steps", "2", "--num_eval", "8"]))
    printed = capsys.readouterr().out
    assert "before training" in printed and "8 of 8 answers the same" in printed
    assert (output_dir / "training.png").read_bytes().startswith(b"\x89PNG")
    assert (output_dir / "masters" / "qarl.json").is_file() and (output_dir / scheme / "config.json").is_file()


def test_time_budget_ends_training_and_says_so(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    model = make_tiny_model(tmp_path, "llama")
    options = ["--model_name_or_path", model, "--output_dir", str(tmp_path / "out"), "--num_eval", "8"]
    quickstart.main(quickstart.make_parser().parse_args([*options, "--max_steps", "500", "--max_minutes", "0"]))
    assert "Trained 1 updates" in capsys.readouterr().out
