"""The recipe of docs/publish_and_serve.md with lm-evaluation-harness."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer


lm_eval = pytest.importorskip("lm_eval.__main__", reason="needs lm-eval")
PAGE = Path(__file__).parents[1] / "docs" / "publish_and_serve.md"


def write_task(folder, rows):
    """A task of the harness whose problems are a local file."""
    (folder / "problems.json").write_text(json.dumps(rows))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "problems.json")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "sums.yaml").write_text(yaml.safe_dump(task))


def test_the_harness_scores_the_export_as_it_completes(export, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    questions = ["1 + 1 =", "a much longer question than the first:"]
    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    ids = tokenizer(questions[0], return_tensors="pt")["input_ids"]
    completion = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    answers = [tokenizer.decode(completion, skip_special_tokens=True), "no"]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    write_task(tasks, [{"question": q, "answer": a} for q, a in zip(questions, answers, strict=True)])
    (command,) = re.findall(r"^lm-eval (.*--model hf .*)$", PAGE.read_text(), re.MULTILINE)
    for theirs, ours in (("out/w4a16", export), ("gsm8k", "sums"), ("scores", str(tmp_path / "scores"))):
        assert command.count(theirs) == 1
        command = command.replace(theirs, ours)
    monkeypatch.setattr(sys, "argv", ["lm-eval", *shlex.split(command), "--include_path", str(tasks)])
    lm_eval.cli_evaluate()
    (results,) = (tmp_path / "scores").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["sums"]["exact_match,none"] == 0.5
