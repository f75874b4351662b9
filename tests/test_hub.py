"""Pushes of the trainer and of `trl-qarl export`, by the Hub's own client to a stand-in for the Hub."""

import logging
import shlex
import threading
import time

import pytest
import torch
import yaml
from huggingface_hub import HfApi, constants
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from testing_utils import make_tiny_model, make_trainer, push_export, run_export
from testing_utils.hub_stand_in import fails_at, local_files, pushed_files, run_hf
from testing_utils.trainings import EXPERTS
from trl_qarl import QaRLConfig
from trl_qarl.checkpoint.export import is_export
from trl_qarl.hub import PushFailed, summarize, write_card


SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
SAVING |= {"push_to_hub": True, "hub_model_id": "someone/policy"}


def front_matter(text):
    return yaml.safe_load(text.split("---")[1])


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """The output directory of a run of two updates, with masters."""
    folder = tmp_path_factory.mktemp("trained") / "out"
    trainer = make_trainer(tiny_model, folder, max_steps=2, bf16=True)
    trainer.train()
    trainer.save_model()
    return folder


def test_push_to_hub_uploads_the_policy_that_loads_by_name(tiny_model, tmp_path, hub):
    trainer = make_trainer(tiny_model, tmp_path / "run", max_steps=2, hub_model_id="policy")
    trainer.train()
    trainer.push_to_hub(dataset_name="org/data", tags="mine")
    assert list(hub.repos) == ["someone/policy"] and hub.repos["someone/policy"].messages == ["End of training"]
    assert pushed_files(hub) == local_files(tmp_path / "run" / "w4a16")
    assert is_export(tmp_path / "run" / "w4a16") and (tmp_path / "run" / "model.safetensors").is_file()
    card = pushed_files(hub)["README.md"].decode()
    assert "vllm serve someone/policy" in card and {"mine", "qarl", "trl"} <= {*front_matter(card)["tags"]}
    assert front_matter(card)["datasets"] == "org/data"
    (reward,) = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert f"| `reward`, mean of the last 1 logged | {reward:.4g} |" in card
    inputs = AutoTokenizer.from_pretrained("someone/policy")("23 + 8 =", return_tensors="pt")
    pushed = AutoModelForCausalLM.from_pretrained("someone/policy", dtype=torch.float32)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "w4a16", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(pushed(**inputs).logits, exported(**inputs).logits)


@pytest.mark.parametrize("lora_mode", ["adapter", "merged"])
def test_lora_is_pushed_as_a_policy(tiny_model, tmp_path, hub, lora_mode):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=20, target_modules=["q_proj"])
    trainer = make_trainer(tiny_model, tmp_path / "run", peft_config=config, max_steps=1, lora_mode=lora_mode)
    trainer.train()
    files = push_export(trainer, hub)
    assert "model.safetensors" in files and not any(path.startswith("adapter_") for path in files)
    assert ("adapter/adapter_model.safetensors" in files) == (lora_mode == "adapter")
    command = "vllm serve policy --enable-lora --max-lora-rank 32 --lora-modules adapter=policy/adapter"
    commands = f"hf download someone/policy --local-dir policy\n{command}"
    assert (commands in files["README.md"].decode().replace(" --dtype float32", "")) == (lora_mode == "adapter")


def test_masters_are_described_and_not_pushed(tiny_model, tmp_path, hub):
    trainer = make_trainer(tiny_model, tmp_path / "run", hub_model_id="someone/policy")
    # The folder of the model may be removed while it is trained.
    trainer.model.name_or_path = str(tmp_path / "removed" / "qwen2")
    push_export(trainer, hub)
    text = (tmp_path / "run" / "README.md").read_text()
    assert "**These are high-precision master weights, not the policy that was trained.**" in text
    assert "| `scheme` | w4a16 |" in text and "trl-qarl export --model_name_or_path run " in text
    # A path of this machine is not a name on the Hub.
    assert "from `qwen2` with" in text and str(tmp_path) not in text


