import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from testing_utils import complete_greedily, start_engines_quickly
from trl_qarl.cli import main


lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")
harness = pytest.importorskip("trl_qarl.evaluation.benchmarks")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_task(folder: Path, rows, until=()) -> str:
    """A task file of the harness whose data set is a JSON Lines file."""
    data = folder / "problems.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "task": "copy",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": list(until), "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    path = folder / "copy.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_the_harness_scores_what_the_exported_policy_completes(export, masters, tmp_path, capsys):
    questions = ["1 + 1 =", "a much longer question than the first:"]
    answers = [complete_greedily(export, questions[0], 6), "no"]
    # The completion ends before a text that is in it: what is right is what comes before.
    stop = answers[0][-1]
    cut = answers[0][: answers[0].index(stop)]
    rows = [{"question": q, "answer": a} for q, a in zip(questions, [cut, "no"], strict=True)]
    task = write_task(tmp_path, rows, until=[stop])
    output = tmp_path / "r.json"
    options = ["--temperature", "0", "--max_new_tokens", "6", "--no_chat_template", "--output", str(output)]
    main(["eval", export, "--tasks", task, *options, "--compare", masters])
    result = json.loads(output.read_text())
    ours, theirs = result["results"]
    assert (ours["task"], ours["scores"], ours["pass@1"]) == ("copy", [1.0, 0.0], 0.5)
    theirs_text = complete_greedily(masters, questions[0], 6)
    expected = float((theirs_text[: theirs_text.index(stop)] if stop in theirs_text else theirs_text) == cut)
    assert theirs["scores"] == [expected, 0.0]
    assert result["differences"]["copy"]["mean"] == ours["pass@1"] - theirs["pass@1"]
    assert result["versions"]["lm-eval"]
    assert f"{export}: copy: pass@1 50.0%" in capsys.readouterr().out


@pytest.mark.vllm
@pytest.mark.slow
def test_the_harness_scores_what_an_engine_completes(export, tmp_path, monkeypatch):
    start_engines_quickly(monkeypatch)
    question = "1 + 1 ="
    answer = complete_greedily(export, question, 6)
    cut = answer[: answer.index(answer[-1])]
    task = write_task(tmp_path, [{"question": question, "answer": a} for a in (cut, answer)], until=[answer[-1]])
    output = tmp_path / "r.json"
    options = ["--temperature", "0", "--max_new_tokens", "6", "--no_chat_template", "--vllm", "--max_model_len", "64"]
    main(["eval", export, "--tasks", task, *options, "--output", str(output)])
    assert json.loads(output.read_text())["results"][0]["scores"] == [1.0, 0.0]


def test_scores_are_in_the_card_beside_those_of_other_tasks(export, masters, tmp_path):
    question = "2 + 2 ="
    task = write_task(tmp_path, [{"question": question, "answer": complete_greedily(export, question, 4)}])
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": question, "answer": "never"}) + "\n")
    options = ["--temperature", "0", "--max_new_tokens", "4", "--output", str(tmp_path / "r.json")]
    for _ in range(2):
        main(["eval", export, "--tasks", task, "--no_chat_template", *options])
    main(["eval", export, "--task", str(other), "--score", "exact", *options])
    card = ModelCard.load(Path(export, "README.md"))
    scores = {result.dataset_name: result.metric_value for result in card.data.eval_results}
    assert scores == {"copy": 100.0, "other.jsonl": 0.0}
    assert card.text.count("## Evaluation") == 1 and str(tmp_path) not in card.content
    assert "| copy | 100.0% | 1 | 0.0 |" in card.text and "| other.jsonl | 0.0% | 1 | 0.0 |" in card.text
    assert card.text.index("## Use") < card.text.index("## Evaluation") < card.text.index("## Training")


def test_every_sample_has_a_seed_and_prompts_go_through_the_chat_template(masters, tmp_path):
    tokenizer, seen = AutoTokenizer.from_pretrained(masters), []

    def sampler(prompts, seed, stop):
        seen.append(([tokenizer.decode(prompt) for prompt in prompts], seed, stop))
        return ["4" if seed == 7 else "5", "6#5"][: len(prompts)]

    rows = [{"question": "2 + 2", "answer": "4"}, {"question": "3 + 3", "answer": "6"}]
    tasks = harness.load_benchmarks([write_task(tmp_path, rows, until=["#"])])
    scores = harness.evaluate_benchmarks(sampler, tokenizer, tasks, 2, 7, chat=True)
    assert scores == {"copy": [0.5, 1.0]}
    wrapped = [f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n" for row in rows]
    assert seen == [(wrapped, 7, ("#",)), (wrapped, 8, ("#",))]
    assert harness.evaluate_benchmarks(sampler, tokenizer, tasks, 1, 7, chat=False, limit=1) == {"copy": [1.0]}


def test_a_set_without_a_task_in_the_harness_is_scored_as_mathematics(masters, tmp_path):
    data = tmp_path / "olympiad.jsonl"
    rows = [{"question": "1/2?", "final_answer": ["$\\frac{1}{2}$"]}, {"question": "2?", "final_answer": ["2"]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = tmp_path / "local.yaml"
    ours = Path(harness.__file__).with_name("olympiad.yaml")
    local = {"include": str(ours), "task": "local", "dataset_path": "json"}
    task.write_text(yaml.safe_dump(local | {"dataset_kwargs": {"data_files": {"test": str(data)}}}))
    loaded = harness.load_benchmarks([str(task)])
    prompts = []

    def sampler(tokens, seed, stop):
        prompts.extend(map(tokenizer.decode, tokens))
        return [r"So it is $\boxed{0.5}$.", r"\boxed{3}"]

    tokenizer = AutoTokenizer.from_pretrained(masters)
    assert harness.evaluate_benchmarks(sampler, tokenizer, loaded, 1, 0, chat=False) == {"local": [1.0, 0.0]}
    assert prompts[0] == "1/2?\n\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.mark.parametrize("name", ["amc", "minerva"])
def test_sets_of_our_own_are_scored_by_their_answer(name):
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(Path(harness.__file__).with_name(f"{name}.yaml"))
    assert config["task"] == name and config["doc_to_target"] == "{{answer}}"
    score = config["process_results"]
    right = [r"So it is $\boxed{27}$."]
    assert score({"answer": 27.0}, right) == score({"answer": "$27$"}, right) == {"exact_match": 1.0}
    assert score({"answer": 27.0}, [r"\boxed{28}"]) == {"exact_match": 0.0}


@pytest.mark.parametrize("name", harness.HARNESS_TASKS)
def test_presets_are_tasks_of_the_installed_harness(name):
    from lm_eval.tasks._yaml_loader import load_yaml

    path, metric, chosen = harness.HARNESS_TASKS[name]
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / path, resolve_func=False, recursive=True)
    assert config["output_type"] == "generate_until"
    assert metric in {entry["metric"] for entry in config["metric_list"]}
    assert chosen in {entry["name"] for entry in config.get("filter_list", [{"name": "none"}])}
