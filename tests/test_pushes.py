"""Pushes of the trainer, by the real client of the Hub to a stand-in for it."""

import logging
import shlex
import threading
import time
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, TrainerCallback

from testing_utils import make_tiny_model, make_trainer, push_export
from testing_utils.hub_stand_in import fails_at, local_files, pushed_files, run_hf
from testing_utils.pictures import make_picture_trainer, make_tiny_picture_model, needs_torchvision
from testing_utils.trainings import EXPERTS
from trl_qarl import QaRLConfig
from trl_qarl.checkpoint.export import is_export
from trl_qarl.checkpoint.uploads import PushFailed
from trl_qarl.rollout.canary import Canary


SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
SAVING |= {"push_to_hub": True, "hub_model_id": "someone/policy"}


def test_push_to_hub_uploads_the_low_bit_policy_which_loads_by_name(tiny_model, tmp_path, hub):
    trainer = make_trainer(tiny_model, tmp_path / "run", max_steps=2, hub_model_id="policy")
    trainer.train()
    trainer.push_to_hub(dataset_name="org/data", tags="mine")
    assert list(hub.repos) == ["someone/policy"]
    assert pushed_files(hub) == local_files(tmp_path / "run" / "w4a16")
    assert is_export(tmp_path / "run" / "w4a16")
    card = pushed_files(hub)["README.md"].decode()
    serves = ("vllm serve someone/policy", 'from_pretrained("someone/policy")')
    assert all(part in card for part in (*serves, "org/data", "- mine", "- qarl", "- trl"))
    (reward,) = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert f"| reward, last logged | {reward:.4g} |" in card
    inputs = AutoTokenizer.from_pretrained("someone/policy")("23 + 8 =", return_tensors="pt")
    pushed = AutoModelForCausalLM.from_pretrained("someone/policy", dtype=torch.float32)
    commit = hub.repos["someone/policy"].branches["main"]
    assert {f"GET /someone/policy/resolve/{at}/model.safetensors" for at in ("main", commit)} & {*hub.requests}
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "w4a16", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(pushed(**inputs).logits, exported(**inputs).logits)


@pytest.mark.slow
@needs_torchvision
def test_a_model_of_pictures_is_pushed_with_its_processor_and_loads_as_its_card_says(tmp_path, hub, capsys):
    model = make_tiny_picture_model(tmp_path, "qwen2_5_vl")
    trainer = make_picture_trainer(model, tmp_path / "run", use_vllm=False, max_steps=1, hub_model_id="policy")
    trainer.train()
    files = push_export(trainer, hub)
    card = files["README.md"].decode()
    assert "vllm serve someone/policy" in card and "outside the language model" in card
    loaded: dict = {}
    exec(card.split("```python\n")[1].split("```")[0], loaded)
    assert capsys.readouterr().out
    canary = Canary(trainer.model, torch.float32, AutoProcessor.from_pretrained("someone/policy"))
    picture = canary.texts[-1]
    pushed = Canary(loaded["model"], torch.float32, None)
    assert picture.pictures and (pushed._log_probs(picture) - canary._log_probs(picture)).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("lora_mode", ["adapter", "merged"])
def test_lora_is_pushed_as_a_policy_and_as_an_adapter(tiny_model, tmp_path, hub, lora_mode):
    peft = pytest.importorskip("peft")
    options = {"max_steps": 1, "hub_model_id": "policy", "lora_mode": lora_mode}
    lora = peft.LoraConfig(r=20, target_modules=["q_proj"])
    trainer = make_trainer(tiny_model, tmp_path / "run", peft_config=lora, **options)
    trainer.train()
    files = push_export(trainer, hub)
    card = files["README.md"].decode()
    if lora_mode == "merged":
        assert "vllm serve someone/policy" in card and not any("adapter" in path for path in files)
    else:
        command = "vllm serve DIR --enable-lora --max-lora-rank 32 --lora-modules adapter=DIR/adapter"
        without_dtype = card.replace(" --dtype float32", "")
        assert f"hf download someone/policy --local-dir DIR\n{command}" in without_dtype
        assert 'PeftModel.from_pretrained(model, "DIR/adapter")' in card
        assert "adapter/adapter_model.safetensors" in files

    trainer.args.hub_export, trainer.hub_model_id = "adapter", "someone/adapter"
    trainer.push_to_hub()
    files = pushed_files(hub, "someone/adapter")
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {*files}
    assert not any(path.startswith("model") for path in files)
    assert "This is a LoRA adapter" in files["README.md"].decode()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_strategies_upload_policy_and_checkpoints_where_they_belong(tiny_model, tmp_path, hub, strategy):
    trainer = make_trainer(tiny_model, tmp_path / "run", hub_strategy=strategy, hub_always_push=True, **SAVING)
    trainer.train()
    messages = hub.repos["someone/policy"].messages[1:]
    expected = [] if strategy == "end" else ["Training in progress, step 1", "Training in progress, step 2"]
    assert messages == expected
    if strategy != "end":
        assert pushed_files(hub) == local_files(tmp_path / "run" / "w4a16")
    folders = {"checkpoint": ["last-checkpoint"], "all_checkpoints": ["checkpoint-1", "checkpoint-2"]}.get(
        strategy, []
    )
    assert ("someone/policy-masters" in hub.repos) == bool(folders)
    if not folders:
        return
    files = pushed_files(hub, "someone/policy-masters")
    assert {path.partition("/")[0] for path in files} == {*folders}
    local = local_files(tmp_path / "run" / "checkpoint-2")
    del local["training_args.bin"]
    assert {p.partition("/")[2]: c for p, c in files.items() if p.startswith(folders[-1])} == local
    # A run on another machine goes on from what was uploaded.
    for path, content in files.items():
        (tmp_path / "elsewhere" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "elsewhere" / path).write_bytes(content)
    resumed = make_trainer(tiny_model, tmp_path / "resumed", max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "elsewhere" / folders[-1]))
    assert resumed.state.global_step == 3


