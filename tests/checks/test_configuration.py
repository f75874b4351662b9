"""Configurations that are refused with any objective."""

import dataclasses
import re

import pytest
from trl import GRPOConfig

from testing_utils.trainings import SIGNED, config
from trl_qarl import QaRLConfig
from trl_qarl.checks.configuration import check_gpu, low_precision_masters
from trl_qarl.engines.gpu_kernels import Gpu


TURNS = {"precisions": [4, 3], "scheme": SIGNED[4], "gradient_accumulation_steps": 2}
REFUSED = [
    ({"scheme": "int4"}, "'int4'"),
    ({"scheme": {"_default": "w4a61"}}, "Did you mean 'w4a16'"),
    ({"scheme": "{mlp: w4a16}"}, "JSON"),
    ({"scheme": {"_default": {"scheme": None}}}, "'_default': {'scheme': None} is neither a scheme's name"),
    ({"scheme": {"_default": None}, "quantize_learner": False}, "quantize_learner=False"),
    ({"scheme": "fp8", "group_size": 64}, "group_size"),
    ({"group_size": 48}, "group_size=48"),
    ({"precisions": [4, 3], "scheme": "w8a8"}, "precisions=.4, 3."),
    ({"precisions": "[4, 3", "scheme": SIGNED[4]}, "precisions"),
    ({"precisions": {0: 4, 9: 3}, "scheme": SIGNED[4], "max_steps": 9}, "max_steps=9"),
    ({"loss_type": "grpo", "importance_sampling_level": "word"}, "'word'"),
    ({"scale_rewards": "grop"}, "scale_rewards='grop' is unknown. Choose one of .'group'"),
    ({"log_level": "loud"}, "log_level='loud' is unknown. Choose one of .*'warning'"),
    ({"multi_objective_aggregation": "sum"}, "multi_objective_aggregation='sum'"),
    # Which switches `torch_compile` on.
    ({"torch_compile_backend": "inductor"}, "torch_compile=True"),
    ({"optim": "lion_64bit"}, "lion_64bit"),
    ({"generation_kwargs": {"disable_compile": False}}, "'disable_compile', for which TRL gives `True`"),
    ({"generation_kwargs": {"eos_token_id": "</s>"}}, "eos_token_id='</s>', and a token is its number"),
    ({"generation_kwargs": {"cache_implementation": "static"}, "bf16": True}, "cache is made in the masters' dtype"),
    ({"generation_kwargs": {"cache_implementation": "quantized"}, "bf16": True, "numerics": "exact"}, "default cache"),
    ({"generation_kwargs": {"max_new_tokens": 0}}, "transformers.GenerationConfig does not take them"),
    ({"gradient_checkpointing_kwargs": {"reentrant": False}}, "'reentrant'.*torch's `checkpoint` does not take"),
    ({"lora_mode": "merge"}, "lora_mode='merge'"),
    ({"hub_model_id": "a/b/c", "push_to_hub": True}, "hub_model_id='a/b/c'"),
    # Values that resemble a right one.
    ({"rollout_ahead": True}, "rollout_ahead"),
    ({"exclude_modules": [1, "lm_head"]}, "exclude_modules"),
    (TURNS | {"steps_per_generation": 1}, "steps_per_generation=1.*multiple of gradient_accumulation_steps=2"),
]
REFUSED_WITH_VLLM = [
    ({"vllm_mode": "remote"}, "'remote'"),
    ({"generation_kwargs": {"logit_bias": {5: 9.0}}}, "logit_bias"),
    ({"generation_kwargs": {"thinking_token_budget": 5}}, "change vLLM's samples"),
    pytest.param(
        {"generation_kwargs": {"stop_token_ids": 5}}, "vllm.SamplingParams does not take them", marks=pytest.mark.vllm
    ),
]


@pytest.mark.parametrize(("options", "names"), REFUSED, ids=str)
def test_a_value_that_cannot_be_is_refused_by_name(tmp_path, options, names):
    with pytest.raises(ValueError, match=names):
        config(tmp_path, **options)


@pytest.mark.parametrize(("options", "names"), REFUSED_WITH_VLLM, ids=str)
def test_what_would_bias_or_break_rollouts_is_refused(tmp_path, options, names):
    with pytest.raises(ValueError, match=names):
        config(tmp_path, use_vllm=True, **options)


def test_masters_in_16_bits_and_integers_are_refused(tmp_path):
    args = config(tmp_path, scheme="w8a8")
    (problem,) = low_precision_masters(args, "float16")
    assert re.search("float16.*NaN within a few updates of scheme='w8a8'", problem)
    for name in ("int8", "int64"):
        (problem,) = low_precision_masters(args, name)
        assert re.search(f"masters are {name}.*remove `dtype`", problem)
    args = config(tmp_path, scheme="bf16")
    (problem,) = low_precision_masters(args, "float16")
    assert "round to nothing. Load the model in float32" in problem and "NaN" not in problem
    (problem,) = low_precision_masters(config(tmp_path, learning_rate=1e-3), "bfloat16")
    assert re.search(r"are bfloat16.*0.02 moves in steps of 1.2e-04.*=0.001 .*remove `dtype`", problem)
    assert [*low_precision_masters(args, "float32"), *low_precision_masters(args, "auto")] == []


@pytest.mark.parametrize(
    ("mode", "autostart", "is_here"), [("colocate", False, True), ("server", True, True), ("server", False, False)]
)
def test_a_scheme_unfit_for_the_gpu_is_refused_early(tmp_path, monkeypatch, mode, autostart, is_here):
    """A server elsewhere has another GPU, and says so itself."""
    made = config(tmp_path, scheme="fp8", use_vllm=True, vllm_mode=mode, vllm_server_autostart=autostart)
    monkeypatch.setattr(made, "use_cpu", False)
    assert not [*check_gpu(made)]
    monkeypatch.setattr(Gpu, "here", lambda: Gpu((8, 0), "NVIDIA A100", "0.32.0"))
    reason = "use_vllm=True: scheme 'fp8' does not run on NVIDIA A100 (compute capability 8.0) with vLLM 0.32.0: vLLM leaves"
    assert [problem.startswith(reason) for problem in check_gpu(made)] == [True] * is_here
    monkeypatch.setattr(made, "use_cpu", True)
    assert not any("A100" in problem for problem in check_gpu(made))


OWN = sorted({f.name for f in dataclasses.fields(QaRLConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)})


@pytest.mark.parametrize("value", [object(), float("nan")], ids=["object", "nan"])
@pytest.mark.parametrize("name", OWN)
def test_a_value_of_the_wrong_type_names_its_option(tmp_path, name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        config(tmp_path, **{name: value})


def test_right_options_of_dictionaries_are_taken(tmp_path):
    given = {"do_sample": True, "disable_compile": True, "max_new_tokens": 5}
    assert config(tmp_path, generation_kwargs=given).generation_kwargs == {"max_new_tokens": 5}
    given = {"use_reentrant": False, "preserve_rng_state": False}
    assert config(tmp_path, gradient_checkpointing_kwargs=given).gradient_checkpointing_kwargs == given
    assert config(tmp_path, cache_implementation="static", bf16=False).cache_implementation == "static"
    assert config(tmp_path, optim="adamw_torch", optim_args="momentum=0.9").optim_args == "momentum=0.9"
