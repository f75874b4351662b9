"""A model's modules with engine numerics: the same bits in every batch, the gradients of the fast forward."""

import copy
import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from testing_utils import MIXTURES, make_tiny_config, relative_error
from testing_utils.learners import (
    LENGTHS,
    make_adapted,
    make_model,
    make_sequences,
    needs_vllm,
    packed_log_probs,
    padded_log_probs,
)
from trl_qarl.bitwise.attach import _true_positions, attach_engine_numerics, detach_engine_numerics
from trl_qarl.models import FAMILIES


@pytest.mark.parametrize(
    "scheme", ["bf16", "w8a8", *(pytest.param(s, marks=pytest.mark.slow) for s in ("w4a16", "fp8"))]
)
@torch.no_grad()
def test_a_sequence_gets_the_same_bits_in_every_batch(tmp_path, scheme, arithmetic):
    model = make_model(tmp_path, scheme=scheme)
    sequences = make_sequences(LENGTHS * 5)[:32]
    attach_engine_numerics(model)
    alone = [padded_log_probs(model, [row], "left")[0] for row in sequences]
    batches = {"packed": packed_log_probs(model, sequences)}
    for side in ("left", "right"):
        for size in (2, 7, 32):
            parts = [sequences[i : i + size] for i in range(0, len(sequences), size)]
            rows = [row for part in parts for row in padded_log_probs(model, part, side)]
            batches[f"{size}, padded on the {side}"] = rows
    for name, rows in batches.items():
        assert all(torch.equal(a, b) for a, b in zip(alone, rows, strict=True)), name


@torch.no_grad()
def test_attention_uses_a_cache(tmp_path, arithmetic):
    model = make_model(tmp_path)
    attach_engine_numerics(model)
    attention, cache = model.model.layers[0].self_attn, DynamicCache(config=model.config)
    # transformers 5.24 renamed the argument.
    [name] = {"past_key_values", "cache"} & inspect.signature(attention.forward).parameters.keys()
    hidden = torch.randn(1, 9, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = torch.arange(9)[None]
    whole, _ = attention(hidden, model.model.rotary_emb(hidden, positions), None)
    for part in (slice(0, 6), slice(6, 9)):
        tables = model.model.rotary_emb(hidden, positions[:, part])
        output, _ = attention(hidden[:, part], tables, None, **{name: cache})
        assert torch.equal(output, whole[:, part])
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_positions_after_cached_tokens_are_left_to_transformers(name):
    mask = torch.tensor([[0, 1, 1, 1]])
    _, given = _true_positions(None, (), {"attention_mask": mask})
    assert given["position_ids"].tolist() == [[0, 0, 1, 2]]
    _, given = _true_positions(None, (), {"attention_mask": mask, name: DynamicCache()})
    assert "position_ids" not in given


DENSE = [row.model_type for row in FAMILIES.values() if row.engine_layers and row.model_type not in MIXTURES]
# Windows and caps of scores are vLLM's alone: tests/bitwise/test_ops.py.
EVERYWHERE = {
    "attn_logit_softcapping": None,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "no_rope_layers": [1, 0],
    "partial_rotary_factor": 0.5,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}


@pytest.mark.parametrize("arch", DENSE)
def test_gradients_are_those_of_the_fast_forward_up_to_rounding(tmp_path, arch, arithmetic):
    has_kinds = hasattr(make_tiny_config(arch), "layer_types")
    kinds = {"layer_types": ["full_attention"] * 2} if has_kinds else {"sliding_window": None}
    model = make_model(tmp_path, arch, **EVERYWHERE, **kinds)
    exact = copy.deepcopy(model).double()
    sequences = make_sequences()
    weights = torch.randn(sum(LENGTHS) - len(LENGTHS), generator=torch.Generator().manual_seed(2))
    attach_engine_numerics(model)
    (torch.cat(padded_log_probs(model, sequences, "left")) * weights).sum().backward()
    positions = 0
    for row in sequences:
        if len(row) == 1:
            continue
        logits = exact(torch.tensor([row])).logits[0, :-1]
        logps = torch.log_softmax(logits, -1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        (logps * weights[positions : positions + len(row) - 1]).sum().backward()
        positions += len(row) - 1
    names = dict(model.named_parameters())
    for (name, ours), reference in zip(names.items(), exact.parameters(), strict=True):
        assert ours.grad.dtype is torch.float32
        # Forward and backward round to 8 bits at every operation; the mean of a LayerNorm cancels a part of gradients.
        limit = 0.04 if name.replace("weight", "bias") in names and "norm" in name else 0.03
        assert relative_error(ours.grad, reference.grad) < limit, name


@pytest.mark.parametrize("kind", ["default", "padded", "packed"])
@torch.no_grad()
def test_more_tokens_than_the_model_has_positions_are_refused(tmp_path, kind, arithmetic):
    model = make_model(tmp_path, max_position_embeddings=64)
    attach_engine_numerics(model)
    ids = torch.arange(4, 69)[None]
    arguments = {
        "default": {},
        "padded": {"attention_mask": torch.ones_like(ids)},
        "packed": {"position_ids": torch.arange(65)[None]},
    }[kind]
    with pytest.raises(ValueError, match=r"has 65 tokens, .* 64 positions \(max_position_embeddings\)"):
        model(ids, **arguments)
    assert model(ids[:, :64]).logits.isfinite().all()


@pytest.mark.parametrize("is_merged", [False, True])
@torch.no_grad()
def test_lora_gives_the_same_bits_in_any_batch(tmp_path, is_merged, arithmetic):
    model = make_adapted(tmp_path, is_merged=is_merged)
    sequences = make_sequences()
    before = model(torch.tensor([sequences[1]])).logits
    names = {name: vars(module).keys() for name, module in model.named_modules()}
    attach_engine_numerics(model)
    with_adapter = padded_log_probs(model, sequences, "right")
    for row, expected in zip(sequences, with_adapter, strict=True):
        [alone] = padded_log_probs(model, [row], "left")
        assert torch.equal(alone, expected)
    with model.disable_adapter():
        without = padded_log_probs(model, sequences, "right")
    assert not torch.equal(with_adapter[1], without[1])
    detach_engine_numerics(model)
    assert torch.equal(model(torch.tensor([sequences[1]])).logits, before)
    assert {name: vars(module).keys() for name, module in model.named_modules()} == names


@needs_vllm
@torch.no_grad()
def test_a_window_hides_what_is_before_it_and_has_no_cache():
    config = make_tiny_config("mistral", sliding_window=20, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.tensor(make_sequences((60, 60)))
    ids[1, 40:] = ids[0, 40:]
    fast = model(ids).logits
    attach_engine_numerics(model)
    logits = model(ids, use_cache=False).logits
    assert relative_error(logits, fast.double()) < 0.02
    is_equal = (logits[0] == logits[1]).all(dim=-1)
    assert is_equal[59:].all() and not is_equal[:59].any()
    with pytest.raises(ValueError, match="a window of 20 tokens"):
        model.generate(ids, max_new_tokens=2)
