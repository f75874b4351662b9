"""Trainings that several files of tests make, and what is read of them."""

import math
from dataclasses import fields

import pytest
import torch
from transformers import TrainerCallback

from testing_utils import TRAINING, make_problems, make_trainer, spread
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.quantization.storage import storage_of, whole
from trl_qarl.trainer.qarl_config import QaRLConfig


QUANTIZED = [name for name, scheme in SCHEMES.items() if scheme.is_quantized]


SIGNED = {s.grid.num_bits: name for name, s in SCHEMES.items() if s.nests}
"""Schemes with signed scales by their bits: each nests in those of more."""


RECORD = {"scheme": "w4a16", "group_size": 128, "exclude_modules": None, "scale_dtype": "bfloat16"}
"""Record that a run of `w4a16` writes next to its masters."""


def config(output_dir, **kwargs):
    return QaRLConfig(str(output_dir), use_cpu=True, **kwargs)


def bands(width):
    """Options of TBPO's trust band. A wide one drops nothing, so that no update is without a gradient."""
    return dict.fromkeys(("negative_epsilon_low", "negative_epsilon_high", "positive_epsilon_high"), width)


def _options(loss_type="tbpo", **given):
    # The same on every processor.
    return {"bf16": True, "loss_type": loss_type} | (bands(0.1) if loss_type == "tbpo" else {}) | given


def arguments(output_dir, **kwargs):
    return QaRLConfig(str(output_dir), **(TRAINING | _options(**kwargs)))


def make(model, output_dir, reward=spread, train_dataset=None, **kwargs):
    """A trainer with [`arguments`], and its other objects."""
    return make_trainer(model, output_dir, reward, train_dataset, **_options(**kwargs))


def train_stock(model, output_dir, peft_config=None, **kwargs):
    """TRL's own trainer after a training with the options of [`arguments`] that it has."""
    from trl import GRPOConfig, GRPOTrainer

    args = arguments(output_dir, **kwargs)
    names = [f.name for f in fields(GRPOConfig) if f.init and f.name != "generation_batch_size"]
    stock = GRPOConfig(**{name: getattr(args, name) for name in names})
    trainer = GRPOTrainer(model, spread, stock, make_problems(), peft_config=peft_config)
    trainer.train()
    return trainer


def lora(**kwargs):
    """An adapter of each linear layer, unless told otherwise."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return pytest.importorskip("peft").LoraConfig(**(options | kwargs))


def assert_equal(ours, theirs):
    """Compare tensors by their names, exactly."""
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


class Masters(TrainerCallback):
    """Keeps the masters of every step."""

    def __init__(self):
        self.at = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.at[state.global_step] = [whole(p).detach().clone() for p in model.parameters()]

    on_step_end = on_train_begin


class Spoils(TrainerCallback):
    """Puts a value that is not finite into a gradient, or a weight, of one update."""

    def __init__(self, update, value=math.nan, of_weight=False):
        self.update, self.value, self.of_weight = update, value, of_weight

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.update and not self.of_weight:
            model.get_parameter("model.layers.1.mlp.up_proj.weight").grad[3, 5] = self.value

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.update and self.of_weight:
            parameter = model.get_parameter("model.layers.1.mlp.up_proj.weight")
            storage_of(parameter).local(parameter).data.view(-1)[0] = self.value


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
"""Fields of a tiny configuration whose model has experts."""


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def rows(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def count_tokens(trainer):
    """The tokens of each forward of a training with gradients, once it has run."""
    num_tokens = []

    def count(module, args, output):
        if torch.is_grad_enabled():
            num_tokens.append(args[0].numel())

    trainer.model.get_input_embeddings().register_forward_hook(count)
    return num_tokens


def without_times(row):
    return {
        name: value
        for name, value in row.items()
        if not name.endswith(("seconds", "_per_second", "_time", "_runtime"))
    }
