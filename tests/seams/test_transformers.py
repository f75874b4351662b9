"""Private parts of transformers that we use."""

import inspect

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, GenerationMixin, Trainer

from testing_utils import make_tiny_config
from trl_qarl.numerics.availability import COVERED_CLASSES
from trl_qarl.numerics.modules import ENGINE_OPERATIONS


def test_an_own_generation_configuration_is_updated_as_we_expect():
    """Only the update from the model's configuration allows custom entries."""
    source = inspect.getsource(GenerationMixin._prepare_generation_config)
    assert "defaults_only=True, allow_custom_entries=True" in source


def test_processors_of_a_call_are_collected_in_one_place():
    """By name: `record_sampling_logps` reads these arguments and replaces one."""
    names = {"generation_config", "logits_processor", "prefix_allowed_tokens_fn"}
    assert names <= inspect.signature(GenerationMixin._get_logits_processor).parameters.keys()
    call = (
        inspect.getsource(GenerationMixin.generate)
        .partition("self._get_logits_processor(")[2]
        .partition("\n        )")[0]
    )
    assert all(f"{name}={name}" in call for name in names)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_models_are_made_of_the_modules_that_have_engine_numerics(arch):
    """`COVERED_CLASSES`: each part of a decoder layer has the engine's operation."""
    model = AutoModelForCausalLM.from_config(make_tiny_config(arch))
    assert type(model).__name__ in COVERED_CLASSES
    layer = model.model.layers[0]
    for part in (layer, layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
        assert type(part) in ENGINE_OPERATIONS, type(part)
    rotary = model.model.rotary_emb
    assert type(rotary) in ENGINE_OPERATIONS and rotary.rope_type == "default"
    frequencies, _ = rotary.compute_default_rope_parameters(model.config)
    assert torch.equal(frequencies, rotary.inv_freq)
    assert model.config._attn_implementation


def test_the_trainer_has_the_steps_that_we_stand_between():
    assert hasattr(Trainer, "_finish_current_push")
    assert "model" in inspect.signature(Trainer.create_optimizer).parameters
    assert "num_items_in_batch" in inspect.signature(Trainer.training_step).parameters


def test_the_flag_of_a_skipped_step_keeps_the_schedule():
    """`AcceleratedOptimizer._is_overflow` has no setter, and the trainer reads it before it advances the schedule."""
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    assert not accelerator.optimizer_step_was_skipped
    optimizer._is_overflow = True
    assert accelerator.optimizer_step_was_skipped
    optimizer.step()
    assert optimizer._is_overflow, "cleared by accelerate only if it scales the loss"
    assert "if not self.accelerator.optimizer_step_was_skipped" in inspect.getsource(Trainer._run_epoch)
