"""Engine numerics are put into a model, copied with it and taken out of it."""

import copy
import pickle

import pytest
import torch

from testing_utils.learners import VLLM, make_adapted, make_batch, make_model, make_sequences, score
from trl_qarl import convert_model, restore_model
from trl_qarl.bitwise.attach import attach_engine_numerics, detach_engine_numerics, has_engine_numerics
from trl_qarl.quantization.tensors import LowBitTensor


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@torch.no_grad()
def test_a_converted_model_returns_to_its_arithmetic(tmp_path, scheme):
    model = make_model(tmp_path, scheme=scheme)
    expected, ids = copy.deepcopy(model), torch.arange(4, 40)[None]
    names = {name: vars(module).keys() for name, module in model.named_modules()}
    attach_engine_numerics(model)
    assert not torch.equal(model(ids).logits.float(), expected(ids).logits)
    with pytest.raises(ValueError, match="attached"):
        attach_engine_numerics(model)
    with pytest.raises(ValueError, match=r"detach_engine_numerics\(model\)` first"):
        convert_model(model)
    assert has_engine_numerics(model) and model(ids).logits.dtype is torch.bfloat16
    detach_engine_numerics(model)
    assert {name: vars(module).keys() for name, module in model.named_modules()} == names
    assert convert_model(model) == convert_model(expected)
    assert torch.equal(model(ids).logits, expected(ids).logits)


@torch.no_grad()
def test_a_restored_model_has_no_engine_numerics(tmp_path):
    model, ids = make_model(tmp_path, scheme="w4a16"), torch.arange(4, 40)[None]
    expected = copy.deepcopy(model)
    attach_engine_numerics(model)
    assert restore_model(model) == restore_model(expected) and not has_engine_numerics(model)
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


def adapted(tmp_path, *_):
    return make_adapted(tmp_path)


def windowed(tmp_path, arch, scheme):
    return make_model(tmp_path, arch, scheme, sliding_window=8)


@pytest.mark.parametrize(
    ("arch", "scheme", "make"),
    [
        ("qwen3", "w4a16", make_model),
        ("qwen2", "w4a16", adapted),
        pytest.param("mistral", "w8a8", windowed, marks=VLLM),
        ("qwen3_moe", "bf16", make_model),
        pytest.param("llama", "w8a8", make_model, marks=pytest.mark.nightly),
        pytest.param("mixtral", "w4a16", make_model, marks=pytest.mark.nightly),
    ],
)
def test_one_row_of_prompts_and_completions_keeps_all_bits(tmp_path, arch, scheme, make):
    model = make(tmp_path, arch, scheme)
    attach_engine_numerics(model)
    batch, rows = make_batch((9, 1, 17), (40, 7, 12, 1, 30, 22), times=2)
    options = {"output_router_logits": True} if "moe" in arch or arch == "mixtral" else {}
    num_tokens = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: num_tokens.append(args[0].numel()))
    ours, grads = score(model, batch, True, **options)
    padded, expected = score(model, batch, False, **options)
    # Of a prompt's completions each has its last token, and of a mixture also the completions' own.
    in_row = sum(length - 1 for length in (9, 1, 17)) + sum(len(completion) for _, completion in rows)
    assert num_tokens == [in_row + (len(rows) if options else 0), batch["input_ids"].numel()]
    assert torch.equal(ours.log_probs, padded.log_probs) and torch.equal(ours.entropy, padded.entropy)
    if options:
        torch.testing.assert_close(ours.aux_loss, padded.aux_loss, rtol=1e-6, atol=0)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        # Sums over rows are rounded in another order.
        assert (grad - expected[name]).norm() <= 2**-7 * expected[name].norm(), name


def test_gradient_checkpointing_of_a_row_changes_no_bit(tmp_path):
    model = make_model(tmp_path)
    attach_engine_numerics(model)
    batch, _ = make_batch((9,), (40, 7, 12), times=3)
    plain, expected = score(model, batch, True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    ours, grads = score(model, batch, True)
    assert torch.equal(ours.log_probs, plain.log_probs)
    assert all(torch.equal(grads[name], grad) for name, grad in expected.items())
