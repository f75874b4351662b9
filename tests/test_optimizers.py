"""Every kind of optimizer through the trainer: the low-bit weights follow what it writes, however it writes."""

from collections import OrderedDict
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from transformers import TrainerCallback

from testing_utils import make_trainer
from trl_qarl import QaRLConfig
from trl_qarl.quantization.swap import quantized_layers
from trl_qarl.quantization.tensors import LowBitTensor


needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
OF_BITSANDBYTES = [
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "ademamix_8bit",
    "lion_8bit",
    "rmsprop_bnb_8bit",
]
OPTIMIZERS = [
    "muon",
    "adamw_torch",
    "adamw_torch_fused",
    "adafactor",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    *(pytest.param(name, marks=needs_bitsandbytes) for name in OF_BITSANDBYTES),
]
# What writes without raising the version of the tensor.
SILENT = {"adamw_torch_fused", *OF_BITSANDBYTES}


class Compare(TrainerCallback):
    """After each update: layers whose codes moved, and those whose low-bit weight is not that of the master."""

    def __init__(self):
        self.moved, self.stale, self.codes = [], [], {}

    def on_step_end(self, args, state, control, model, **kwargs):
        layers = quantized_layers(model)
        fresh = {
            name: LowBitTensor.from_hp(layer.weight.detach(), layer.scheme, layer.scale_dtype)
            for name, layer in layers.items()
        }
        self.moved.append({name for name in layers if name in self.codes and self._differ(fresh, self.codes, name)})
        used = {name: layer.low_bit_weight() for name, layer in layers.items()}
        self.stale.append({name for name in layers if self._differ(used, fresh, name)})
        self.codes = fresh

    @staticmethod
    def _differ(left, right, name):
        return not (
            torch.equal(left[name].qdata, right[name].qdata) and torch.equal(left[name].scale, right[name].scale)
        )


# torchao's optimizers compile their step for most of a minute, which is not what is tested.
@torch.compiler.set_stance("force_eager")
def updates_with(optim, model, output_dir):
    compare = Compare()
    trainer = make_trainer(
        model, output_dir, optim=optim, max_steps=3, learning_rate=1e-2, max_completion_length=4, callbacks=[compare]
    )
    trainer.train()
    return trainer, compare


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_after_every_update_the_low_bit_weight_is_that_of_the_master(tiny_model, tmp_path, optim):
    trainer, compare = updates_with(optim, tiny_model, tmp_path)
    assert compare.stale == [set()] * 3
    layers = set(quantized_layers(trainer.model))
    assert compare.moved == [set(), layers, layers]


@pytest.mark.parametrize("optim", ["adamw_torch_fused", pytest.param("adamw_8bit", marks=needs_bitsandbytes)])
def test_without_the_count_of_steps_a_silent_write_would_be_missed(tiny_model, tmp_path, monkeypatch, optim):
    monkeypatch.setattr(torch.optim.optimizer, "_global_optimizer_post_hooks", OrderedDict())
    trainer, compare = updates_with(optim, tiny_model, tmp_path)
    assert compare.stale[-1] == set(quantized_layers(trainer.model))


@pytest.mark.parametrize(
    ("optim", "num_bits"), [("adamw_torch_8bit", 8), ("adamw_torch_4bit", 4), pytest.param("adamw_8bit", 8, marks=needs_bitsandbytes)]
)
def test_the_state_of_an_8_bit_optimizer_has_8_bits(tiny_model, tmp_path, optim, num_bits):
    trainer, _ = updates_with(optim, tiny_model, tmp_path)
