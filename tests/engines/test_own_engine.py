"""An engine that the trainer starts has the learner's configuration and tokenizer, wherever these come from."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from testing_utils import (
    TRAINING,
    count_digits,
    logged,
    make_problems,
    make_tiny_config,
    make_tiny_model,
    make_trainer,
)
from trl_qarl import QaRLConfig, QaRLTrainer
from trl_qarl.engines.server import start_command
from trl_qarl.engines.server_process import free_port
from trl_qarl.engines.spec import EngineSpec
from trl_qarl.rollout.failures import PromptTooLong


ENGINE = {"use_vllm": True, "bf16": False, "vllm_max_model_length": 128, "max_steps": 2}
COLOCATED = ENGINE | {"vllm_mode": "colocate"}
colocated = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("quick_engines")]


def make_changed(folder):
    """A model with a new token, other rotations, and the name of a repository that does not exist."""
    path = make_tiny_model(folder, "qwen2")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<|new|>"])
    model.resize_token_embeddings(model.config.vocab_size + 64)
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 123.0}
    model = type(model)._from_config(model.config, dtype=torch.float32)
    model.config._name_or_path = model.name_or_path = "nobody/nothing"
    return model, tokenizer


def train(model, tokenizer, output_dir, **options):
    args = QaRLConfig(str(output_dir), **(TRAINING | options))
    trainer = QaRLTrainer(model, count_digits, args, make_problems(), processing_class=tokenizer)
    trainer.train()
    return trainer


class TestColocated:
    pytestmark = colocated

    def test_an_engine_gets_a_changed_model_and_tokenizer(self, tmp_path):
        trainer = train(*make_changed(tmp_path), tmp_path / "run", **COLOCATED)
        assert max(logged(trainer, "mismatch/abs_logp_max")) < 1e-5
        described = trainer.vllm_generation.description
        assert described["model"]["vocab_size"] == trainer.model.config.vocab_size
        assert described["tokenizer"]["vocabulary size"] == len(trainer.processing_class)

    def test_a_prompt_beyond_the_context_is_refused_first(self, tmp_path):
        prompts = make_problems(8).map(lambda row: {"prompt": row["prompt"] + " 1 + 1" * 40})
        options = COLOCATED | {"vllm_max_model_length": 64}
        trainer = make_trainer(make_tiny_model(tmp_path, "qwen2"), tmp_path / "run", train_dataset=prompts, **options)
        with pytest.raises(PromptTooLong, match=r"A prompt has \d+ tokens.*context 64,.*vllm_max_model_length"):
            trainer.train()


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.slow
def test_a_server_gets_a_changed_model_and_tokenizer(tmp_path):
    options = {"vllm_mode": "server", "vllm_server_autostart": True, "vllm_server_port": free_port()}
    trainer = train(*make_changed(tmp_path), tmp_path / "run", **(ENGINE | options | {"vllm_server_timeout": 900}))
    assert max(logged(trainer, "mismatch/abs_logp_max")) < 1e-5


def test_the_command_for_a_server_names_the_revision(tmp_path):
    args = QaRLConfig(str(tmp_path), use_cpu=True, model_init_kwargs={"revision": "step-100"})
    assert "--revision step-100" in start_command(args, EngineSpec("org/model"))
    args = QaRLConfig(str(tmp_path), use_cpu=True, model_init_kwargs={"revision": "main"})
    assert "--revision" not in start_command(args, EngineSpec("org/model"))


def test_a_context_below_the_fixed_text_is_refused():
    with pytest.raises(ValueError, match="vllm_max_model_length=32.* at least 49"):
        QaRLConfig("out", use_cpu=True, use_vllm=True, vllm_max_model_length=32)


@pytest.mark.parametrize("use_vllm", [False, pytest.param(True, marks=pytest.mark.vllm)])
def test_unknown_names_of_generation_kwargs_are_refused(use_vllm):
    with pytest.raises(ValueError, match=r"generation_kwargs contains \['stop_tokens'\]"):
        QaRLConfig("out", use_cpu=True, use_vllm=use_vllm, generation_kwargs={"stop_tokens": [5]})


def test_the_folder_of_an_engine_has_no_weights(tmp_path):
    from trl_qarl.checkpoint.export import save_configuration

    model, tokenizer = make_changed(tmp_path)
    save_configuration(model, tmp_path / "engine", torch.float32, tokenizer)
    config = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["dtype"] == "float32"
    assert not [*Path(tmp_path / "engine").glob("*.safetensors")]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "engine")) == len(tokenizer)


def test_a_configuration_that_reads_no_whole_parts_is_saved(tmp_path):
    """DBRX's refuses what `to_dict` writes of its parts."""
    from trl_qarl.checkpoint.export import save_configuration

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            make_tiny_config("dbrx", attn_config={"clip_qkv": 8.0, "rope_theta": 1e4}, ffn_config={"moe_top_k": 2})
        )
    save_configuration(model, tmp_path, torch.float32)
    assert AutoConfig.from_pretrained(tmp_path).attn_config.clip_qkv == 8.0
