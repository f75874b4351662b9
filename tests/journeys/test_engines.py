"""`trl-qarl train` with rollouts in vLLM: trained, killed, resumed, exported, deployed."""

import json

import pytest

from trl_qarl.engines.server_process import free_port


pytestmark = [
    *(pytest.mark.distributed, pytest.mark.slow, pytest.mark.vllm),
    *(pytest.mark.xdist_group("journeys"), pytest.mark.timeout(900)),
]
# On a CPU: the other schemes run there with our kernels only.
IN_PLAIN_VLLM = ("w4a16", "w8a8", "fp8")
ENGINE = {"use_vllm": True, "vllm_max_model_length": 64}


def train_killed_and_resumed(user, *options, **more):
    """Kill the trainer in its second generation batch, and go on; returns the rows of its log."""
    argv = ["trl-qarl", "train", "--config", "recipe.yaml", *options]
    (user.folder / "dies").write_text("1")
    user.run(*argv, code=None, kind="engines", DIES_AS="0", **more)
    assert (user.folder / "out" / "checkpoint-1" / "checkpoint_complete").is_file()
    user.run(*argv, "--resume_from_checkpoint", "true", kind="engines", **more)
    rows = json.loads((user.folder / "out" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    found = [row["mismatch/abs_logp_max"] for row in rows if "mismatch/abs_logp_max" in row]
    assert len(found) == 3
    return found


@pytest.mark.parametrize(
    "scheme", [pytest.param(each, marks=() if each == "w4a16" else pytest.mark.nightly) for each in ("w4a16", "w8a8")]
)
def test_a_killed_colocated_training_resumes_and_deploys(user, scheme):
    user.write_recipe(**ENGINE, vllm_mode="colocate", scheme=scheme)
    assert train_killed_and_resumed(user) == [0.0] * 3
    user.assert_deployed(f"out/{scheme}")


@pytest.mark.parametrize(
    ("scheme", "tensor_parallel_size"),
    [
        ("w4a16", 1),
        *(pytest.param(scheme, 1, marks=pytest.mark.nightly) for scheme in ("w8a16", "w8a8", "fp8", "nvfp4a16")),
        pytest.param("w4a16", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_trainer_finds_its_server_and_deploys(user, scheme, tensor_parallel_size):
    port, size = str(free_port()), str(tensor_parallel_size)
    serve = ["--model", "model", "--scheme", scheme, "--max-model-len", "64", "--port", port]
    # Two ranks divide the 128 inputs of a layer, and with them a group of as many.
    plan = {} if tensor_parallel_size == 1 else {"group_size": 64}
    serve += [word for name, value in plan.items() for word in (f"--{name}", str(value))]
    several = {} if tensor_parallel_size == 1 else {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = user.start(
        *("trl-qarl", "vllm-serve", *serve, "--tensor-parallel-size", size), log="server", kind="engines", **several
    )
    user.wait_for(f"http://127.0.0.1:{port}/health", server)
    user.write_recipe(**ENGINE, vllm_mode="server", vllm_server_port=int(port), scheme=scheme, **plan)
    train_killed_and_resumed(user)
    user.assert_deployed(f"out/{scheme}", ("transformers", "vllm") if scheme in IN_PLAIN_VLLM else ("transformers",))
    server.send_signal(15)
    server.wait(60)


@pytest.mark.nightly
def test_a_killed_trainer_starts_its_server_again(user):
    user.write_recipe(**ENGINE, vllm_mode="server", vllm_server_autostart=True, vllm_server_port=free_port())
    train_killed_and_resumed(user)
    user.assert_deployed("out/w4a16")
