"""Weights of an earlier update compute and are published as they were, and leave no trace."""

from contextlib import nullcontext

import pytest
import torch

from testing_utils.layers import tiny
from trl_qarl.adapters.merged import merge_adapters
from trl_qarl.adapters.tensors import iter_adapter_tensors
from trl_qarl.checkpoint.layout import iter_checkpoint_tensors
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.storage import writes_to
from trl_qarl.quantization.swap import freeze_model, prepare_model
from trl_qarl.quantization.versions import KeptVersion, at_version, kept_version


IDS = torch.arange(5, 21).view(2, 8)


def make(kind):
    model = tiny("qwen2")
    scheme, _, adapter = kind.partition(" ")
    if adapter:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    prepare_model(model, scheme)
    if adapter == "merged":
        merge_adapters(model)
    elif adapter == "beside":
        freeze_model(model)
    return model


def outputs(model):
    """Logits, and what an engine is sent."""
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    sent = [*iter_checkpoint_tensors(model, torch.bfloat16), *iter_adapter_tensors(model, torch.bfloat16)]
    return {"logits": logits, **{name: tensor.clone() for name, tensor in sent}}


def update(model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def kept_by(weight):
    return [low_bit for low_bit, _ in weight._kept.values()]


def are_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    return {name for name in ours if torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8))}


@pytest.mark.parametrize("kind", ["w4a16", "w8a8", "nvfp4a16", "bf16", "w4a16 beside", "w4a16 merged"])
def test_an_earlier_version_leaves_no_trace(kind):
    model = make(kind)
    # B begins at 0.
    update(model)
    before, kept = outputs(model), kept_version(model)
    restored = KeptVersion.of_state(kept.state(), model)
    for _ in range(2):
        update(model)
    after, weights = outputs(model), dict(Inventory.of(model).weights())
    flips = {name: weight.num_flipped_codes for name, weight in weights.items()}
    held = {name: kept_by(weight) for name, weight in weights.items()}
    assert "logits" not in are_equal(before, after)
    assert any(flips.values()) == (kind not in ("bf16", "w4a16 beside"))
    written = [writes_to(parameter) for parameter in model.parameters()]
    for version, ending in ((kept, nullcontext()), (restored, pytest.raises(ZeroDivisionError))):
        with ending, at_version(model, version):
            assert are_equal(outputs(model), before) == before.keys()
            if version is restored:
                raise ZeroDivisionError
        assert {name: weight.num_flipped_codes for name, weight in weights.items()} == flips
        assert all(
            ours is theirs for name in held for ours, theirs in zip(held[name], kept_by(weights[name]), strict=True)
        )
        assert [writes_to(parameter) for parameter in model.parameters()] == written
        assert are_equal(outputs(model), after) == after.keys()


def test_only_codes_and_scales_are_kept():
    model = make("w4a16")
    kept, weights = kept_version(model), dict(Inventory.of(model).weights())
    assert kept.low_bit.keys() == weights.keys()
    for name, low_bit in kept.low_bit.items():
        ours = weights[name].low_bit_weight()
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(low_bit.parts(), ours.parts(), strict=True))
    assert kept.others.keys() == dict(model.named_parameters()).keys() - {f"{name}.weight" for name in weights}
