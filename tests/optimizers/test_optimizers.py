"""Every kind of optimizer through the trainer: the low-bit weights follow what it writes, however it writes."""

from importlib.util import find_spec

import pytest
import torch
from transformers import TrainerCallback

from testing_utils import make_trainer
from testing_utils.trainings import bands
from trl_qarl import QaRLConfig
from trl_qarl.quantization.swap import quantized_layers
from trl_qarl.quantization.tensors import LowBitTensor


needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
# One of each kind of kernel that writes, then others of these kinds.
OF_BITSANDBYTES = ["adamw_8bit", "paged_adamw_32bit", "lion_8bit"]
OTHERS = ["paged_adamw_8bit", "ademamix_8bit", "rmsprop_bnb_8bit"]
OPTIMIZERS = [
    "muon",
    "adamw_torch",
    "adamw_torch_fused",
    "adafactor",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    *(pytest.param(name, marks=needs_bitsandbytes) for name in OF_BITSANDBYTES),
    *(pytest.param(name, marks=[needs_bitsandbytes, pytest.mark.nightly]) for name in OTHERS),
]
NUM_STATE_BITS = {
    "adamw_torch": 32,
    "adamw_torch_8bit": 8,
    "adamw_torch_4bit": 4,
    "adamw_8bit": 8,
    "paged_adamw_8bit": 8,
    "paged_adamw_32bit": 32,
    "lion_8bit": 8,
}


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
        self.moved.append({name for name in self.codes if not torch.equal(fresh[name], self.codes[name])})
        self.stale.append({name for name in layers if not torch.equal(layers[name].low_bit_weight(), fresh[name])})
        self.codes = fresh


def num_state_bits(optimizer, parameter) -> int:
    """Bits of an element of the first moment."""
    state = optimizer.state[parameter]
    moment = state["state1"] if "state1" in state else state["exp_avg"]
    # Two 4-bit codes of torchao's lie in a byte.
    codes = getattr(moment, "codes", moment)
    return 8 * codes.nbytes // parameter.numel()


# torchao's optimizers compile their step for most of a minute, which is not what is tested.
@torch.compiler.set_stance("force_eager")
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_the_low_bit_weight_follows_every_update(tiny_model, tmp_path, optim):
    compare = Compare()
    options = bands(0.9) | {"optim": optim, "max_steps": 3, "learning_rate": 1e-2, "max_completion_length": 4}
    trainer = make_trainer(tiny_model, tmp_path, scheme="w8a16", callbacks=[compare], **options)
    trainer.train()
    assert compare.stale == [set()] * 3
    layers = quantized_layers(trainer.model)
    assert compare.moved == [set(), set(layers), set(layers)]
    if optim in NUM_STATE_BITS:
        optimizer = trainer.optimizer.optimizer
        assert {num_state_bits(optimizer, layer.weight) for layer in layers.values()} == {NUM_STATE_BITS[optim]}


@pytest.mark.parametrize("optim", ["adamw", "adamw_fused", "muon"])
def test_default_weight_decay_changes_no_master(tmp_path, optim):
    config = QaRLConfig(str(tmp_path), use_cpu=True)
    masters = torch.nn.Parameter(torch.randn(64, 64) * 0.02)
    masters.grad, before = torch.zeros_like(masters), masters.detach().clone()
    optimizer = torch.optim.Muon if optim == "muon" else torch.optim.AdamW
    options = {"fused": True} if optim == "adamw_fused" else {}
    for learning_rate, changes in ((config.learning_rate, False), (10 * config.learning_rate, True)):
        optimizer([masters], lr=learning_rate, weight_decay=config.weight_decay, **options).step()
        assert torch.equal(masters, before) != changes
