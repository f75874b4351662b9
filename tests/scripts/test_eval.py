import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing_utils import complete_greedily, make_tiny_mixture, start_engines_quickly
from testing_utils.trainings import RECORD, SIGNED
from trl_qarl import export_checkpoint, prepare_model
from trl_qarl.checkpoint.record import write_scheme
from trl_qarl.cli import main
from trl_qarl.evaluation import scores as evaluation


GREEDILY = ["--score", "exact", "--temperature", "0"]


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_a_local_file_is_evaluated_as_the_model_completes_it(export, masters, tmp_path, capsys):
    prompts = ["1 + 1 =", "a much longer prompt than the first:"]
    rows = [
        {"prompt": prompts[0], "answer": complete_greedily(export, prompts[0], 4)},
        {"prompt": prompts[1], "answer": None, "solution": "no"},
    ]
    options = [*GREEDILY, "--max_new_tokens", "4", "--compare", masters, "--output", str(tmp_path / "eval.json")]
    main(["eval", export, "--task", write(tmp_path / "p.jsonl", rows), *options])
    result = json.loads((tmp_path / "eval.json").read_text())
    ours, theirs = result["results"]
    assert ours["scores"] == [1.0, 0.0] and ours["pass@1"] == 0.5
    is_same = complete_greedily(masters, prompts[0], 4).strip() == rows[0]["answer"].strip()
    assert theirs["scores"] == [float(is_same), 0.0]
    task = str(tmp_path / "p.jsonl")
    assert ours["task"] == theirs["task"] == task
    assert result["differences"][task]["mean"] == ours["pass@1"] - theirs["pass@1"]
    assert result["versions"]["torch"] == torch.__version__
    assert "pass@1 50.0% +- 50.0%, 2 problems" in capsys.readouterr().out
    # What `trl-qarl report` reads.
    pytest.importorskip("pandas")
    from trl_qarl.study.runs import read_evals

    notes = []
    first, second = ([*row.values()][1:] for row in read_evals(tmp_path, notes))
    assert notes == [] and first[:2] == ["p.jsonl", "50.0% ±50.0%"] and first[2] != second[2] == "-"
    assert first[3:] == second[3:] == ["2", "1", "transformers, greedy"]


def test_masters_are_evaluated_at_fewer_bits_as_their_export_is(masters, tmp_path, capsys):
    trained = tmp_path / "trained"
    shutil.copytree(masters, trained)
    write_scheme(trained, RECORD | {"scheme": SIGNED[4], "group_size": 32, "scale_dtype": "float32"})
    main(["export", "--model_name_or_path", str(trained), "--output_dir", str(tmp_path / "low_bit"), "--bits", "2"])
    prompt = "a prompt:"
    answer = complete_greedily(str(tmp_path / "low_bit"), prompt, 8)
    assert answer != complete_greedily(masters, prompt, 8)
    task = write(tmp_path / "p.jsonl", [{"prompt": prompt, "answer": answer}])
    capsys.readouterr()
    main(["eval", str(trained), "--task", task, *GREEDILY, "--max_new_tokens", "8", "--bits", "2"])
    (row,) = json.loads((trained / "eval-2-bits.json").read_text())["results"]
    assert row["scores"] == [1.0] and row["model"] == f"{trained} at 2 bits"
    printed = capsys.readouterr().out
    assert f"{trained} at 2 bits: {task}: pass@1 100.0%" in printed and "vllm serve" not in printed


def test_experts_that_transformers_does_not_read_are_sampled_as_they_were_trained(tmp_path):
    masters = make_tiny_mixture(tmp_path, "qwen3_moe")
    model, tokenizer = (cls.from_pretrained(masters) for cls in (AutoModelForCausalLM, AutoTokenizer))
    prepare_model(model, "w8a8", scale_dtype=torch.float32)
    folder = str(export_checkpoint(model, tmp_path / "w8a8", tokenizer, torch.float32))
    answer = complete_greedily(masters, "a prompt:", 8, model.eval())
    assert answer.strip()
    task = write(tmp_path / "p.jsonl", [{"prompt": "a prompt:", "answer": answer}])
    main(["eval", folder, "--task", task, *GREEDILY, "--max_new_tokens", "8"])
    (row,) = json.loads((tmp_path / "w8a8" / "eval.json").read_text())["results"]
    assert row["scores"] == [1.0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no problem"),
        (["{"], "line 1 is not JSON"),
        ([{"prompt": "a", "answer": "$1$"}, {"prompt": "a"}], "line 2 has no `answer`"),
        ([{"answer": "1"}], "line 1 has no `prompt`"),
        ([["prompt"]], "line 1 has no `prompt`"),
        ([{"prompt": "a", "answer": 3}], "line 1 has no `answer`"),
        ([{"prompt": "a", "answer": ""}], "cannot be read as mathematics. Use `--score exact`"),
    ],
    ids=str,
)
def test_a_bad_file_is_named_with_its_line(masters, tmp_path, capsys, rows, message):
    pytest.importorskip("math_verify")
    with pytest.raises(SystemExit, match="2"):
        main(["eval", masters, "--task", write(tmp_path / "p.jsonl", rows)])
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.vllm
@pytest.mark.slow
def test_prompts_that_are_prefilled_in_pieces_are_sampled_and_repeat_themselves(export, monkeypatch):
    """vLLM on a CPU dies of them where a request has a seed."""
    start_engines_quickly(monkeypatch)
    options = {"max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "max_model_len": 64}
    sample, _, end = evaluation.make_vllm_sampler(export, **options)
    # More than one batch takes, 4,096 tokens.
    prompts = [[5 + (i + j) % 200 for j in range(57)] for i in range(160)]
    first = sample(prompts, 3, ())
    assert sample(prompts, 3, ()) == first != sample(prompts, 4, ())
    assert len(set(sample(prompts[:1] * 8, 3, ()))) > 4
    end()
