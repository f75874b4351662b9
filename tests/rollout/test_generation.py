"""Generation with a server that fails, its side played by an object: what a training survives, and what is saved."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from testing_utils import count_digits
from testing_utils.played_server import weights
from trl_qarl.engines.http_session import ServerLost
from trl_qarl.rollout import generation
from trl_qarl.rollout.failures import MAX_ATTEMPTS, EngineLost


pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

FOR_GOOD = [RuntimeError("ended with code -9")] * 9


_undisturbed = []


@pytest.fixture
def undisturbed(make_played_trainer):
    """Weights at the end of a training in which nothing fails."""
    if not _undisturbed:
        trainer, server = make_played_trainer("undisturbed")
        trainer.train()
        assert server.num_starts == 0
        _undisturbed.append(weights(trainer))
    return _undisturbed[0]


def checkpoint(trainer, step):
    folder = Path(trainer.args.output_dir) / f"checkpoint-{step}"
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == step
    assert (folder / "model.safetensors").is_file() and (folder / "rollout_state_0.pt").is_file()
    return folder


def test_nothing_is_asked_of_the_server_after_the_completions(make_played_trainer):
    trainer, server = make_played_trainer(max_steps=2)
    counts = []

    def reward(completions, **kwargs):
        counts.append(server.num_requests)
        return count_digits(completions)

    class AtStepEnd(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            assert server.num_requests == counts[-1]

    trainer.reward_funcs = [reward]
    trainer.add_callback(AtStepEnd())
    trainer.train()
    assert len(counts) == 2


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ({"generate": [None, None, "die"], "start": FOR_GOOD}, "failed 4 times.*code -9"),
        ({"generate": [None, None] + [KeyError("choices")] * 9}, "'choices'"),
        ({"generate": [None, None, MemoryError("full")]}, "failed: MemoryError: full"),
        ({"publish": [None, None, KeyError("name")]}, "failed: KeyError: 'name'"),
        ({"publish": [None, None, ServerLost("")], "describe": [ValueError("another learner")]}, "another learner"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_permanent_failure_leaves_a_checkpoint(make_played_trainer, undisturbed, failures, message):
    trainer, server = make_played_trainer()
    server.failures = {what: list(of_it) for what, of_it in failures.items()}
    with pytest.raises(EngineLost, match=message) as raised:
        trainer.train()
    assert server.num_starts <= MAX_ATTEMPTS
    assert raised.value.__notes__ == [
        f"{checkpoint(trainer, 2)} is complete: go on from it with `resume_from_checkpoint`."
    ]
    resumed, _ = make_played_trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4 and torch.equal(weights(resumed), undisturbed)


def test_what_a_rollout_func_asks_the_client_for_is_its_own(make_played_trainer):
    trainer, server = make_played_trainer()
    trainer.vllm_generation.sync_weights()
    answer = trainer.vllm_generation.vllm_client.generate(["some text"], n=2, max_tokens=50)
    assert [len(ids) for ids in answer["completion_ids"]] == [50, 50]


def test_weights_changed_by_somebody_else_raise(make_played_trainer):
    trainer, server = make_played_trainer()
    publish = server.publish
    server.publish = lambda version: publish("theirs")
    with pytest.raises(EngineLost, match="'theirs'"):
        trainer.train()


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_seed_of_each_request_is_refused_on_a_cpu(make_played_trainer, monkeypatch, device):
    """vLLM dies of it there when a prompt is prefilled in pieces."""
    trainer, server = make_played_trainer()
    backend = trainer.vllm_generation
    monkeypatch.setattr(generation.Publisher, "check_engine", lambda publisher: {"device": device, "kernels": {}})
    backend._use(backend.engine)
    backend.generation_kwargs = {"seed": 1}
    with pytest.raises(ValueError, match="'seed'") if device == "cpu" else nullcontext():
        backend._use(backend.engine)


def test_completions_that_a_servers_context_cuts_are_logged(make_played_trainer, caplog):
    trainer, _ = make_played_trainer(max_steps=1)
    longest = max(map(len, trainer.processing_class([*trainer.train_dataset["prompt"]])["input_ids"]))
    trainer.vllm_generation.context_length = longest + 1
    trainer.train()
    assert f"are more than the engine's context of {longest + 1} tokens" in caplog.text


def test_pictures_reach_the_server_with_their_prompts(make_played_trainer):
    trainer, server = make_played_trainer()
    backend = trainer.vllm_generation
    backend.sync_weights()
    assert len(backend.generate([[5, 6]] * 4 + [[7]] * 4, [["picture"]] * 4 + [None] * 4, 4)[1]) == 8
    assert server.asked == ([[5, 6], [7]], [["picture"], None])


def test_a_complete_checkpoint_is_not_written_again(make_played_trainer, monkeypatch):
    trainer, server = make_played_trainer(save_strategy="steps", save_steps=2)
    server.failures = {"publish": [None, None, "die"], "start": FOR_GOOD}
    saved = []
    save = trainer._save_checkpoint
    trainer._save_checkpoint = lambda *args, **kwargs: (saved.append(trainer.state.global_step), save(*args, **kwargs))
    with pytest.raises(EngineLost):
        trainer.train()
    assert saved == [2]
    checkpoint(trainer, 2)


def test_weights_that_a_callback_changes_are_published(make_played_trainer):
    """As one does that evaluates an average of the weights, and puts the others back."""
    trainer, server = make_played_trainer(max_steps=2)
    held = []

    class Swap(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            weight = model.get_output_embeddings().weight
            mine = weight.detach().clone()
            for value in (mine, torch.zeros_like(mine), mine, mine):
                with torch.no_grad():
                    # Written to only where it changes, as the last one must not count.
                    if not torch.equal(weight, value):
                        weight.copy_(value)
                trainer.evaluate()
                held.append((server.held, server.version))

    trainer.add_callback(Swap())
    trainer.train()
    assert len(held) == 8
    for before, swapped, back, again in (held[:4], held[4:]):
        assert before[0] == back[0] != swapped[0]
        # Nothing is sent where nothing has changed.
        assert again == back and before[1] != back[1]


def test_an_earlier_runs_checkpoint_is_not_taken(make_played_trainer, undisturbed):
    earlier, _ = make_played_trainer(save_strategy="steps", save_steps=2, learning_rate=0.1)
    earlier.train()
    trainer, server = make_played_trainer()
    server.failures = {"publish": [None, None, "die"], "start": FOR_GOOD}
    with pytest.raises(EngineLost):
        trainer.train()
    resumed, _ = make_played_trainer()
    resumed.train(resume_from_checkpoint=str(checkpoint(trainer, 2)))
    assert torch.equal(weights(resumed), undisturbed)
