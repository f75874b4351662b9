"""A batch as one row has the padded batch's values and gradients in transformers' own arithmetic."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from trl.trainer.utils import add_fused_lm_head

from reference.attention_naive import attend
from testing_utils import MIXTURES, make_tiny_mixture, make_tiny_model
from testing_utils.learners import make_batch, score
from trl_qarl.bitwise import flash, rows
from trl_qarl.forward import scoring_forward
from trl_qarl.token_row import Layout


def make_fast(tmp_path, arch, dtype=torch.float64, **overrides):
    make = make_tiny_mixture if arch in MIXTURES else make_tiny_model
    model = AutoModelForCausalLM.from_pretrained(make(tmp_path, arch, **overrides), dtype=dtype).eval()
    # Grouped products have no float64.
    model.config._experts_implementation = "eager"
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("qwen2", {}),
        ("mistral", {"sliding_window": 8}),
        ("qwen3_moe", {}),
        *(pytest.param(arch, {}, marks=pytest.mark.nightly) for arch in ("llama", "gemma2", "phi3", "mixtral")),
    ],
)
def test_a_row_has_the_values_of_the_padded_batch_in_float64(tmp_path, arch, overrides):
    model = make_fast(tmp_path, arch, **overrides)
    assert rows.reason_to_pad(model) is None
    batch, _ = make_batch((9, 1, 17), (40, 7, 12, 1, 30, 22), times=2)
    options = {"output_router_logits": True} if arch in MIXTURES else {}
    ours, grads = score(model, batch, True, **options)
    padded, expected = score(model, batch, False, **options)
    # The head computes log-probs in float32.
    torch.testing.assert_close(ours.log_probs, padded.log_probs, rtol=0, atol=2e-6)
    torch.testing.assert_close(ours.entropy, padded.entropy, rtol=0, atol=2e-6)
    if options:
        torch.testing.assert_close(ours.aux_loss, padded.aux_loss)
    for name, grad in grads.items():
        assert (grad - expected[name]).norm() <= 1e-6 * expected[name].norm(), name


def test_gradients_of_a_shared_token_are_added_in_float32():
    x = torch.ones(1, 2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    places = torch.tensor([1] * 300 + [2])
    # In bfloat16 256 + 1 is 256.
    rows._Gather.apply(x, places).sum().backward()
    assert x.grad[0, 0, :, 0].tolist() == [0, 300, 1]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-6)]
)
def test_two_calls_joined_are_attention_to_both_sets_of_keys(dtype, tolerance):
    """Values and gradients against attention of each segment to all of its keys in float64."""
    generator = torch.Generator().manual_seed(0)
    lengths, runs = (30, 5, 41, 7, 12, 20), ((slice(30, 83), slice(0, 30)), (slice(95, 115), slice(83, 95)))
    inputs = [torch.randn(115, heads, 16, generator=generator).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    output = flash.joined_attention(*inputs, lengths, runs, 0.3)
    upstream = torch.randn(output.shape, generator=generator).to(dtype)
    output.backward(upstream)
    reference = [tensor.detach().double().requires_grad_() for tensor in inputs]
    parts, start = [], 0
    for length in lengths:
        prompt = [list(range(115))[keys] for queries, keys in runs if queries.start <= start < queries.stop]
        own = list(range(start, start + length))
        query, *keys = reference
        parts.append(attend(query[own], *(each[sum(prompt, []) + own] for each in keys), 0.3))
        start += length
    expected = torch.cat(parts)
    expected.backward(upstream.double())
    for ours, exact in zip([output, *(x.grad for x in inputs)], [expected, *(x.grad for x in reference)], strict=True):
        assert (ours - exact).abs().max() <= tolerance * exact.abs().max()


def test_torch_has_the_calls_that_gpus_need():
    """Names of the first arguments, which are given by place."""
    names = "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"
    forward, backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward
    ours = names, ("grad_out", *names[:3], "out", "logsumexp", *names[3:], "rng_state", "unused")
    for call, expected in zip((forward, backward), ours, strict=True):
        arguments = [argument.name for argument in call.default._schema.arguments]
        assert arguments[: len(expected)] == [*expected] and "scale" in arguments


def make_layout():
    ids = torch.tensor([[1, 2, 3, 11, 12, 0], [1, 2, 3, 21, 22, 23], [0, 4, 5, 31, 0, 0]])
    return Layout.of(ids, ids > 0, ids.masked_fill((ids == 0) | (torch.arange(6) < 3), -100))


def test_flash_attention_gets_lengths_and_keys():
    layout, given = make_layout(), {}

    def flash(module, query, key, value, attention_mask, **kwargs):
        given.update(kwargs, key=key, mask=attention_mask)
        return query.transpose(1, 2), None

    query, key = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)
    function = rows._with_layouts("flash_attention_2", flash)
    function(None, query, key, key, torch.ones(1, 9), scaling=0.5, sliding_window=8, layout=layout)
    assert torch.equal(given["key"], key[:, :, layout.segments.keys]) and given["mask"] is None
    assert given["cu_seq_lens_q"].tolist() == [0, 2, 4, 7, 9] and given["max_length_q"] == 3
    assert given["cu_seq_lens_k"].tolist() == [0, 2, 6, 11, 13] and given["max_length_k"] == 5
    assert given["cu_seq_lens_q"].dtype is torch.int32 and (given["scaling"], given["sliding_window"]) == (0.5, 8)


@pytest.mark.parametrize("window", [None, 2])
def test_one_call_with_lengths_is_one_call_for_each_segment(monkeypatch, window):
    """With a stand-in for torch's kernel, which runs on GPUs alone."""
    layout = make_layout()
    query, key, value = (torch.randn(1, heads, n, 8) for heads, n in ((4, 9), (2, 13), (2, 13)))

    def kernel(query, key, value, starts_q, starts_k, longest_q, longest_k, scale, window_size, enable_gqa):
        assert (longest_q, longest_k, enable_gqa, window_size[1]) == (3, 5, True, 0)
        bounds = zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True)
        # Without a window its size is -1, and with one a query sees as many keys before its own.
        return torch.cat(
            [attend(query[a:b], key[c:d], value[c:d], scale, window_size[0] + 1) for a, b, c, d in bounds]
        )

    monkeypatch.setattr(rows, "varlen_attn", kernel)
    arguments = query, key, value, layout.segments.query_lengths, layout.segments.key_lengths, 0.3, window
    torch.testing.assert_close(rows._by_lengths(*arguments), rows._by_segments(*arguments))


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("qwen3_next", {}, "recurrent"),
        ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "not plain attention"),
        ("falcon_h1", {}, "recurrent"),
        ("gpt_oss", {}, "sinks"),
        ("qwen3_vl", {}, "pictures"),
        ("llama", {"attn_implementation": "eager"}, r"\(eager\) takes no lengths"),
    ],
)
def test_models_that_take_no_row_are_named(model_type, options, reason):
    attention = options.pop("attn_implementation", None)
    factory = AutoModelForImageTextToText if model_type == "qwen3_vl" else AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(AutoConfig.for_model(model_type, **options), attn_implementation=attention)
    assert re.search(reason, rows.reason_to_pad(model))