@pytest.mark.slow
def test_both_uploads_masters_to_a_repository_of_their_own(tiny_model, tmp_path, hub):
    trainer = make_trainer(
        tiny_model, tmp_path / "run", hub_export="both", hub_private_repo=True, hub_strategy="checkpoint", **SAVING
    )
    assert set(hub.repos) == {"someone/policy", "someone/policy-masters"}
    assert all(repo.private for repo in hub.repos.values())
    trainer.train()
    trainer.push_to_hub()
    files = pushed_files(hub, "someone/policy-masters")
    at_top = {path for path in files if "/" not in path}
    assert {"config.json", "model.safetensors", "qarl.json", "tokenizer.json", "README.md"} <= at_top
    assert not {"training_args.bin", "metrics.jsonl", "run.json", "optimizer.pt"} & at_top
    assert {path.partition("/")[0] for path in files if "/" in path} == {"last-checkpoint"}
    card = files["README.md"].decode()
    # A policy that was trained in float32, as on processors without bf16 instructions, is served in it.
    serve = "vllm serve someone/policy" + ("" if trainer.args.bf16 else " --dtype float32")
    assert "**These are high-precision master weights" in card and f"{serve}\n" in card
    assert "someone/policy-masters" in pushed_files(hub)["README.md"].decode()
    pushed = AutoModelForCausalLM.from_pretrained("someone/policy-masters", dtype=torch.float32).state_dict()
    assert all(torch.equal(pushed[name], tensor) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.slow
def test_master_uploads_masters_to_the_repository_itself(tiny_model, tmp_path, hub):
    trainer = make_trainer(tiny_model, tmp_path / "run", hub_export="master", hub_strategy="every_save", **SAVING)
    trainer.train()
    assert list(hub.repos) == ["someone/policy"]
    assert not (tmp_path / "run" / "w4a16").exists()
    files = pushed_files(hub)
    assert files["model.safetensors"] in (
        (tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors").read_bytes() for step in (1, 2)
    )
    assert "qarl.json" in files
    assert not any("/" in path or path.startswith(("optimizer", "rng_state", "trainer_state")) for path in files)
    assert "--model_name_or_path someone/policy " in files["README.md"].decode()


def test_push_replaces_the_shards_and_the_adapter_of_what_was_there(tiny_model, tmp_path, hub):
    from huggingface_hub import HfApi

    names = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json", "notes.txt"]
    (tmp_path / "old").mkdir()
    for name in names:
        (tmp_path / "old" / name).write_text(f"old {name}")
    HfApi().create_repo("policy")
    HfApi().upload_folder(repo_id="someone/policy", folder_path=tmp_path / "old")
    make_trainer(tiny_model, tmp_path / "run", hub_model_id="policy").push_to_hub()
    assert {*names} & {*pushed_files(hub)} == {"notes.txt"}


def test_push_goes_to_the_branch_that_is_named_of_a_repository_that_is_private_if_told(tiny_model, tmp_path, hub):
    trainer = make_trainer(tiny_model, tmp_path / "run", hub_model_id="policy", hub_revision="trial")
    pushed = trainer.push_to_hub(private=True, blocking=False).result()
    assert pushed.oid == hub.repos["someone/policy"].branches["trial"] and hub.repos["someone/policy"].private
    assert pushed_files(hub, revision="trial") == local_files(tmp_path / "run" / "w4a16")
    assert pushed_files(hub) == {}
    trainer.init_hf_repo(private=False)
    trainer.push_to_hub()
    assert list(hub.repos) == ["someone/policy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "how", "says"),
    [
        ("PUT /lfs/", "drop", "'model.safetensors'"),
        ("PUT /lfs/", 500, "500"),
        ("/commit/", 500, "500"),
        ("/commit/", 403, "The token may not write there"),
        ("/api/", 401, "The Hub does not know the token"),
    ],
)
def test_push_that_fails_loses_nothing_and_its_command_repeats_it(tiny_model, tmp_path, hub, part, how, says):
    trainer = make_trainer(tiny_model, tmp_path / "run", hub_model_id="policy")
    hub.fault = fails_at(part, how)
    with pytest.raises(PushFailed, match="Nothing is lost") as failure:
        trainer.push_to_hub()
    message = str(failure.value)
    assert says in message and "hf_writer" not in message
    assert is_export(tmp_path / "run" / "w4a16")
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert "model.safetensors" not in (pushed_files(hub) if hub.repos else {})
    hub.fault = lambda method, path: None
    if how != "drop":
        trainer.push_to_hub()
    else:
        program, *arguments = shlex.split(message.splitlines()[-1])
        assert program == "hf"
        run_hf(hub, tmp_path / "home", *arguments)
    assert pushed_files(hub) == local_files(tmp_path / "run" / "w4a16")


def test_push_to_a_hub_that_cannot_be_reached_says_which(tiny_model, tmp_path, hub, monkeypatch):
    trainer = make_trainer(tiny_model, tmp_path / "run", hub_model_id="someone/policy")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PushFailed, match=r"the Hub is http://127.0.0.1:9[^~]*hf upload someone/policy"):
        trainer.push_to_hub()
    assert is_export(tmp_path / "run" / "w4a16")
    # As tokenizers says that the disk is full.
    monkeypatch.setattr(trainer.policy, "export", Mock(side_effect=Exception("No space left (os error 28)")))
    with pytest.raises(PushFailed, match=r"Nothing was pushed to someone/policy[^~]*trl-qarl export"):
        trainer.push_to_hub()


def test_push_that_fails_during_training_is_logged_and_training_goes_on(tiny_model, tmp_path, hub, caplog):
    trainer = make_trainer(tiny_model, tmp_path / "run", hub_always_push=True, **SAVING)
    hub.fault = fails_at("/commit/", 500)
    with caplog.at_level(logging.ERROR):
        trainer.train()
    assert trainer.state.global_step == 2
    assert caplog.text.count("The push to someone/policy failed") == 2
    hub.fault = lambda method, path: None
    trainer.save_model()
    assert pushed_files(hub) == local_files(tmp_path / "run" / "w4a16")


@pytest.mark.slow
def test_upload_in_progress_is_not_written_over(tiny_model, tmp_path, hub):
    """Nor is a save made to wait for it: that push is left out."""
    is_going_on, may_end = threading.Event(), threading.Event()

    def wait(method, path):
        if path.startswith("/lfs/") and not is_going_on.is_set():
            is_going_on.set()
            may_end.wait(60)

    hub.fault = wait
    first = {}

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                assert is_going_on.wait(60)
                first.update(local_files(tmp_path / "run" / "w4a16"))
            if state.global_step == 2:
                assert local_files(tmp_path / "run" / "w4a16") == first
                may_end.set()

    trainer = make_trainer(tiny_model, tmp_path / "run", callbacks=[Look()], **(SAVING | {"max_steps": 3}))
    trainer.train()
    assert len(first) > 3


@pytest.mark.slow
def test_upload_in_progress_is_waited_for_where_every_save_is_pushed(tiny_model, tmp_path, hub):
    seen = []

    def hold(method, path):
        if path.startswith("/lfs/") and not seen:
            seen.append(local_files(tmp_path / "run" / "w4a16"))
            saved, deadline = tmp_path / "run" / "checkpoint-2" / "trainer_state.json", time.monotonic() + 60
            while not saved.is_file() and time.monotonic() < deadline:
                time.sleep(0.05)
            # Long enough to export the next policy.
            time.sleep(1)
            seen.append(local_files(tmp_path / "run" / "w4a16"))

    hub.fault = hold
    make_trainer(tiny_model, tmp_path / "run", hub_always_push=True, **SAVING).train()
    assert len(seen) == 2 and seen[0] == seen[1]
    assert hub.repos["someone/policy"].messages[1:] == [f"Training in progress, step {step}" for step in (1, 2)]
    assert pushed_files(hub) == local_files(tmp_path / "run" / "w4a16")


def test_construction_fails_where_the_repository_cannot_be_made(tiny_model, tmp_path, hub):
    with pytest.raises(PushFailed, match="other/policy could not be created") as failure:
        make_trainer(tiny_model, tmp_path / "run", push_to_hub=True, hub_model_id="other/policy")
    assert "The token may not write there" in str(failure.value)


def test_push_without_a_token_or_offline_is_refused_before_anything_is_loaded(tmp_path, hub, monkeypatch):
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
    QaRLConfig(str(tmp_path / "run"), hub_export="both")


def test_push_of_experts_that_have_no_export_is_refused_before_training(tmp_path, hub):
    model = make_tiny_model(tmp_path, "qwen3_moe", **EXPERTS)
    options = {"exclude_modules": ["experts"]}
    with pytest.raises(ValueError, match="hub_export='low-bit'"):
        make_trainer(model, tmp_path / "run", push_to_hub=True, **options)
