"""Training a LoRA adapter on a low-bit base through vLLM: a server of the trainer, and an engine in its process."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from testing_utils import ADAPTED_PLAN, logged, make_tiny_model, make_trainer
from testing_utils.trainings import lora
from testing_utils.web_servers import complete
from trl_qarl.adapters.tensors import adapter_tensors


pytest.importorskip("vllm")
pytest.importorskip("peft")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROLLOUTS = {"use_vllm": True, "bf16": False, "vllm_max_model_length": 128, "steps_per_generation": 1, "max_steps": 3}


def make(directory, arch="qwen2", **arguments):
    """A trainer of three updates, each on completions of its own, whose adapter moves far in each."""
    options = ROLLOUTS | {"save_strategy": "steps", "save_steps": 2, "learning_rate": 3e-2} | arguments
    return make_trainer(make_tiny_model(directory, arch), directory / "out", peft_config=lora(), **options)


def check(trainer, bound=1e-5):
    """Three versions, of which the first alone had a base with it, and learner and engine agree on every token."""
    num_adapter = sum("lora_" in name for name, _ in trainer.model.named_parameters())
    assert logged(trainer, "rollout/weight_version") == [0, 1, 2]
    first, *others = logged(trainer, "publish/tensors")
    num_base = logged(trainer, "publish/unchanged_tensors")[-1]
    assert num_base > 20 and first == num_base + num_adapter and others == [num_adapter] * 2
    assert max(logged(trainer, "mismatch/abs_logp_max")) < bound
    assert logged(trainer, "mismatch/unknown_tokens") == [0, 0, 0]
    # Without its adapter the learner is another model.
    batch = [{"prompt": "1 +"}] * 4
    output = trainer._generate_and_score_completions(batch)
    mask, sampled = output["completion_mask"].bool(), output["sampling_per_token_logps"]
    with torch.no_grad(), trainer.model.disable_adapter():
        base, _, _ = trainer._score(trainer.model, output)
    assert (base - sampled)[mask].abs().mean() > 20 * max(logged(trainer, "mismatch/abs_logp_mean"))


def check_resumed(trainer, bound=1e-5):
    """The checkpoint of update 2 is what the third rollout samples, in learner and engine."""
    folder, begun = f"{trainer.args.output_dir}/checkpoint-2", {}

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            begun.update({name: tensor.clone() for name, tensor in adapter_tensors(model).items()})

    move(trainer)
    # What rollouts outside of training have left there would be averaged with the next row.
    trainer._metrics["train"].clear()
    trainer.add_callback(Look())
    trainer.train(resume_from_checkpoint=folder)
    saved = load_file(f"{folder}/adapter_model.safetensors")
    assert saved.keys() == begun.keys() and all(torch.equal(begun[name], tensor) for name, tensor in saved.items())
    assert any(not torch.equal(tensor, saved[name]) for name, tensor in adapter_tensors(trainer.model).items())
    assert logged(trainer, "rollout/weight_version") == [0, 1, 2] and trainer.state.global_step == 3
    assert max(logged(trainer, "mismatch/abs_logp_max")) < bound


@pytest.mark.parametrize(
    ("scheme", "arch", "bound"),
    [
        ("w8a8", "llama", 5e-3),
        pytest.param("fp8", "gemma", 5e-3, marks=pytest.mark.nightly),
        pytest.param("bf16", "qwen3", 1e-5, marks=pytest.mark.nightly),
        pytest.param(ADAPTED_PLAN, "qwen2", 1e-5, id="other formats"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("quick_engines")
def test_colocated_rollouts_follow_the_adapter(tmp_path, scheme, arch, bound):
    trainer = make(tmp_path, arch, scheme=scheme, vllm_mode="colocate")
    trainer.train()
    check(trainer, bound)
    if scheme == "w8a8":
        check_resumed(trainer, bound)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, warm):
    """A training through a server that the trainer started, which still runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        server = warm.serve(patch)
        trainer = make(tmp_path_factory.mktemp("server"), scheme="w4a16", **server)
        generation = trainer.vllm_generation
        try:
            with patch.context() as training:
                # It would end with training.
                training.setattr(generation, "stop_server", lambda: None)
                trainer.train()
            yield trainer
        finally:
            generation.stop_server()


def is_serving(trainer):
    return complete(trainer.vllm_generation.vllm_client.base_url).status_code == 200


def move(trainer):
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.xdist_group("warm_servers")
class TestServer:
    def test_rollouts_of_a_server_follow_the_adapter(self, trained):
        check(trained)
        assert is_serving(trained)

    def test_a_restarted_server_gets_base_and_adapter(self, trained, monkeypatch):
        generation = trained.vllm_generation
        monkeypatch.setattr(generation, "stop_server", lambda: None)

        class Kill(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                generation.server._process.kill()
                generation.server._process.wait()

        kill = Kill()
        trained.add_callback(kill)
        try:
            check_resumed(trained)
        finally:
            trained.remove_callback(kill)
        assert logged(trained, "publish/unchanged_tensors")[-1] == 0
        assert logged(trained, "publish/canary_abs_logp")[-1] < 1e-5
        assert is_serving(trained)