def test_card_has_licence_and_base_of_a_cached_card(tmp_path, hub):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: someone/origin\n---\n\n# Base\n")
    HfApi().create_repo("base")
    HfApi().upload_file(repo_id="someone/base", path_or_fileobj=tmp_path / "README.md", path_in_repo="README.md")

    def found(source):
        write_card(tmp_path, "x", source)
        data = front_matter((tmp_path / "README.md").read_text())
        return data.get("license"), data.get("base_model")

    assert found("someone/base") == (None, "someone/base")
    HfApi().hf_hub_download("someone/base", "README.md")
    assert found("someone/base") == ("apache-2.0", "someone/base")
    assert found(str(tmp_path)) == ("apache-2.0", "someone/base"), "of the card in the folder"
    # As somebody who edits it may leave it.
    (tmp_path / "README.md").write_text("---\nlicense: [apache-2.0\n---\n")
    assert found(str(tmp_path)) == (None, None)


def test_results_are_means_of_what_was_logged_last():
    history = [{"step": step, "reward": step / 10} for step in range(1, 13)] + [{"step": 12, "eval_reward": 0.75}]
    found = dict.fromkeys(("`reward`, mean of the last 10 logged", "`eval_reward`, mean of the last 1 logged"), "0.75")
    assert summarize(history) == found
    assert summarize([]) == {}


@pytest.mark.parametrize("strategy", ["end", "every_save"])
def test_a_save_pushes_the_policy_if_the_strategy_says_so(tiny_model, tmp_path, hub, strategy):
    options = SAVING | {"hub_strategy": strategy, "hub_private_repo": True, "hub_always_push": True}
    trainer = make_trainer(tiny_model, tmp_path / "run", **options)
    assert hub.repos["someone/policy"].private, "made before the training"
    trainer.train()
    pushed = [] if strategy == "end" else ["Training in progress, step 1", "Training in progress, step 2"]
    assert hub.repos["someone/policy"].messages == pushed
    assert pushed_files(hub) == (local_files(tmp_path / "run" / "w4a16") if pushed else {})
    trainer.save_model()
    assert hub.repos["someone/policy"].messages == [*pushed, "Model save"]
    assert [*hub.repos] == ["someone/policy"] and not any("masters" in path for path in pushed_files(hub))


def test_push_replaces_shards_and_adapter_of_an_earlier_model(tiny_model, tmp_path, hub):
    names = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json", "notes.txt"]
    (tmp_path / "old").mkdir()
    for name in names:
        (tmp_path / "old" / name).write_text(f"old {name}")
    HfApi().create_repo("policy")
    HfApi().upload_folder(repo_id="someone/policy", folder_path=tmp_path / "old")
    make_trainer(tiny_model, tmp_path / "run", hub_model_id="policy").push_to_hub()
    assert {*names} & {*pushed_files(hub)} == {"notes.txt"}


def test_a_push_may_ask_for_a_private_repository(tiny_model, tmp_path, hub):
    trainer = make_trainer(tiny_model, tmp_path / "run", hub_model_id="policy")
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_private'"):
        trainer.push_to_hub(is_private=True)
    assert not hub.repos
    trainer.push_to_hub(private=True)
    assert hub.repos["someone/policy"].private


@pytest.mark.parametrize(("part", "status"), [("/commit/", 500), ("/api/", 401)])
def test_a_failed_push_names_the_command_that_repeats_it(tiny_model, tmp_path, hub, part, status):
    trainer = make_trainer(tiny_model, tmp_path / "run", hub_model_id="someone/policy")
    hub.fault = fails_at(part, status)
    with pytest.raises(PushFailed, match=f"{status}.*\nNothing is lost") as failure:
        trainer.push_to_hub()
    assert "hf_writer" not in str(failure.value) and (tmp_path / "run" / "model.safetensors").is_file()
    assert is_export(tmp_path / "run" / "w4a16") and not any(repo.files for repo in hub.repos.values())
    hub.fault = lambda method, path: None
    program, *arguments = shlex.split(str(failure.value).splitlines()[-1])
    assert program == "hf"
    run_hf(hub, tmp_path / "home", *arguments)
    assert pushed_files(hub) == local_files(tmp_path / "run" / "w4a16")


def test_a_hub_that_cannot_be_reached_is_named(tiny_model, tmp_path, hub, monkeypatch):
    trainer = make_trainer(tiny_model, tmp_path / "run", hub_model_id="policy")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PushFailed, match=r"from http://127.0.0.1:9[^~]*hf upload policy"):
        trainer.push_to_hub()
    assert is_export(tmp_path / "run" / "w4a16")


