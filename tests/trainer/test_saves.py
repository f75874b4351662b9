"""A run that ended somewhere goes on as if it had not, and what cannot go on is said."""

import logging
import math
import os
import socket
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from testing_utils import make_problems, make_tiny_model, make_vllm_trainer, save_at, spread, stop_at
from testing_utils.trainings import Spoils, arguments, assert_equal, lora, make, parameters, rows
from trl_qarl.checkpoint import marker
from trl_qarl.checkpoint.files import hold
from trl_qarl.trainer.policy import Policy
from trl_qarl.trainer.qarl_trainer import QaRLTrainer


SAVING = {"save_strategy": "steps", "save_steps": 1}
# A checkpoint within a generation batch, and two updates of the next one.
WITHIN = {"save_strategy": "steps", "save_steps": 3, "steps_per_generation": 4, "max_steps": 6}


@pytest.mark.slow
@pytest.mark.parametrize(("is_shuffled", "is_streamed"), [(True, False), (False, False), (True, True)])
def test_a_run_resumed_in_any_epoch_sees_the_same_prompts(tiny_model, tmp_path, is_shuffled, is_streamed):
    """Three epochs of three generation batches with two updates each."""
    # At the end of an epoch, within its first generation batch, and between that and the next.
    steps = (8,) if not is_shuffled else (7, 14) if is_streamed else (6, 13)
    problems = make_problems(6).to_iterable_dataset() if is_streamed else make_problems(6)
    options = {"callbacks": [save_at(*steps)], "max_steps": 18, "shuffle_dataset": is_shuffled}

    def run(name, checkpoint=None):
        seen = []

        def note(prompts, completions, **kwargs):
            seen.append(sorted(set(prompts)))
            return spread(completions)

        trainer = make(tiny_model, tmp_path / name, note, problems, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        return parameters(trainer), seen

    whole, order = run("whole")
    epochs = [order[start : start + 3] for start in (0, 3, 6)]
    assert all(len(set(map(str, epoch))) == 3 for epoch in epochs)
    assert len(set(map(str, epochs))) == (3 if is_shuffled else 1)
    for step in steps:
        resumed, seen = run(f"resumed-{step}", f"{tmp_path}/whole/checkpoint-{step}")
        # The generation batch in progress is in the checkpoint.
        assert seen == order[(step + 1) // 2 :]
        assert_equal(whole, resumed)


def test_a_damaged_checkpoint_is_skipped_and_its_file_named(tiny_model, tmp_path, caplog):
    make(tiny_model, tmp_path, max_steps=2, **SAVING).train()
    resumed = make(tiny_model, tmp_path, max_steps=3, **SAVING)
    last, before = (str(tmp_path / f"checkpoint-{step}") for step in (2, 1))
    files = {path.name: path for path in Path(last).iterdir()}
    assert files.keys() >= {"trainer_state.json", "qarl.json", "model.safetensors", "optimizer.pt", "scheduler.pt"}
    assert files.keys() >= {"rng_state.pth", "rollout_state_0.pt", "config.json", marker.COMPLETE_FILE}
    for name, path in files.items():
        whole = path.read_bytes()
        middle = len(whole) // 2
        for damaged in (b"", whole[:middle], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
            path.write_bytes(damaged)
            caplog.clear()
            # A page for people, and what Trainer has written for people to look up.
            if name in ("README.md", "training_args.bin"):
                assert resumed.find_checkpoint(True) == resumed.find_checkpoint(last) == last and not caplog.text
                continue
            assert resumed.find_checkpoint(True) == before
            # A changed mark may name another file.
            named = "" if name == marker.COMPLETE_FILE else f"{name} "
            assert f"checkpoint-2 is damaged: {named}" in caplog.text
            with pytest.raises(
                ValueError, match=f"checkpoint-2 is damaged: {named}.* Resume from .*checkpoint-1, the last"
            ):
                resumed.find_checkpoint(last)
        path.write_bytes(whole)
    Path(last, "optimizer.pt").write_bytes(b"")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3 and marker.is_complete(last)


def test_a_folder_in_use_is_refused_before_a_server_starts(tmp_path):
    pytest.importorskip("vllm")
    server = {"vllm_mode": "server", "vllm_server_autostart": True}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        # With a server the constructor would end here.
        server["vllm_server_port"] = taken.getsockname()[1]
        with hold(tmp_path / "output/.lock"), pytest.raises(ValueError, match="output_dir=.*is still training"):
            make_vllm_trainer(tmp_path, **server)
        with pytest.raises(ValueError, match="No server can listen"):
            make_vllm_trainer(tmp_path, **server)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_the_umask_decides_who_reads_files(tiny_model, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        trainer = make(tiny_model, tmp_path, max_steps=1, **SAVING)
        trainer.train()
        trainer.save_model()
        trainer.export_model()
    finally:
        os.umask(before)
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*") if path.is_file()}
    assert {f"{folder}model.safetensors" for folder in ("", "checkpoint-1/", "w4a16/")} < files.keys()
    assert {name: path.stat().st_mode & 0o777 for name, path in files.items()} == dict.fromkeys(files, mode)


@pytest.mark.parametrize("limit", [{"max_steps": 3}, {"max_steps": -1, "num_train_epochs": 0.1875}])
def test_resuming_a_run_at_its_last_update_trains_nothing(tiny_model, tmp_path, caplog, limit):
    options = {**SAVING, "lr_scheduler_type": "constant", **limit}
    whole = make(tiny_model, tmp_path, **options)
    whole.train()
    last = whole.state.global_step
    # Within an epoch.
    assert last == 3 and whole.state.epoch % 1
    for _ in range(2):
        again = make(tiny_model, tmp_path, **options)
        with caplog.at_level(logging.WARNING):
            output = again.train(resume_from_checkpoint=True)
        assert "checkpoint-3 is of update 3, and the run ends at 3: nothing is left to train" in caplog.text
        assert output.global_step == again.state.global_step == again.state.max_steps == last
        assert math.isfinite(output.training_loss) and "train_runtime" in output.metrics
        assert [row for row in again.state.log_history if "loss" in row] == rows(whole)
        assert_equal(parameters(whole), parameters(again))
        assert len(list(tmp_path.glob("checkpoint-*"))) == 3
    longer = make(tiny_model, tmp_path, **(options | {"max_steps": 4}))
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 4


def test_resuming_at_the_last_update_loads_the_best_model(tiny_model, tmp_path):
    scores = iter(range(1000, 0, -1))
    options = SAVING | {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
        "num_train_epochs": 1,
    }

    def run(resume):
        args = arguments(tmp_path, **options)

        def worse_and_worse(completions, **kwargs):
            return [float(next(scores)) for _ in completions]

        trainer = QaRLTrainer(tiny_model, worse_and_worse, args, make_problems(), make_problems())
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    first = run(None)
    assert first.state.best_global_step == 1
    again = run(True)
    assert again.state.global_step == 3
    assert_equal(parameters(first), parameters(again))


def test_a_checkpoint_without_states_is_said_to_have_none(tiny_model, tmp_path, caplog):
    options = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    make(tiny_model, tmp_path, max_steps=1, **options).train()
    make(tiny_model, tmp_path, max_steps=2, **options).train(resume_from_checkpoint=True)
    assert "checkpoint-1 was saved with save_only_model=True, without states: the optimizer" in caplog.text


def test_old_checkpoints_go_when_the_new_one_is_complete(tiny_model, tmp_path, monkeypatch, caplog):
    saving = SAVING | {"max_steps": 3, "save_total_limit": 1}
    complete = marker.complete

    def die_at_the_second(folder):
        if folder.name == "checkpoint-2":
            raise KeyboardInterrupt
        complete(folder)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(marker, "complete", die_at_the_second)
        make(tiny_model, tmp_path, **saving).train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"cut")
    resumed = make(tiny_model, tmp_path, **saving)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-2 is incomplete" in caplog.text and resumed.state.global_step == 3
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3"}
    assert torch.load(tmp_path / "checkpoint-3" / "training_args.bin", weights_only=False).save_total_limit == 1


@pytest.mark.parametrize(
    ("optim", "value", "of_weight"),
    [("muon", math.nan, False), ("adamw_torch", math.inf, False), ("adamw_torch", -math.inf, True)],
)
def test_weights_that_are_not_finite_are_no_checkpoint(tiny_model, tmp_path, optim, value, of_weight):
    options = SAVING | {"max_steps": 4, "save_total_limit": 1, "optim": optim}
    spoiled = make(tiny_model, tmp_path, callbacks=[Spoils(3, value, of_weight)], **options)
    named = r"After update 3 .*\(model.layers.1.mlp.up_proj.weight\).*checkpoint-3 is not written"
    with pytest.raises(ValueError, match=named):
        spoiled.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert marker.problem_of(tmp_path / "checkpoint-2", reads_content=True) is None
    resumed = make(tiny_model, tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4 and all(map(math.isfinite, [row["loss"] for row in rows(resumed)]))


def test_nonfinite_weights_are_neither_saved_nor_exported(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, max_steps=2, callbacks=[Spoils(2)])
    trainer.train()
    for write in (trainer.save_model, trainer.export_model, lambda: trainer.save_model(str(tmp_path / "other"))):
        with pytest.raises(ValueError, match="After update 2 .*up_proj.weight.* is not (saved|exported)"):
            write()
    assert not list(tmp_path.rglob("*.safetensors"))


class SetsClockBack(TrainerCallback):
    """Dates each checkpoint a day before the last."""

    def on_save(self, args, state, control, **kwargs):
        date = 2e9 - 86400 * state.global_step
        os.utime(Path(args.output_dir, f"checkpoint-{state.global_step}"), (date, date))


@pytest.mark.parametrize("limit", [1, 2])
def test_rotation_goes_by_step_not_by_clock(tiny_model, tmp_path, limit):
    for stale in (tmp_path / "checkpoint-1", tmp_path / "checkpoint-50"):
        stale.mkdir()
    options = SAVING | {"max_steps": 4, "save_total_limit": limit}
    make(tiny_model, tmp_path, callbacks=[SetsClockBack()], **options).train()
    expected = [f"checkpoint-{step}" for step in range(5 - limit, 5)]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == expected


def test_a_new_run_goes_on_from_its_own_checkpoints(tiny_model, tmp_path):
    """In the folder of an earlier one, which has checkpoints of later updates."""
    options = SAVING | {"max_steps": 4, "save_total_limit": 2}
    make(tiny_model, tmp_path, **options).train()
    make(tiny_model, tmp_path, callbacks=[stop_at(2)], seed=1, **options).train()
    last = str(tmp_path / "checkpoint-2")
    assert make(tiny_model, tmp_path, seed=1, **options).find_checkpoint(True) == last
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_a_checkpoint_of_an_earlier_run_is_resumed_by_name(tiny_model, tmp_path):
    options = SAVING | {"max_steps": 3}
    make(tiny_model, tmp_path, **options).train()
    make(tiny_model, tmp_path, callbacks=[stop_at(1)], seed=1, **options).train()
    resumed = make(tiny_model, tmp_path, **(options | {"max_steps": 4}))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.find_checkpoint(True) == str(tmp_path / "checkpoint-4")


def test_resuming_without_any_checkpoint_says_so(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="No complete checkpoint"):
        make(tiny_model, tmp_path).train(resume_from_checkpoint=True)


@pytest.fixture(scope="module")
def checkpoint_of(tiny_model, tmp_path_factory):
    """Trains with some options until the first checkpoint, once for all tests, and returns its folder."""
    made = {}

    def make_checkpoint(**options):
        folder, step = made.get(str(options)), options["save_steps"]
        if folder is None:
            folder = made[str(options)] = tmp_path_factory.mktemp("run")
            make(tiny_model, folder, callbacks=[stop_at(step)], **options).train()
        return str(folder / f"checkpoint-{step}")

    return make_checkpoint


def one_reward(completions, **kwargs):
    return spread(completions)


@pytest.mark.parametrize(
    ("before", "changed"),
    [
        ({}, {"beta": 0.1}),
        ({"beta": 0.1}, {"beta": 0.0}),
        ({}, {"reward": one_reward}),
        ({}, {"per_device_train_batch_size": 8}),
    ],
)
def test_resuming_with_other_options_draws_a_new_batch(tiny_model, tmp_path, caplog, checkpoint_of, before, changed):
    resumed = make(tiny_model, tmp_path, **(WITHIN | {"max_steps": 4} | before | changed))
    generated, seen = [], []
    generate, loss = resumed._generate_and_score_completions, resumed._compute_loss
    resumed._generate_and_score_completions = lambda x: generated.append(generate(x)) or generated[-1]
    resumed._compute_loss = lambda model, inputs: seen.append(inputs["completion_ids"]) or loss(model, inputs)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=checkpoint_of(**(WITHIN | before)))
    name = "reward_funcs" if "reward" in changed else [*changed][0]
    assert "The generation batch in progress of" in caplog.text and f"{name}=" in caplog.text
    # In the place of the batch that was dropped, which has one more update.
    assert resumed.state.global_step == 4 and len(generated) == len(seen) == 1
    drawn, num_rows = generated[0]["completion_ids"].tolist(), resumed.args.per_device_train_batch_size
    assert len(seen[0]) == num_rows and len(drawn) == num_rows * resumed.args.steps_per_generation
    assert all(row in drawn for row in seen[0].tolist())


def test_resuming_with_options_of_the_loss_keeps_the_batch(tiny_model, tmp_path, caplog, checkpoint_of):
    changed = {"learning_rate": 5e-4, "positive_epsilon_high": 0.5, "weight_decay": 0.0, "log_completions": False}
    resumed = make(tiny_model, tmp_path, **(WITHIN | {"max_steps": 4} | changed))
    resumed._generate_and_score_completions = None
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=checkpoint_of(**WITHIN))
    assert resumed.state.global_step == 4 and "The generation batch in progress" not in caplog.text


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"optim": "muon"}, "optim='adamw_torch' there, 'muon' here"),
        ({"optim": "sgd", "optim_args": "momentum=0.9"}, "optim='adamw_torch' there, 'sgd' here"),
        ({"arch": "llama"}, "model_type='qwen2' there, 'llama' here"),
        ({"arch": "qwen2", "num_hidden_layers": 3}, "num_hidden_layers=2 there, 3 here"),
        ({"peft_config": {}}, "no adapter there, one here"),
        ({"scheme": "w8a16"}, "scheme='w4a16' there, 'w8a16' here"),
        ({"group_size": 32}, "group_size=128 there, 32 here"),
        ({"quantize_learner": False}, "quantize_learner=True there, False here"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_checkpoint_that_does_not_fit_is_named_first(
    tiny_model, tmp_path, monkeypatch, checkpoint_of, changed, named
):
    checkpoint, model, options = checkpoint_of(**SAVING), tiny_model, dict(changed)
    if "arch" in options:
        model = make_tiny_model(tmp_path, options.pop("arch"), **{n: options.pop(n) for n in [*options]})
    if "peft_config" in options:
        options["peft_config"] = lora()
    options = {"max_steps": 2} | SAVING | options
    with monkeypatch.context() as patch:
        patch.setattr(Policy, "load", None)
        with pytest.raises(ValueError, match=named) as raised:
            make(model, tmp_path / "run", resume_from_checkpoint=checkpoint, **options)
    assert "start a new run from its weights" in str(raised.value) and "checkpoint-1 as the model" in str(raised.value)
    trainer = make(model, tmp_path / "run", **options)
    with pytest.raises(ValueError, match=rf"checkpoint-1 was trained with other settings \(.*{named}"):
        trainer.train(resume_from_checkpoint=checkpoint)


def test_other_frozen_parameters_are_named(tiny_model, tmp_path, checkpoint_of):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.model.embed_tokens.weight.requires_grad_(False)
    trainer = make(model, tmp_path, max_steps=2, **SAVING)
    with pytest.raises(ValueError, match="num_trained_tensors=27 there, 26 here; num_trained_parameters="):
        trainer.train(resume_from_checkpoint=checkpoint_of(**SAVING))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"learning_rate": 1e-4}, "learning_rate=0.001 there, 0.0001 here"),
        ({"weight_decay": 0.5, "adam_beta1": 0.8}, "weight_decay=0.01 there, 0.5 here; betas="),
    ],
    ids=str,
)
def test_settings_that_a_saved_optimizer_keeps_are_said(tiny_model, tmp_path, caplog, checkpoint_of, changed, said):
    resumed = make(tiny_model, tmp_path, **(SAVING | {"max_steps": 2} | changed))
    resumed.train(resume_from_checkpoint=checkpoint_of(**SAVING))
    assert resumed.optimizer.param_groups[0]["initial_lr"] == 1e-3
    if said is None:
        assert "The optimizer goes on" not in caplog.text
    else:
        assert caplog.text.count("The optimizer goes on with the settings that it was saved with in ") == 1
        assert said in caplog.text


