"""What is wrong with a configuration, whatever its objective."""

import re

import pytest
import torch

from testing_utils.trainings import SIGNED, config
from trl_qarl.checks.options import check_vllm, low_precision_masters
from trl_qarl.qarl_config import QaRLConfig
from trl_qarl.rollout.gpu_kernels import Gpu


def test_arguments_of_an_optimizer_are_refused_by_muon_and_kept_for_others(tmp_path):
    with pytest.raises(ValueError, match=r"optim_args='momentum=0.9'.*optim='muon'"):
        config(tmp_path, optim_args="momentum=0.9")
    assert config(tmp_path, optim="adamw_torch", optim_args="momentum=0.9").optim_args == "momentum=0.9"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mismatch_probe_steps": -1}, "mismatch_probe_steps=-1 must be 0"),
        (
            {"mismatch_probe_steps": 5, "use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2},
            "vllm_tensor_parallel_size=2 does not allow",
        ),
        (
            {"mismatch_probe_steps": 5, "use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True},
            "vllm_enable_sleep_mode=True does not allow",
        ),
    ],
)
def test_a_probe_that_cannot_run_is_refused(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": {"re:(": "w4a16"}}, "holds no regular expression"),
        ({"scheme": {"_default": "w4a61"}}, "'_default': Unknown scheme 'w4a61'.*Did you mean 'w4a16'"),
        ({"scheme": "{mlp: w4a16}"}, "is not JSON"),
        ({"scheme": {"_default": "w4a16"}, "group_size": 48}, r"group_size=48 .*\[32, 64, 128\]"),
        ({"high_precision_first": -2}, "high_precision_first=-2"),
        ({"scheme": "bf16", "high_precision_first": 1}, "quantizes nothing"),
        ({"scheme": {"_default": None}, "quantize_learner": False}, "quantize_learner=False with scheme="),
    ],
)
def test_plans_that_make_no_sense_raise_at_configuration(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_unknown_scheme_and_objective_raise(tmp_path):
    with pytest.raises(ValueError, match=r"'int4'.*'w4a16'"):
        config(tmp_path, scheme="int4")
    with pytest.raises(ValueError, match=r"'ppo'.*'tbpo'"):
        config(tmp_path, objective="ppo")


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"group_size": 48}, "group_size=48"),
        ({"precisions": [4, 3], "scheme": "w8a8"}, "precisions=.4, 3. with scheme 'w8a8': no grid of fewer bits"),
        ({"precisions": "[4, 3", "scheme": SIGNED[4]}, "is not JSON"),
        ({"precisions": {0: 4, 9: 3}, "scheme": SIGNED[4], "max_steps": 9}, "max_steps=9"),
        ({"scheme": "fp8", "group_size": 64}, "has no groups"),
        ({"quantize_learner": False, "scheme": "bf16"}, "no low-bit weight for the rollout to run.*leave out"),
        ({"scheme": "bf16", "exclude_modules": ["o_proj"]}, "quantizes nothing"),
        ({"negative_epsilon_low": -1e-4}, "negative_epsilon_low"),
        ({"negative_epsilon_low": 1.5}, "between 0 and 1"),
        ({"negative_epsilon_high": -1e-4}, "negative_epsilon_high"),
        ({"positive_epsilon_high": float("nan")}, "positive_epsilon_high=nan must be at least 0"),
        ({"mismatch_cap": 1.0}, "greater than 1"),
        ({"loss_type": "dapo"}, "loss_type='dapo' is not honoured by objective='tbpo'"),
        ({"objective": "grpo", "positive_epsilon_high": 0.1}, "belongs to objective='tbpo'"),
        ({"loss_type": "dapo", "objective": "grpo"}, "contradicts objective='grpo'"),
        ({"objective": "grpo", "mismatch_cap": 3.0}, "belongs to objective='tbpo'"),
        ({"objective": "grpo", "importance_sampling_level": "word"}, "'word'"),
        ({"model_init_kwargs": {"quantization_config": {}}}, "quantization_config"),
        ({"model_init_kwargs": {"tp_plan": "auto"}}, "tp_plan"),
        ({"num_generations": 1}, "at least 2 generations"),
        ({"optim": "lion_64bit"}, "lion_64bit"),
    ],
)
def test_bad_values_raise_with_the_reason(tmp_path, kwargs, match):
    with pytest.raises(ValueError, match=match):
        config(tmp_path, **kwargs)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "fp16=True with scheme='w4a16'.*underflows to NaN.*bf16=True"),
        ({"scheme": "bf16"}, "fp16=True with use_cpu=True.*computes in float32"),
    ],
)
def test_fp16_is_refused_where_it_is_not_what_it_says(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        config(tmp_path, fp16=True, **options)


def test_an_unknown_lora_mode_is_refused(tmp_path):
    assert config(tmp_path).lora_mode == "adapter"
    with pytest.raises(ValueError, match=r"lora_mode='merge' is unknown. Choose one of \['adapter', 'merged'\]"):
        config(tmp_path, lora_mode="merge")


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_masters_below_float32_are_refused_unless_allowed(tmp_path, dtype):
    # By the trainer, which knows whether an adapter leaves them as they are.
    options = {"model_init_kwargs": {"dtype": dtype}, "learning_rate": 3e-6}
    problem = low_precision_masters(config(tmp_path, **options), dtype)
    assert re.search(r"masters are bfloat16.*0.02 moves in steps of 1.2e-04.*=3e-06.*leave out `dtype`", problem)
    assert low_precision_masters(config(tmp_path, **options, allow_low_precision_masters=True), dtype) is None


def test_float16_masters_are_refused_for_every_quantized_scheme(tmp_path):
    options = {"model_init_kwargs": {"dtype": "float16"}, "allow_low_precision_masters": True}
    problem = low_precision_masters(config(tmp_path, scheme="w8a8", **options), "float16")
    assert re.search("float16.*NaN within a few updates of scheme='w8a8'", problem)
    assert low_precision_masters(config(tmp_path, scheme="bf16", **options), "float16") is None


@pytest.mark.parametrize("dtype", ["auto", None, "float32", torch.float64])
def test_a_dtype_that_may_be_float32_passes(tmp_path, dtype):
    assert low_precision_masters(config(tmp_path), dtype) is None


def test_problems_of_every_kind_come_in_one_message(tmp_path):
    with pytest.raises(ValueError) as error:
        config(
            tmp_path,
            scheme="int4",
            objective="ppo",
            mismatch_probe_steps=-1,
            fsdp="full_shard",
            use_vllm=True,
            top_k=5,
        )
    lines = str(error.value).splitlines()
    assert lines[0] == "5 problems:" and len(lines) == 6
    for line, text in zip(lines[1:], ["'int4'", "'ppo'", "fsdp=", "mismatch_probe_steps=-1", "top_k=5"], strict=True):
        assert text in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.9}, "top_p=0.9 .*[Uu]se 1.0"),
        ({"top_k": 50}, "top_k=50"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"top_p": 0.9, "temperature": 0.7}, "top_p=0.9"),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex masks tokens"),
        ({"vllm_mode": "remote"}, "vllm_mode='remote' is unknown"),
        ({"vllm_model_impl": "transformers"}, "Use 'vllm'"),
        ({"vllm_server_autostart": True}, "vllm_mode='colocate'"),
        ({"vllm_server_autostart": True, "vllm_mode": "server", "vllm_server_base_url": "http://a:1"}, "http://a:1"),
        ({"use_vllm": False, "vllm_server_autostart": True}, "Set `use_vllm=True`"),
        (
            {"vllm_server_autostart": True, "vllm_mode": "server", "vllm_server_host": "10.0.0.7"},
            "listens on 127.0.0.1",
        ),
        ({"vllm_token_file": "t", "use_vllm": False}, "vllm_token_file='t' is for a server that you start yourself"),
        ({"vllm_token_file": "t", "vllm_mode": "colocate"}, "vllm_mode='colocate'.*Remove it"),
        (
            {"vllm_token_file": "t", "vllm_mode": "server", "vllm_server_autostart": True},
            "vllm_server_autostart=True. Remove it",
        ),
        ({"vllm_delta_sync": True}, "vllm_mode='colocate': an engine in this process is handed the tensors"),
        ({"vllm_delta_sync": True, "use_vllm": False}, "vllm_delta_sync=True is for weights that travel to a server"),
        ({"vllm_delta_sync": True}, "vllm_mode='colocate': an engine in this process is handed the tensors"),
        ({"publish_dir": __file__}, "publish_dir='.*test_options.py' is a file"),
        ({"vllm_transport": "http"}, "vllm_transport='http' is for weights that travel to a server.*Remove it"),
        ({"vllm_transport": "ftp", "vllm_mode": "server"}, "vllm_transport='ftp' is unknown. Choose one of"),
        (
            {"vllm_mode": "server", "vllm_server_base_url": "a:8000"},
            "'a:8000' has no scheme. Write 'http://HOST:PORT'",
        ),
        (
            {"vllm_mode": "server", "vllm_server_base_url": "http://a:1", "vllm_ssl_ca_certs": __file__},
            "for a server at https://, but vllm_server_base_url='http://a:1'",
        ),
        (
            {"vllm_mode": "server", "vllm_server_base_url": "https://a:1", "vllm_ssl_ca_certs": "none.pem"},
            "vllm_ssl_ca_certs='none.pem' is not a file",
        ),
        ({"vllm_delta_sync": True, "use_vllm": False}, "vllm_delta_sync=True is for weights that travel to a server"),
        ({"generation_kwargs": {"logit_bias": {5: 9.0}}}, r"\['logit_bias'\], which change what vLLM samples"),
    ],
    ids=str,
)
@pytest.mark.parametrize("objective", ["tbpo", "dapo"])
def test_what_would_bias_or_break_rollouts_is_refused(tmp_path, objective, options, message):
    with pytest.raises(ValueError, match=message):
        QaRLConfig(str(tmp_path), **({"use_vllm": True, "objective": objective, "use_cpu": True} | options))


@pytest.mark.parametrize(
    ("options", "is_here"),
    [
        ({"vllm_mode": "colocate"}, True),
        ({"vllm_mode": "server", "vllm_server_autostart": True}, True),
        ({"vllm_mode": "server"}, False),
    ],
)
def test_a_scheme_that_vllm_must_not_run_on_this_gpu_is_refused_before_a_model_is_loaded(
    tmp_path, monkeypatch, options, is_here
):
    """A server elsewhere has another GPU, and says so itself."""
    made = config(tmp_path, scheme="fp8", use_vllm=True, **options)
    monkeypatch.setattr(made, "use_cpu", False)
    assert not [*check_vllm(made)]
    monkeypatch.setattr(Gpu, "here", lambda: Gpu((8, 0), "NVIDIA A100", "0.32.0"))
    reason = "use_vllm=True: scheme 'fp8' does not run on NVIDIA A100 (compute capability 8.0) with vLLM 0.32.0: vLLM leaves"
    assert [problem.startswith(reason) for problem in check_vllm(made)] == [True] * is_here
    monkeypatch.setattr(made, "use_cpu", True)
    assert not any("A100" in problem for problem in check_vllm(made))
