"""A vLLM server that the trainer starts itself, and what happens when it is killed."""

import psutil
import pytest
from transformers import TrainerCallback

from testing_utils import count_digits, logged, make_vllm_trainer
from trl_qarl.rollout.handshake import TOKEN_VARIABLE
from trl_qarl.rollout.server import free_port


pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


class KillServer(TrainerCallback):
    """Kills an autostarted server before, during and after a publication, once each."""

    def __init__(self):
        self.killed = []

    def watch(self, trainer):
        self.generation = trainer.vllm_generation
        transport = self.generation.publisher.transport
        self.send, self.finish = transport.send, transport.finish
        transport.send, transport.finish = self.send_and_die, self.finish_and_die

    def kill(self, moment):
        self.killed.append(moment)
        self.generation.server._process.kill()
        self.generation.server._process.wait()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.kill("before")

    def send_and_die(self, tensors):
        self.send(tensors)
        if self.killed == ["before"] and self.generation.weight_version() == "4":
            self.kill("during")

    def finish_and_die(self, *arguments):
        self.finish(*arguments)
        if self.killed == ["before", "during"] and self.generation.weight_version() == "6":
            self.kill("after")


def test_a_server_killed_before_during_and_after_an_update_is_replaced(tmp_path):
    killer = KillServer()
    trainer = make_vllm_trainer(
        tmp_path,
        "qwen2",
        scheme="w8a8",
        vllm_mode="server",
        vllm_server_autostart=True,
        vllm_server_port=free_port(),
        max_steps=8,
        callbacks=[killer],
    )
    killer.watch(trainer)
    trainer.train()
    assert killer.killed == ["before", "during", "after"]
    assert trainer.state.global_step == 8
    # A difference in the seventh digit can move an activation over the edge of its INT8 step; 7e-4 has been seen.
    assert max(logged(trainer, "mismatch/abs_logp_max")) < 5e-3
    assert logged(trainer, "rollout/weight_version") == [0, 2, 4, 6]
    assert not trainer.vllm_generation.server.is_running
    assert (tmp_path / "output" / "vllm_server.log").is_file()


@pytest.mark.parametrize(("scheme", "arch"), [("fp8", "gemma"), ("bf16", "qwen3")])
def test_the_other_schemes_through_a_server(tmp_path, scheme, arch):
    trainer = make_vllm_trainer(
        tmp_path,
        arch,
        scheme=scheme,
        vllm_mode="server",
        vllm_server_autostart=True,
        vllm_server_port=free_port(),
    )
    workers = psutil.Process(trainer.vllm_generation.server._process.pid).children(recursive=True)
    assert workers and not any(TOKEN_VARIABLE in worker.environ() for worker in workers)
    trainer.train()
    assert max(logged(trainer, "mismatch/abs_logp_max")) < 1e-5
    assert logged(trainer, "rollout/weight_version") == [0, 2]
    assert not trainer.vllm_generation.server.is_running


def test_a_port_that_is_taken_is_refused_before_anything_is_started(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ValueError, match=f"cannot start a server on port {port}.*Choose another `vllm_server_port`"
        ):
            make_vllm_trainer(tmp_path, vllm_mode="server", vllm_server_autostart=True, vllm_server_port=port)
    assert not (tmp_path / "output" / "vllm_server.log").exists()


def test_a_server_killed_while_rewards_are_computed_and_between_steps_costs_no_step(tmp_path):
    killed = []

    def kill(moment):
        killed.append(moment)
        trainer.vllm_generation.server._process.kill()
        trainer.vllm_generation.server._process.wait()

    def reward(completions, **kwargs):
        if trainer.state.global_step == 1 and not killed:
            kill("reward")
        return count_digits(completions)

    class BetweenSteps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and killed == ["reward"]:
                kill("step end")

    trainer = make_vllm_trainer(
        tmp_path,
        "qwen2",
        scheme="w8a16",
        vllm_mode="server",
        vllm_server_autostart=True,
        vllm_server_port=free_port(),
        steps_per_generation=1,
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
        callbacks=[BetweenSteps()],
    )
    trainer.reward_funcs = [reward]
    trainer.train()
    assert killed == ["reward", "step end"]
    # Completions that were rewarded when the server died are used, and what comes after is sampled from the current weights.
    assert trainer.state.global_step == 3
    assert logged(trainer, "rollout/weight_version") == [0, 1, 2]
    assert max(logged(trainer, "mismatch/abs_logp_max")) < 1e-4
    complete = sorted(path.parent.name for path in (tmp_path / "output").glob("checkpoint-*/trainer_state.json"))
    assert complete == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert not trainer.vllm_generation.server.is_running