def test_attention_is_judged_on_the_device_that_will_compute(monkeypatch):
    monkeypatch.setattr(rows, "_reason_against_lengths", lambda: "its kernel differs")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama"))
    assert rows.reason_to_pad(model) is None
    assert rows.reason_to_pad(model, torch.device("cuda")) == "its kernel differs"


def test_a_layer_that_ignores_the_layout_is_an_error(tmp_path):
    model = make_fast(tmp_path, "llama", torch.float32)
    batch, _ = make_batch((9,), (4, 7), times=2)
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, layout=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(RuntimeError, match="1 of 2 layers of LlamaForCausalLM .* attn_implementation='eager'"):
        scoring_forward(model, model, True)(**batch, fused_lm_head=True)


def test_a_model_that_ignores_layouts_is_padded(tmp_path):
    model = make_fast(tmp_path, "llama", torch.float32)
    batch, _ = make_batch((9,), (4, 7), times=2)
    expected = scoring_forward(model, model)(**batch, fused_lm_head=True).log_probs
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, layout=None, **kwargs: forward(*args, **kwargs)
    calls = []
    output = scoring_forward(model, model, True, on_ignored=lambda: calls.append(1))(**batch, fused_lm_head=True)
    assert torch.equal(output.log_probs, expected) and calls == [1]
