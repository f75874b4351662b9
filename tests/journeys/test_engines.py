"""`trl-qarl train` with rollouts in vLLM: trained, killed, resumed, exported, deployed."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from journeys import MARKS, ROUNDING

from trl_qarl.engines.server_process import free_port
from trl_qarl.quantization.schemes import SCHEMES


pytestmark = MARKS
# On a CPU: the other schemes run there with our kernels only.
IN_PLAIN_VLLM = ("w4a16", "w8a8", "fp8", "bf16")
# vLLM's CPU kernel for it quantizes activations otherwise.
ON_CPU = [scheme for scheme in SCHEMES if scheme != "w4a8"]
ENGINE = {"use_vllm": True, "vllm_max_model_length": 64}


def train_killed_and_resumed(user, *options, **more):
    """Kill the trainer in its second generation batch, and go on; returns the rows of its log."""
    argv = ["trl-qarl", "train", "--config", "recipe.yaml", *options]
    (user.folder / "dies").write_text("1")
    user.run(*argv, code=None, DIES_AS="0", **more)
    assert (user.folder / "out" / "checkpoint-1" / "checkpoint_complete").is_file()
    user.run(*argv, "--resume_from_checkpoint", "true", **more)
    rows = json.loads((user.folder / "out" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    found = [row["mismatch/abs_logp_max"] for row in rows if "mismatch/abs_logp_max" in row]
    assert len(found) == 3
    return found


@pytest.mark.parametrize(
    "scheme", [pytest.param(each, marks=() if each == "w4a16" else pytest.mark.nightly) for each in ("w4a16", "w8a8")]
)
def test_a_killed_colocated_training_resumes_and_deploys(user, scheme):
    user.write_recipe(**ENGINE, vllm_mode="colocate", scheme=scheme)
    assert max(train_killed_and_resumed(user)) <= ROUNDING
    user.assert_deployed(f"out/{scheme}")


@pytest.mark.parametrize(
    ("scheme", "tensor_parallel_size"),
    [
        *(pytest.param(each, 1, marks=() if each == "w4a16" else pytest.mark.nightly) for each in ON_CPU),
        pytest.param("w4a16", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_trainer_finds_its_server_and_deploys(user, scheme, tensor_parallel_size):
    # Two ranks divide the 128 inputs of a layer, and with them a group of as many.
    plan = {} if tensor_parallel_size == 1 else {"group_size": 64}
    words = ["--scheme", scheme]
    if tensor_parallel_size > 1:
        words += ["--group_size", "64", "--tensor-parallel-size", str(tensor_parallel_size)]
    server, port = user.serve(*words)
    user.write_recipe(**ENGINE, vllm_mode="server", vllm_server_port=port, scheme=scheme, **plan)
    train_killed_and_resumed(user)
    user.assert_deployed(f"out/{scheme}", ("transformers", "vllm") if scheme in IN_PLAIN_VLLM else ("transformers",))
    server.send_signal(15)
    server.wait(60)


@pytest.mark.nightly
def test_a_lost_server_ends_a_training_with_one_message(user):
    server, port = user.serve("--scheme", "w4a16")
    user.write_recipe(**ENGINE, vllm_mode="server", vllm_server_port=port, vllm_server_timeout=1, max_steps=100)
    argv = ["trl-qarl", "train", "--config", "recipe.yaml"]
    training, folder = user.start(*argv), user.folder / "out"
    while not any(folder.glob("checkpoint-*/checkpoint_complete")):
        assert training.poll() is None, (user.folder / "log").read_text()
        time.sleep(0.05)
    # With its engine, which is forked here and would keep the port.
    os.killpg(server.pid, signal.SIGKILL)
    assert training.wait(120) == 1
    output = (user.folder / "log").read_text()
    (line,) = [line for line in output.splitlines() if "error" in line]
    last = max(int(path.parent.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*/checkpoint_complete"))
    assert re.match("trl-qarl: error: .* failed 4 times. The last error: No vLLM server at", line)
    assert f"\nout/checkpoint-{last} is complete: go on from it with `--resume_from_checkpoint true`.\n" in output
    _, port = user.serve("--scheme", "w4a16")
    more = ["--vllm_server_port", str(port), "--max_steps", str(last + 2)]
    user.run(*argv, *more, "--resume_from_checkpoint", "true")
    user.assert_deployed("out/w4a16")


@pytest.mark.nightly
def test_a_trainer_with_two_servers_deploys(user):
    """Each has the token file and the transfer directory of its port."""
    servers = [user.serve("--scheme", "w4a16", "--seed", seed) for seed in "01"]
    urls = [f"http://127.0.0.1:{port}" for _, port in servers]
    user.write_recipe(**ENGINE, vllm_mode="server", vllm_server_base_url=urls, per_device_train_batch_size=4)
    assert max(train_killed_and_resumed(user)) <= ROUNDING
    user.assert_deployed("out/w4a16")
    for server, _ in servers:
        server.send_signal(15)
        server.wait(60)


@pytest.mark.nightly
def test_one_colocated_engine_of_two_processes_deploys(user):
    """Each weight sync compares log-probs of a fixed text within the learner's own rounding."""
    left = set(Path("/dev/shm").glob("*cpushm_*"))
    plan = {"scheme": "w4a16", "group_size": 64, "numerics": "fast"}
    user.write_recipe(**ENGINE, **plan, vllm_mode="colocate", vllm_tensor_parallel_size=2)
    try:
        user.launch("ddp")
    finally:
        # vLLM leaves them behind.
        for path in set(Path("/dev/shm").glob("*cpushm_*")) - left:
            path.unlink()
    rows = json.loads((user.folder / "out" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    assert [row["rollout/weight_version"] for row in rows if "rollout/weight_version" in row] == [0, 1, 2]
    user.assert_deployed("out/w4a16")


@pytest.mark.nightly
def test_a_killed_trainer_starts_its_server_again(user):
    user.write_recipe(**ENGINE, vllm_mode="server", vllm_server_autostart=True, vllm_server_port=free_port())
    train_killed_and_resumed(user)
    user.assert_deployed("out/w4a16")