def test_a_push_that_fails_in_training_is_logged(tiny_model, tmp_path, hub, caplog):
    trainer = make_trainer(tiny_model, tmp_path / "run", hub_always_push=True, **SAVING)
    hub.fault = fails_at("/commit/", 500)
    with caplog.at_level(logging.ERROR):
        trainer.train()
    assert trainer.state.global_step == 2
    # The log's line comes after the end of the upload.
    deadline = time.monotonic() + 10
    while caplog.text.count("The push to someone/policy failed") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert caplog.text.count("The push to someone/policy failed") == 2


@pytest.mark.parametrize("waits", [False, True])
def test_an_upload_in_progress_is_not_written_over(tiny_model, tmp_path, hub, waits):
    """A push that comes too early is left out, or waits for the upload with `hub_always_push`."""
    goes_on, may_end, files = threading.Event(), threading.Event(), []

    def hold(method, path):
        if "/commit/" in path and not goes_on.is_set():
            files.append(local_files(tmp_path / "run" / "w4a16"))
            goes_on.set()
            may_end.wait(2 if waits else 60)
            files.append(local_files(tmp_path / "run" / "w4a16"))

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            assert state.global_step == 0 or goes_on.wait(60)

        def on_train_end(self, args, state, control, **kwargs):
            may_end.set()

    hub.fault = hold
    trainer = make_trainer(tiny_model, tmp_path / "run", callbacks=[Look()], hub_always_push=waits, **SAVING)
    trainer.train()
    assert len(files) == 2 and files[0] == files[1]
    steps = [1, 2] if waits else [1]
    assert hub.repos["someone/policy"].messages == [f"Training in progress, step {step}" for step in steps]


def test_a_repository_that_cannot_be_made_ends_construction(tiny_model, tmp_path, hub):
    with pytest.raises(PushFailed, match="other/policy could not be created.*403"):
        make_trainer(tiny_model, tmp_path / "run", push_to_hub=True, hub_model_id="other/policy")


def test_a_push_that_cannot_work_is_refused_first(tmp_path, hub, monkeypatch):
    QaRLConfig(str(tmp_path / "run"), push_to_hub=True)
    with pytest.raises(ValueError, match="hub_model_id='my run' is not"):
        QaRLConfig(str(tmp_path / "my run"), push_to_hub=True)
    monkeypatch.delenv("HF_TOKEN")
    QaRLConfig(str(tmp_path / "run"), push_to_hub=True, hub_token="hf_given")
    with pytest.raises(ValueError, match="no token for the Hub. Run `hf auth login`"):
        QaRLConfig(str(tmp_path / "run"), push_to_hub=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        QaRLConfig(str(tmp_path / "run"), push_to_hub=True)


def test_a_push_of_experts_without_an_export_is_refused(tmp_path, hub):
    model = make_tiny_model(tmp_path, "qwen3_moe", **EXPERTS)
    options = {"exclude_modules": ["experts"]}
    with pytest.raises(ValueError, match="there is no low-bit export. Remove `push_to_hub`"):
        make_trainer(model, tmp_path / "run", push_to_hub=True, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--push_to_hub"], "--push_to_hub needs the repository: give --hub_model_id USER/NAME"),
        (["--push_to_hub", "--hub_model_id", "a/b/c"], "hub_model_id='a/b/c' is not"),
        (["--hub_private_repo"], "--hub_private_repo was given without --push_to_hub"),
        (["--push_to_hub", "--hub_model_id", "other/x"], "other/x could not be created"),
    ],
)
def test_export_refuses_a_push_before_it_writes(trained, tmp_path, hub, capsys, options, says):
    with pytest.raises(SystemExit, match="2"):
        run_export(trained, tmp_path / "x", *options)
    assert says in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_an_export_whose_push_fails_ends_with_code_three(trained, tmp_path, hub, capsys):
    arguments = trained, tmp_path / "x", "--push_to_hub", "--hub_model_id", "x", "--hub_private_repo"
    hub.fault = fails_at("/commit/", 500)
    assert run_export(*arguments) == 3
    error = capsys.readouterr().err
    assert f"hf upload someone/x {tmp_path / 'x'} . --private" in error and is_export(tmp_path / "x")
    hub.fault = lambda method, path: None
    assert run_export(*arguments) == 0
    assert pushed_files(hub, "someone/x") == local_files(tmp_path / "x") and hub.repos["someone/x"].private
    card = pushed_files(hub, "someone/x")["README.md"].decode()
    assert "# x\n" in card and "vllm serve someone/x\n" in card and "| `reward`, " in card
