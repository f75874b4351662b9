"""
A vLLM server that the trainer starts itself, killed while rewards are computed. One that dies between two updates is
in test_adapters_vllm.py; benchmarks/faults/ has every other moment with a stand-in.
"""

from pathlib import Path

import psutil
import pytest

from testing_utils import count_digits, logged, make_vllm_trainer
from trl_qarl.engines.server_process import free_port
from trl_qarl.wire.handshake import TOKEN_VARIABLE


pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize(
    ("scheme", "arch", "has_engine_process"),
    [
        ("w8a8", "qwen2", False),
        pytest.param("bf16", "qwen3", False, marks=pytest.mark.nightly),
        # The default, with a process for each part of it, whose message queues it must not leave behind.
        pytest.param("fp8", "gemma", True, id="as users start it", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.xdist_group("warm_servers")
def test_a_server_that_is_killed_is_replaced_and_costs_no_step(
    tmp_path, monkeypatch, warm_servers, scheme, arch, has_engine_process
):
    # An engine in this process has set it.
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    port = {"vllm_mode": "server", "vllm_server_autostart": True, "vllm_server_port": free_port()}
    server = port | {"vllm_server_timeout": 900} if has_engine_process else warm_servers.serve(monkeypatch)
    trainer = make_vllm_trainer(
        tmp_path,
        arch,
        scheme=scheme,
        **server,
        steps_per_generation=1,
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
    )
    process, num_killed = trainer.vllm_generation.server._process, []

    def reward_and_kill(completions, **kwargs):
        if trainer.state.global_step == 1 and not num_killed:
            num_killed.append(1)
            process.kill()
            process.wait()
        return count_digits(completions)

    trainer.reward_funcs = [reward_and_kill]
    workers = psutil.Process(process.pid).children(recursive=True)
    assert bool(workers) or not has_engine_process
    assert not any(TOKEN_VARIABLE in worker.environ() for worker in workers)
    queues = {Path(map.path) for worker in workers for map in worker.memory_maps() if "/dev/shm/psm_" in map.path}
    assert bool(queues) == has_engine_process and all(queue.exists() for queue in queues)
    trainer.train()
    assert not any(queue.exists() for queue in queues)
    assert len(num_killed) == 1
    # Completions that were rewarded when the server died are used, and what comes after is sampled from the current
    # weights.
    assert trainer.state.global_step == 3
    assert logged(trainer, "rollout/weight_version") == [0, 1, 2]
    # A difference in the seventh digit can move an activation over the edge of its 8-bit step: 7e-4 has been seen in
    # INT8, 3e-4 in FP8.
    assert max(logged(trainer, "mismatch/abs_logp_max")) < (5e-3 if scheme in ("w8a8", "fp8") else 1e-5)
    complete = sorted(path.parent.name for path in (tmp_path / "output").glob("checkpoint-*/trainer_state.json"))
    assert complete == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert not trainer.vllm_generation.server.is_running
    assert (tmp_path / "output" / "vllm_server.log").is_file()
