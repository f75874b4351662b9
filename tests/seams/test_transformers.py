"""Private parts of transformers that we use."""

import inspect
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Cache, GenerationMixin, Trainer

from testing_utils import make_tiny_config
from trl_qarl.bitwise.modules import _NORMS, cache_of, operation_for
from trl_qarl.models import FAMILIES


def test_an_own_generation_configuration_is_updated_as_we_expect():
    """Only the update from the model's configuration allows custom entries."""
    source = inspect.getsource(GenerationMixin._prepare_generation_config)
    assert "defaults_only=True, allow_custom_entries=True" in source


def test_the_prefill_of_a_batch_is_one_call():
    """`_prefill_once` takes its place, with equal rows left out."""
    names = ["self", "input_ids", "generation_config", "model_kwargs"]
    assert [*inspect.signature(GenerationMixin._prefill).parameters][:4] == names
    assert "self._prefill(" in inspect.getsource(GenerationMixin._sample)


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


EXACT = {row.model_type: row.engine_layers for row in FAMILIES.values() if row.engine_layers}


@pytest.mark.parametrize(("arch", "layers"), EXACT.items())
def test_models_consist_of_modules_with_engine_numerics(arch, layers):
    """`operation_for`: each part of a decoder layer is known by its name, and attention by what it calls."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_tiny_config(arch))
    layer, rotary = model.model.layers[0], model.model.rotary_emb
    parts = [layer.self_attn, rotary] if layers != "transformers" else []
    parts += [layer] if layers == "fused" else []
    parts += [module for module in layer.modules() if [*module.parameters(recurse=False)]]
    for part in parts:
        assert operation_for(part, layers) is not None, type(part)
    if layers == "fused":
        norms = {name for name, _ in layer.named_children() if name.endswith("norm")}
        assert any(norms == {*names} - {None} for names in _NORMS)
    if layers != "transformers":
        forward = inspect.unwrap(type(layer.self_attn).forward)
        assert {"apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS"} <= {*forward.__code__.co_names}
        assert "rotate_half" in forward.__globals__ and forward.__kwdefaults__ is None
    assert model.config._attn_implementation


@pytest.mark.parametrize("arch", [arch for arch, layers in EXACT.items() if layers != "transformers"])
def test_arguments_that_operations_read_have_these_names(arch):
    """Operations that replace a forward read a cache by its type, and everything else by name or position."""
    model = AutoModelForCausalLM.from_config(make_tiny_config(arch, layer_types=["full_attention"] * 2))
    called = {}
    for name, module in model.named_modules():
        keep = partial(called.setdefault, name)
        module.register_forward_pre_hook(
            lambda _, args, kwargs, keep=keep: keep((args, kwargs)) and None, with_kwargs=True
        )
    model(input_ids=torch.tensor([[4, 5, 6]]), attention_mask=torch.ones(1, 3), use_cache=True)

    hidden, options = called["model.layers.0"]
    assert len(hidden) == 1 and {"attention_mask", "position_embeddings", "position_ids"} <= options.keys()
    positional, options = called["model.layers.0.self_attn"]
    assert not positional and {"hidden_states", "attention_mask", "position_embeddings"} <= options.keys()
    assert isinstance(cache_of(options), Cache)
    positional, options = called["model.rotary_emb"]
    assert positional and options.keys() <= {"position_ids", "layer_type"}
    for name, (positional, options) in called.items():
        if name.startswith("model.layers.0.") and name.endswith(("norm", "mlp")):
            assert len(positional) == 1 and not options
    names = inspect.signature(type(model).forward).parameters.keys()
    assert {"input_ids", "attention_mask", "position_ids", "labels", "logits_to_keep", "use_cache"} <= names
    assert {"input_ids", "attention_mask", "position_ids", "use_cache"} <= called["model"][1].keys()


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
