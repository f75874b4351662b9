"""Reasons why a run cannot be exact: its options, found without vLLM, and its model."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from testing_utils import MIXTURES, make_mixture
from testing_utils.layers import tiny
from testing_utils.learners import VLLM, make_adapted
from trl_qarl import QaRLConfig
from trl_qarl.bitwise import cpu as kernels
from trl_qarl.bitwise import cuda
from trl_qarl.bitwise.availability import (
    COVERED_CLASSES,
    check_engine_numerics,
    choose_numerics,
    contradicting_options,
)
from trl_qarl.models import FAMILIES


@pytest.fixture
def without_vllm(monkeypatch):
    """vLLM must not be loaded."""

    def load():
        raise AssertionError("vLLM was loaded")

    for name in ("reason_against", "reason_not_to_call"):
        monkeypatch.setattr(kernels, name, load)
    monkeypatch.setattr(kernels, "reason_against_installation", lambda: None)


def config(tmp_path, **options):
    return QaRLConfig(str(tmp_path), **({"use_cpu": True, "bf16": True, "use_vllm": True} | options))


def test_the_configuration_reports_without_vllm(tmp_path, without_vllm, monkeypatch):
    monkeypatch.setattr(kernels, "reason_against_installation", lambda: "this processor has no AVX512")
    with pytest.raises(ValueError, match="use_vllm=True"):
        config(tmp_path, numerics="engine")
    with pytest.raises(ValueError, match="numerics='exact' contradicts use_vllm=True: .* no AVX512"):
        config(tmp_path, numerics="exact")


def test_missing_kernels_are_an_error_only_if_asked_for(tmp_path, without_vllm, monkeypatch):
    configs = [config(tmp_path, numerics=numerics) for numerics in ("engine", None, "fast")]
    monkeypatch.setattr(kernels, "reason_against", lambda: "the installed vLLM is not built for CPUs")
    model = tiny()
    with pytest.raises(ValueError, match="numerics='engine' contradicts use_vllm=True: "):
        choose_numerics(configs[0], model, torch.bfloat16)
    numerics, reason = choose_numerics(configs[1], model, torch.bfloat16)
    assert numerics == "fast" and reason.startswith("engine numerics contradict use_vllm=True: ")
    assert choose_numerics(configs[2], model, torch.bfloat16) == ("fast", "as configured")


def test_a_known_reason_does_not_load_vllm(tmp_path, without_vllm):
    found = choose_numerics(config(tmp_path, use_vllm=False), tiny(), torch.bfloat16)
    assert found == ("fast", "rollouts are the learner's own")


@pytest.mark.parametrize(
    ("config", "message"), [({"lora_dropout": 0.1}, "lora_dropout=0.1"), ({"use_dora": True}, "another kind")]
)
def test_adapters_unknown_to_the_engine_are_refused(tmp_path, config, message):
    model = make_adapted(tmp_path, scheme="bf16", **config)
    with pytest.raises(ValueError, match=f"layers.0.self_attn.q_proj' has .*{message}"):
        check_engine_numerics(model)


def with_unknown_module():
    model = tiny()
    model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp)
    return model


ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
REFUSED = [
    (SimpleNamespace, "SimpleNamespace is not supported, only .*LlamaForCausalLM, "),
    (with_unknown_module, "'model.layers.1.mlp'"),
    (partial(tiny, "qwen3", hidden_act="gelu"), "hidden_act='gelu'"),
    (partial(tiny, "qwen3", layer_types=["chunked_attention"] * 2), "chunked_attention"),
    (partial(tiny, attention_dropout=0.1), "self_attn' has attention_dropout=0.1"),
    pytest.param(partial(tiny, head_dim=16), "head_dim=16", marks=VLLM),
    (partial(tiny, "granite", logits_scaling=3.0), "logits_scaling=3.0 is no power of 2"),
    (partial(tiny, "phi3", resid_pdrop=0.1), "resid_attn_dropout' has p=0.1"),
    (partial(tiny, "smollm3", rope_parameters=ROPE | {"rope_type": "dynamic"}), "rope_type='dynamic'"),
    (partial(make_mixture, "mixtral", router_jitter_noise=0.1), "router_jitter_noise=0.1 is not 0"),
    pytest.param(
        partial(make_mixture, "qwen3_moe", moe_intermediate_size=40),
        r"mlp.experts' has sizes \(128, 40\); vLLM's product .* multiples of 32",
        marks=VLLM,
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_not_covered_is_refused_by_name(make, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        check_engine_numerics(model)


def test_other_dtypes_than_bfloat16_are_refused():
    with pytest.raises(ValueError, match="not in torch.float32"):
        check_engine_numerics(tiny(), dtype=torch.float32)


@pytest.mark.parametrize("arch", ["mistral", "qwen2"])
def test_windows_are_vllms_alone(arch, torch_kernels):
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
    model = tiny(arch, sliding_window=20, **(kinds if arch == "qwen2" else {}))
    with pytest.raises(ValueError, match=r"windows of 20 tokens, which only vLLM's CPU kernels have"):
        check_engine_numerics(model)
    for no_window in (None, 0):
        model.config.sliding_window = no_window
        check_engine_numerics(model)


def test_capped_scores_are_vllms_alone(torch_kernels):
    with pytest.raises(ValueError, match=r"attn_logit_softcapping=50.0, which only vLLM's CPU kernels have"):
        check_engine_numerics(tiny("gemma2", sliding_window=None))


@pytest.mark.parametrize("name", COVERED_CLASSES)
def test_every_covered_class_passes(name):
    arch = FAMILIES[name].model_type
    options = {"sliding_window": None, "attn_logit_softcapping": None, "layer_types": ["full_attention"] * 2}
    options |= {"attention_dropout": 0.0, "residual_dropout": 0.0}
    model = make_mixture(arch) if arch in MIXTURES else tiny(arch, **options)
    assert type(model).__name__ == name
    check_engine_numerics(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bf16": False}, "bf16=False"),
        ({"quantize_learner": False}, "quantize_learner=False"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2"),
        ({"numerics": "same"}, "numerics='same'"),
        ({"numerics": "exact", "bf16": False}, "numerics='exact' contradicts bf16=False"),
    ],
    ids=str,
)
def test_what_engine_numerics_cannot_do_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **({"numerics": "engine", "use_vllm": False} | options))


@pytest.mark.parametrize("numerics", ["engine", "exact"])
def test_only_exact_numerics_are_refused_on_a_gpu(tmp_path, monkeypatch, numerics):
    args = config(tmp_path, use_vllm=False)
    monkeypatch.setattr(cuda, "reason_against_installation", lambda: None)
    args.use_cpu, args.numerics = False, numerics
    problems = [*contradicting_options(args)]
    assert len(problems) == (numerics == "exact")
    assert all("engine numerics have never run on a GPU" in problem for problem in problems)