def test_an_option_that_resumes_nothing_is_said(tiny_model, tmp_path, caplog, monkeypatch, checkpoint_of):
    monkeypatch.setattr("trl.GRPOTrainer.train", lambda *_, **__: None)
    for given, is_said in ((checkpoint_of(**SAVING), True), ("false", False)):
        trainer = make(tiny_model, tmp_path, resume_from_checkpoint=given, **SAVING)
        trainer.state.global_step = 1
        caplog.clear()
        trainer.train()
        assert ("A new run begins: resume_from_checkpoint=" in caplog.text) == is_said


def test_an_adapter_is_resumed_by_its_own_configuration(tiny_model, tmp_path):
    options = SAVING | {"optim": "adamw_torch_fused"}
    make(tiny_model, tmp_path, max_steps=1, peft_config=lora(), **options).train()
    for changed, named in (
        ({"r": 8}, r"\(adapter: r=4 there, 8 here\)"),
        ({"lora_alpha": 12}, r"\(adapter: lora_alpha=6 there, 12 here\)"),
        ({"lora_mode": "merged"}, r"\(lora_mode='adapter' there, 'merged' here\)"),
    ):
        given = options | {"lora_mode": changed.pop("lora_mode", "adapter")}
        with pytest.raises(ValueError, match=named):
            make(tiny_model, tmp_path, peft_config=lora(**changed), resume_from_checkpoint="True", **given)
    with pytest.raises(ValueError, match=r"\(an adapter there, none here\)"):
        make(tiny_model, tmp_path, resume_from_checkpoint="true", **options)
    with pytest.raises(ValueError, match=r"\(an adapter there, none here\)"):
        make(tiny_model, tmp_path, **options).train(resume_from_checkpoint=True)
    options["optim"] = "adamw_torch"
    resumed = make(tiny_model, tmp_path, max_steps=2, peft_config=lora(), resume_from_checkpoint="true", **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2


@pytest.mark.slow
def test_another_number_of_processes_starts_a_new_batch(tiny_model, tmp_path, caplog):
    saving = SAVING | {"steps_per_generation": 4}
    make(tiny_model, tmp_path, max_steps=1, **saving).train()
    path = tmp_path / "checkpoint-1" / "rollout_state_0.pt"
    state = torch.load(path, weights_only=True)
    state["settings"]["num_processes"] = 2
    marker.begin(path.parent)
    torch.save(state, path)
    marker.complete(path.parent)
    resumed = make(tiny_model, tmp_path, max_steps=2, **saving)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    assert "num_processes=2 there, 1 here" in caplog.text and resumed._step == 1
