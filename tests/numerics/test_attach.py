"""Engine numerics are put into a model, copied with it and taken out of it."""

import copy
import pickle

import pytest
import torch

from testing_utils.learners import make_adapted, make_model, make_sequences
from trl_qarl import convert_model, restore_model
from trl_qarl.numerics import attach
from trl_qarl.numerics.attach import attach_engine_numerics, detach_engine_numerics, has_engine_numerics
from trl_qarl.quantization.tensors import LowBitTensor


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@torch.no_grad()
def test_a_converted_model_computes_with_its_own_arithmetic_again(tmp_path, scheme):
    model = make_model(tmp_path, scheme=scheme)
    expected, ids = copy.deepcopy(model), torch.arange(4, 40)[None]
    names = {name: vars(module).keys() for name, module in model.named_modules()}
    attach_engine_numerics(model)
    assert not torch.equal(model(ids).logits.float(), expected(ids).logits)
    with pytest.raises(ValueError, match="attached"):
        attach_engine_numerics(model)
    for change in (convert_model, restore_model):
        with pytest.raises(ValueError, match=r"detach_engine_numerics\(model\)` first"):
            change(model)
    assert has_engine_numerics(model) and model(ids).logits.dtype is torch.bfloat16
    detach_engine_numerics(model)
    assert {name: vars(module).keys() for name, module in model.named_modules()} == names
    assert convert_model(model) == convert_model(expected)
    assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("kind", ["all weights", "adapter", "merged"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_with_engine_numerics_has_its_own(tmp_path, kind, copied):
    if kind == "all weights":
        model = make_model(tmp_path, "qwen2", "w4a16")
    else:
        model = make_adapted(tmp_path, is_merged=kind == "merged")
    ids = torch.tensor([make_sequences()[1]])
    before = model(ids).logits
    attach_engine_numerics(model)
    expected = model(ids).logits
    other = copied(model)
    assert has_engine_numerics(other) and torch.equal(other(ids).logits, expected)
    with torch.no_grad():
        for parameter in other.parameters():
            if not isinstance(parameter, LowBitTensor):
                parameter.mul_(1.5)
    assert torch.equal(model(ids).logits, expected) and not torch.equal(other(ids).logits, expected)
    detach_engine_numerics(model)
    assert torch.equal(model(ids).logits, before) and has_engine_numerics(other)
    changed = other(ids).logits
    detach_engine_numerics(other)
    assert not has_engine_numerics(other) and not torch.equal(other(ids).logits.float(), changed.float())


@pytest.mark.parametrize(("arch", "scheme"), [("qwen3", "w4a16"), ("llama", "w8a8"), ("qwen2", "bf16")])
def test_nothing_is_computed_for_padding_and_log_probs_keep_their_bits(tmp_path, monkeypatch, arch, scheme):
    model = make_model(tmp_path, arch, scheme)
    attach_engine_numerics(model)
    prompts, completions = make_sequences((3, 9, 1, 17)), make_sequences((40, 7, 12, 1))
    ids, mask, labels = (torch.zeros(4, 17 + 40, dtype=torch.long) for _ in range(3))
    labels -= 100
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = 17 - len(prompt), 17 + len(completion)
        ids[row, start:end], mask[row, start:end] = torch.tensor(prompt + completion), 1
        labels[row, 17:end] = ids[row, 17:end]
    rows = []
    model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: rows.append(args[0].numel() // args[0].shape[-1])
    )

    def run(ids, mask, labels):
        model.zero_grad()
        output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        (output.log_probs.sum() + output.entropy.mean()).backward()
        return output, {name: parameter.grad for name, parameter in model.named_parameters()}

    ours, grads = run(ids, mask, labels)
    with monkeypatch.context() as patch:
        patch.setattr(attach, "_pack", lambda *args: None)
        padded, expected = run(ids, mask, labels)
    assert rows == [mask.sum(), mask.numel()]
    assert torch.equal(ours.log_probs, padded.log_probs) and torch.equal(ours.entropy, padded.entropy)
    for name, grad in grads.items():
        # Sums over rows are rounded in another order.
        assert (grad - expected[name]).norm() <= 2**-7 * expected[name].norm(), name
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        alone = torch.tensor([prompt + completion])
        output, _ = run(alone, torch.ones_like(alone), alone)
        ended = 16 + len(completion)
        assert torch.equal(output.log_probs[0, len(prompt) - 1 :], ours.log_probs[row, 16:ended])


def test_inputs_that_no_row_can_hold_are_computed_as_they_are(tmp_path):
    scored = torch.tensor([[False, True], [False, True]])
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert attach._pack({"input_ids": ids, "attention_mask": mask}, scored)["position_ids"].tolist() == [
        [0, 1, 0, 1, 2]
    ]
    others = [
        {"attention_mask": torch.ones_like(mask)},
        {"attention_mask": None},
        {"input_ids": None},
        {"inputs_of_another_kind": torch.ones(2, 3)},
        # Of a sequence that goes on, with no token, with a hole before what is scored.
        {"position_ids": torch.tensor([[0, 5, 6], [0, 1, 2]])},
        {"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])},
        {"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])},
    ]
    for other in others:
        assert attach._pack({"input_ids": ids, "attention_mask": mask} | other, scored) is None
