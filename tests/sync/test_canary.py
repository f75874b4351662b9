"""
Detection of wrong engine weights by the log-probs of a fixed text: with a learner's log-probs in place of an engine's,
and in engines.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_mixture, make_tiny_model, make_tiny_tokenizer
from testing_utils.engines import engine_model, publish_to_engine, update_masters
from trl_qarl import prepare_model
from trl_qarl.sync import canary as canary_module
from trl_qarl.sync.canary import Canary, _Text
from trl_qarl.wire.protocol import PublishError


class Engine:
    """A transport that says what it is told to."""

    num_cleared = 0

    def __init__(self, *replicas):
        self.replicas = replicas

    def score(self, token_ids, pictures=()):
        return [value for replica in self.replicas for value in replica.tolist()]

    def clear_cache(self):
        self.num_cleared += 1


def make_canary(model=None):
    canary = Canary(model or torch.nn.Linear(1, 1), torch.float32, None)
    canary.texts.append(_Text("publish/canary", [0] * 5, 4))
    return canary


def compare(difference, rounding):
    """Result of the canary for an engine at this distance, in nats."""
    engine = Engine(torch.zeros(4), torch.full((4,), difference))
    return make_canary().compare([(torch.zeros(4), rounding)], engine)


@pytest.mark.parametrize(
    ("rounding", "limit"),
    [(0.01, 0.01 * canary_module.LIMIT), (1e-7, canary_module.SMALLEST), (9.0, canary_module.LARGEST)],
)
def test_the_limit_follows_from_rounding_within_bounds(rounding, limit):
    assert compare(0.99 * limit, rounding)["publish/canary_abs_logp"] == pytest.approx(0.99 * limit)
    with pytest.raises(PublishError, match=rf"replica 1's log-probs .*Rounding explains {limit:.3g}"):
        compare(1.01 * limit, rounding)


def test_rounding_is_measured_if_it_decides(monkeypatch):
    monkeypatch.setattr(Canary, "_rounding", lambda canary, text, log_probs: 0.01)
    assert compare(0.99 * canary_module.SMALLEST, None).keys() == {"publish/canary_abs_logp"}
    assert compare(0.02, None)["publish/canary_rounding"] == 0.01
    with pytest.raises(PublishError, match="Rounding explains 0.03, 3 times what it changes"):
        compare(0.031, None)


def test_what_is_no_number_is_refused_and_goes_from_the_cache():
    engine = Engine(torch.full((4,), float("nan")))
    with pytest.raises(PublishError, match="the engine's log-probs of 4 fixed tokens are nan"):
        make_canary().compare([(torch.zeros(4), 0.1)], engine)
    assert engine.num_cleared == 1


def test_a_models_own_code_is_named_as_a_cause(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, "qwen2"))
    model._auto_class = "AutoModelForCausalLM"
    with pytest.raises(PublishError, match="own code .trust_remote_code."):
        make_canary(model).compare([(torch.zeros(4), 0.1)], Engine(torch.full((4,), 9.0)))


def test_without_a_tokenizer_nothing_is_compared():
    canary = Canary(None, torch.float32, None)
    assert canary.score() == [] and canary.compare([], None) == {}


@pytest.mark.parametrize(("scheme", "smallest"), [("w8a16", 0.0), ("w8a8", 0.01)])
def test_rounding_in_float32_is_that_of_activation_codes(tmp_path, scheme, smallest):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, "qwen2"), dtype=torch.float32).eval()
    widen(model)
    prepare_model(model, scheme, scale_dtype=torch.float32)
    canary = Canary(model, torch.float32, make_tiny_tokenizer())
    [[log_probs, _]] = canary.score()
    assert smallest <= canary._rounding(canary.texts[0], log_probs) < 10 * max(smallest, 1e-5)


def widen(model, size=2.0):
    """Weights of the size that training gives: outputs that depend on all inputs, and biases that count."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(noise * size)
            elif parameter.ndim > 1:
                gain = 2.0 if name.endswith(("gate.weight", "lm_head.weight")) else 1.0
                parameter.copy_(noise * gain / parameter.shape[-1] ** 0.5)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "scheme", "dtype"),
    [
        ("qwen2", "w4a16", torch.bfloat16),
        pytest.param("qwen2", "w4a16", torch.float32, marks=pytest.mark.nightly),
        pytest.param("qwen2_moe", "w4a16", torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param("qwen2_moe", "w4a16", torch.float32, marks=pytest.mark.nightly),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_a_stale_bias_is_seen_and_rounding_is_not(quick_engines, tmp_path, arch, scheme, dtype):
    """As a CUDA graph reads it that has captured another address: no tensor that vLLM knows of is wrong."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_bias

    path = (make_tiny_mixture if arch.endswith("moe") else make_tiny_model)(tmp_path, arch)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    widen(model)
    prepare_model(model, scheme, scale_dtype=dtype)
    publisher = publish_to_engine(model, path, dtype)
    ratios = []
    for number in range(10):
        difference = publisher.publish(str(number))["publish/canary_abs_logp"]
        [[log_probs, _]] = publisher.canary.score()
        ratios.append(difference / publisher.canary._rounding(publisher.canary.texts[0], log_probs))
        update_masters(publisher.model, number, 0.005)
    assert max(ratios) < canary_module.LIMIT
    publisher.publish("right")
    learner, transport = publisher.canary.score(), publisher.engine
    layers = engine_model(publisher).model.layers
    unlike = torch.Generator().manual_seed(1)
    for layer in layers:
        bias = layer.self_attn.qkv_proj.bias.data
        right = bias.clone()
        size = layer.self_attn.q_size, layer.self_attn.kv_size, layer.self_attn.kv_size
        for part in range(3):
            wrong = [marlin_permute_bias(piece.clone()) for piece in right.split(size)]
            stale = [2.0 * torch.randn(piece.shape, generator=unlike).to(piece) for piece in right.split(size)]
            for pieces in (wrong, stale):
                bias.copy_(
                    torch.cat([pieces[part] if i == part else piece for i, piece in enumerate(right.split(size))])
                )
                transport.llm.reset_prefix_cache()
                with pytest.raises(PublishError, match="a kernel works with a copy of other weights"):
                    publisher.canary.compare(learner, transport)
        bias.copy_(right)
        transport.llm.reset_prefix_cache()
        publisher.canary.compare(learner, transport)
