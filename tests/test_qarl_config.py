import ast
import dataclasses
import inspect
import json
import logging
import re

import pytest
import torch
from accelerate import ParallelismConfig
from trl import GRPOConfig

from trl_qarl.checks.options import low_precision_masters
from trl_qarl.checks.refused import MODEL_INIT_KWARGS_REFUSED, REFUSED
from trl_qarl.objectives.presets import Preset
from trl_qarl.objectives.registry import OBJECTIVES, all_objectives
from trl_qarl.objectives.tbpo import REFUSED_BY_TBPO
from trl_qarl.qarl_config import QaRLConfig
from trl_qarl.quantization.plan import get_plan


PRESETS = {name: objective for name, objective in all_objectives().items() if isinstance(objective, Preset)}


def config(tmp_path, **kwargs):
    return QaRLConfig(str(tmp_path), use_cpu=True, **kwargs)


def test_defaults_are_those_of_the_papers_table_2(tmp_path):
    c = config(tmp_path)
    assert (c.learning_rate, c.weight_decay, c.beta, c.temperature, c.top_p) == (1e-6, 0.01, 0.0, 1.0, 1.0)
    assert (c.positive_epsilon_high, c.negative_epsilon_low, c.negative_epsilon_high) == (4e-4, 3e-4, 7e-4)
    assert (c.mismatch_cap, c.epsilon_high) == (2.0, None)
    assert (c.num_generations, c.num_iterations, c.optim, c.objective, c.scheme) == (8, 1, "muon", "tbpo", "w4a16")
    assert c.steps_per_generation == 8 * c.gradient_accumulation_steps
    assert config(tmp_path, gradient_accumulation_steps=3).steps_per_generation == 24


def test_no_other_default_of_trl_changes(tmp_path):
    ours = {f.name: f.default for f in dataclasses.fields(QaRLConfig)}
    changed = {f.name for f in dataclasses.fields(GRPOConfig) if ours[f.name] != f.default}
    unset = {"epsilon", "importance_sampling_level", "loss_type"}
    unset |= {"vllm_importance_sampling_correction", "vllm_importance_sampling_mode"}
    assert changed == {"optim", "weight_decay"} | unset
    # `unset` is filled with TRL's values for TRL's losses.
    c, stock = config(tmp_path, objective="dapo"), GRPOConfig(str(tmp_path), use_cpu=True)
    for name in (*unset, "epsilon_high"):
        assert getattr(c, name) == getattr(stock, name)


def test_help_of_every_own_option_is_its_text_in_the_docstring():
    def plain(text):
        return " ".join(re.sub(r"[`\[\]~]", "", text).split())

    own = [f for f in dataclasses.fields(QaRLConfig) if f.name in QaRLConfig.__annotations__]
    entries = re.split(r"\n {4}(?=\w)", inspect.cleandoc(QaRLConfig.__doc__))[1:]
    documented = {name: entry for entry in entries for name in entry.partition(" (")[0].split(", ")}
    assert {f.name for f in own} | {"epsilon_high"} == documented.keys()
    for option in own:
        head, text = documented[option.name].split(":\n", 1)
        assert len(option.metadata["help"]) > 20 and plain(option.metadata["help"]) == plain(text), option.name
        default = re.search(r"defaults to `(.*)`\)", head)
        assert (ast.literal_eval(default[1]) if default else None) == option.default, option.name


def test_an_explicit_generation_batch_size_is_kept(tmp_path):
    c = config(tmp_path, generation_batch_size=32)
    assert (c.generation_batch_size, c.steps_per_generation) == (32, 4)


REFUSED_VALUES = {
    "use_transformers_continuous_batching": True,
    "use_transformers_paged": True,
    "torch_compile": True,
    "use_liger_kernel": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "fsdp": "full_shard",
    "deepspeed": "ds.json",
    "parallelism_config": ParallelismConfig(),
    "neftune_noise_alpha": 5.0,
    "label_smoothing_factor": 0.1,
    "enable_jit_checkpoint": True,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "delta": 1.5,
    "importance_sampling_level": "token",
    "sapo_temperature_neg": 2.0,
    "sapo_temperature_pos": 2.0,
    "vespo_k_pos": 9.0,
    "vespo_lambda_pos": 9.0,
    "vespo_k_neg": 9.0,
    "vespo_lambda_neg": 9.0,
    "off_policy_mask_threshold": 0.5,
    "top_entropy_quantile": 0.2,
    "entropy_coef": 0.01,
    "use_adaptive_entropy": True,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": 5.0,
    "vllm_importance_sampling_clip_min": 0.1,
    "vllm_importance_sampling_cap": 5.0,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
}


def test_there_is_a_value_to_try_for_every_refused_option():
    assert REFUSED_VALUES.keys() == REFUSED.keys() | REFUSED_BY_TBPO.keys()


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_an_inherited_option_that_is_not_honoured_raises_and_names_value_and_fix(tmp_path, name):
    why = (REFUSED | REFUSED_BY_TBPO)[name]
    with pytest.raises(ValueError) as error:
        config(tmp_path, **{name: REFUSED_VALUES[name]})
    assert f"{name}={REFUSED_VALUES[name]!r}" in str(error.value) and why in str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_options_refused_for_every_objective(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        config(tmp_path, objective="grpo", **{name: REFUSED_VALUES[name]})


@pytest.mark.parametrize("name", [n for n in REFUSED_BY_TBPO if not n.startswith("vllm")])
def test_options_of_trls_losses_are_honoured_with_trls_losses(tmp_path, name):
    assert getattr(config(tmp_path, objective="grpo", **{name: REFUSED_VALUES[name]}), name) == REFUSED_VALUES[name]


@pytest.mark.parametrize("objective", ["tbpo", "grpo"])
@pytest.mark.parametrize("kwargs", [{"top_k": 5}, {"temperature": 0.5}, {"do_sample": False}, '{"num_beams": 4}'])
def test_generation_kwargs_that_change_the_distribution_raise(tmp_path, kwargs, objective):
    with pytest.raises(ValueError, match="generation_kwargs contains"):
        config(tmp_path, generation_kwargs=kwargs, objective=objective)


MODEL_INIT_VALUES = {
    "quantization_config": {"load_in_4bit": True},
    "use_kernels": True,
    "tp_plan": "auto",
    "tp_size": 2,
    "distributed_config": {"tp_size": 2},
}


@pytest.mark.parametrize("objective", ["tbpo", "grpo"])
@pytest.mark.parametrize("name", MODEL_INIT_KWARGS_REFUSED)
def test_loading_a_model_in_a_way_that_is_not_honoured_raises(tmp_path, name, objective):
    with pytest.raises(ValueError) as error:
        config(tmp_path, objective=objective, model_init_kwargs={name: MODEL_INIT_VALUES[name], "dtype": "float32"})
    assert f"model_init_kwargs[{name!r}] is not supported" in str(error.value)
    assert MODEL_INIT_KWARGS_REFUSED[name] in str(error.value)
    neutral = {name: False if MODEL_INIT_VALUES[name] is True else None}
    assert config(tmp_path, objective=objective, model_init_kwargs=neutral).model_init_kwargs == neutral


def test_arguments_of_an_optimizer_are_refused_by_muon_and_kept_for_others(tmp_path):
    with pytest.raises(ValueError, match=r"optim_args='momentum=0.9'.*optim='muon'"):
        config(tmp_path, optim_args="momentum=0.9")
    assert config(tmp_path, optim="adamw_torch", optim_args="momentum=0.9").optim_args == "momentum=0.9"


def test_other_generation_kwargs_pass(tmp_path):
    assert config(tmp_path, generation_kwargs={"stop_strings": ["\n"]}).generation_kwargs


def test_torch_compile_switched_on_by_its_backend_is_refused_too(tmp_path):
    with pytest.raises(ValueError, match="torch_compile=True"):
        config(tmp_path, torch_compile_backend="inductor")


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


def test_scheme_may_be_a_mapping_also_as_json(tmp_path):
    mapping = {"re:.*mlp.*": "w4a16", "_default": "w8a8"}
    for scheme in (mapping, json.dumps(mapping)):
        args = config(tmp_path, scheme=scheme, group_size=64, high_precision_last=1)
        assert args.scheme == mapping and args.is_quantized and args.plan.name == "w4a16-w8a8"
        assert args.plan == get_plan(mapping, 64, high_precision_last=1)
    assert not config(tmp_path, scheme={"_default": None}).is_quantized
    assert config(tmp_path, numerics="engine", bf16=True, scheme=mapping, group_size=32).numerics == "engine"


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
        (
            {"scheme": {"re:.*mlp.*": "w8a16", "_default": "w8a8"}, "numerics": "engine", "bf16": True},
            "has not been compared",
        ),
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


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_sets_the_loss_type(tmp_path, objective):
    assert config(tmp_path, objective=objective).loss_type == ("grpo" if objective in PRESETS else objective)


def test_objectives_are_exactly_tbpo_the_presets_and_trls_losses():
    help_text = {f.name: f.metadata for f in dataclasses.fields(GRPOConfig)}["loss_type"]["help"]
    assert all(f"'{name}'" in help_text or name in help_text for name in OBJECTIVES if name not in ("tbpo", *PRESETS))


@pytest.mark.parametrize("objective", PRESETS)
def test_preset_sets_its_options_and_takes_them_when_given(tmp_path, objective):
    preset = PRESETS[objective]
    chosen = {**preset.options, **preset.defaults}
    c = config(tmp_path, objective=objective)
    assert {name: getattr(c, name) for name in chosen} == chosen
    again = config(tmp_path, objective=objective, **chosen, loss_type=c.loss_type)
    assert again.to_dict() | {"output_dir": ""} == c.to_dict() | {"output_dir": ""}


OTHER_VALUES = {
    "importance_sampling_level": {"token": "sequence", "sequence": "token"},
    "vllm_importance_sampling_correction": {True: False, False: True},
    "vllm_importance_sampling_mode": {"token_truncate": "sequence_mask", "sequence_mask": "token_truncate"},
}


@pytest.mark.parametrize(
    ("objective", "name"), [(o, name) for o, preset in PRESETS.items() for name in preset.options]
)
def test_option_that_contradicts_a_preset_raises_and_names_both_even_at_trls_default(tmp_path, objective, name):
    given = OTHER_VALUES[name][PRESETS[objective].options[name]]
    with pytest.raises(ValueError, match=f"{name}={given!r} contradicts objective='{objective}'"):
        config(tmp_path, objective=objective, **{name: given})


@pytest.mark.parametrize(
    ("objective", "kwargs", "match"),
    [
        ("gspo", {"vllm_importance_sampling_clip_max": 5.0}, "clip_max=5.0 is not honoured: objective='gspo'"),
        ("gspo", {"vllm_importance_sampling_mode": "sequence_mask"}, "mode='sequence_mask' is not honoured"),
        ("grpo-tis", {"top_p": 0.9}, "top_p=0.9 is not honoured: objective='grpo-tis' weighs by the sampling"),
        ("mis-gspo", {"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ("grpo-tis", {"sapo_temperature_neg": 2.0}, "sapo_temperature_neg=2.0 is not honoured"),
        ("dual-clip", {"delta": 1.1}, "delta=1.1 is below 1 \\+ epsilon_high=1.2"),
        ("dual-clip", {"delta": 1.25, "epsilon_high": 0.28}, "epsilon_high=1.28"),
        ("on-policy", {"num_iterations": 2}, "num_iterations=2 contradicts objective='on-policy'"),
        ("on-policy", {"steps_per_generation": 4}, "steps_per_generation=4 .*gradient_accumulation_steps=1"),
        ("on-policy", {"generation_batch_size": 32}, "generation_batch_size=32.*gradient_accumulation_steps=1"),
        ("gspo", {"loss_type": "dapo"}, "loss_type='dapo' contradicts objective='gspo'"),
        ("gspo", {"mismatch_cap": 3.0}, "belongs to objective='tbpo'"),
        (
            "icepop",
            {"vllm_importance_sampling_clip_max": 5.0},
            "rule of its own for the mismatch, `mismatch_low`, `mism",
        ),
        ("icepop", {"mismatch_low": 1.5}, "0 < mismatch_low < 1 < mismatch_high"),
        ("icepop", {"top_p": 0.9}, "top_p=0.9 is not honoured: objective='icepop' weighs by the sampling"),
        ("geo-mask", {"mismatch_high": 0.9}, "mismatch_high=0.9"),
        (
            "geo-mask",
            {"divergence_threshold": 0.1},
            "belongs to objective='kpop' and objective='dppo-tv', but objective='geo",
        ),
        ("kpop", {"divergence_threshold": 0.0}, "divergence_threshold=0.0 must be greater than 0"),
        ("kpop", {"mismatch_low": 0.5}, "mismatch_low=0.5 belongs to objective='icepop' and objective='geo-mask'"),
        ("dppo-tv", {"divergence_threshold": 1.5}, "bounds a change of probability"),
        ("dppo-tv", {"epsilon": 0.2}, "epsilon=0.2 is not honoured: objective='dppo-tv' bounds the change"),
        ("dppo-tv", {"entropy_coef": 0.01}, "entropy_coef=0.01 is not honoured"),
        ("acr", {"vllm_importance_sampling_mode": "token_mask"}, "mode='token_mask' is not honoured"),
        ("acr", {"delta": 3.0}, "delta=3.0 is not honoured"),
        ("grpo-tis", {"mismatch_high": 5.0}, "mismatch_high=5.0 belongs to objective='icepop'"),
        ("tbpo", {"divergence_threshold": 0.1}, "belongs to objective='kpop'"),
        ("grpo", {"mismatch_low": 0.5}, "belongs to objective='icepop'"),
    ],
)
def test_what_a_preset_cannot_honour_raises(tmp_path, objective, kwargs, match):
    with pytest.raises(ValueError, match=match):
        config(tmp_path, objective=objective, **kwargs)


def test_defaults_of_a_preset_may_be_changed(tmp_path):
    c = config(tmp_path, objective="mis-gspo", epsilon=0.01, vllm_importance_sampling_clip_max=2.0)
    assert (c.epsilon, c.epsilon_high, c.vllm_importance_sampling_clip_max) == (0.01, 4e-4, 2.0)
    assert config(tmp_path, objective="dual-clip", delta=1.2).delta == 1.2
    c = config(tmp_path, objective="icepop", mismatch_high=2.0, epsilon=0.1)
    assert (c.mismatch_low, c.mismatch_high, c.epsilon) == (0.5, 2.0, 0.1)
    c = config(tmp_path, objective="acr", vllm_importance_sampling_clip_max=2.0)
    assert c.vllm_importance_sampling_clip_max == 2.0


def test_on_policy_makes_one_update_per_generation_batch(tmp_path):
    c = config(tmp_path, objective="on-policy", gradient_accumulation_steps=3)
    assert (c.steps_per_generation, c.num_iterations) == (3, 1)
    c = config(tmp_path, objective="on-policy", gradient_accumulation_steps=4, generation_batch_size=32)
    assert c.steps_per_generation == 4


@pytest.mark.parametrize("options", [{}, {"vllm_importance_sampling_correction": True}], ids=str)
def test_trls_own_correction_of_the_mismatch_is_off_under_tbpo(tmp_path, options):
    assert config(tmp_path, **options).vllm_importance_sampling_correction is False


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


@pytest.mark.parametrize("has_fast_bf16", [True, False])
def test_without_an_accelerator_the_cpu_is_chosen_and_said(tmp_path, monkeypatch, caplog, has_fast_bf16):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("trl_qarl.qarl_config.has_fast_bf16", lambda: has_fast_bf16)
    with caplog.at_level(logging.WARNING, "trl_qarl"):
        c = QaRLConfig(str(tmp_path))
    assert (c.use_cpu, c.bf16, c.device.type) == (True, has_fast_bf16, "cpu")
    (record,) = [record for record in caplog.records if "accelerator" in record.message]
    assert f"use_cpu=True) with bf16={has_fast_bf16}" in record.message
    # What is given is kept.
    assert QaRLConfig(str(tmp_path), bf16=True).bf16 is True
    assert QaRLConfig(str(tmp_path), bf16=False).bf16 is False
    caplog.clear()
    assert QaRLConfig(str(tmp_path), use_cpu=True, bf16=True).bf16 is True
    assert not [record for record in caplog.records if record.name.startswith("trl_qarl")]


def test_an_accelerator_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr("trl_qarl.qarl_config.has_fast_bf16", lambda: False)
    c = QaRLConfig(str(tmp_path))
    assert (c.use_cpu, c.bf16) == (False, True)


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


def test_all_refusals_come_in_one_message(tmp_path):
    recipe = {
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "delta": 1.5,
        "top_entropy_quantile": 0.2,
        "importance_sampling_level": "token",
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_cap": 2.0,
        "entropy_coef": 0.01,
        "off_policy_mask_threshold": 0.5,
    }
    elsewhere = {"use_vllm": True, "top_p": 0.9, "torch_compile": True}
    with pytest.raises(ValueError) as error:
        config(tmp_path, **recipe, **elsewhere)
    lines = str(error.value).splitlines()
    assert lines[0] == "10 options do not apply to objective='tbpo':"
    assert {line.split("=")[0] for line in lines[1:11]} == {f"- {name}" for name in recipe}
    assert all(REFUSED_BY_TBPO[name] in str(error.value) for name in recipe if name != "loss_type")
    assert lines[11] == "objective='dapo' takes them as TRL does."
    assert lines[12] == "Apart from them:"
    assert [line.split("=")[0] for line in lines[13:]] == ["- torch_compile", "- top_p"]
    # As it says.
    del recipe["loss_type"]
    c = config(tmp_path, objective="dapo", **recipe)
    assert {name: getattr(c, name) for name in recipe} == recipe


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


@pytest.mark.parametrize("objective", ["tbpo", "grpo-tis"])
def test_neutral_values_pass(tmp_path, objective):
    c = config(tmp_path, objective=objective, min_p=0.0, generation_kwargs={"do_sample": True, "stop_strings": ["."]})
    assert (c.min_p, c.generation_kwargs) == (0.0, {"stop_strings": ["."]})
    assert config(tmp_path, generation_kwargs='{"do_sample": true}', use_vllm=True).generation_kwargs == {}


def test_config_survives_a_round_trip_through_yaml_like_dicts(tmp_path):
    c = config(tmp_path, objective="grpo", scheme="w8a8")
    assert c.to_dict()["optim"] == "muon" and c.to_dict()["scheme"] == "w8a8"
    assert QaRLConfig(str(tmp_path), use_cpu=True, loss_type=c.loss_type, objective=c.objective).loss_type == "grpo"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.9}, "top_p=0.9 .*[Uu]se 1.0"),
        ({"top_k": 50}, "top_k=50"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"top_p": 0.9, "temperature": 0.7}, "top_p=0.9"),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex masks tokens"),
        ({"vllm_mode": "remote"}, "Choose 'server' or 'colocate'"),
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
        ({"generation_kwargs": {"logit_bias": {5: 9.0}}}, r"\['logit_bias'\], which change what vLLM samples"),
        ({"vllm_enable_sleep_mode": True, "use_cpu": True}, "sleep mode"),
    ],
    ids=str,
)
@pytest.mark.parametrize("objective", ["tbpo", "dapo"])
def test_what_would_bias_or_break_rollouts_is_refused(tmp_path, objective, options, message):
    with pytest.raises(ValueError, match=message):
        QaRLConfig(str(tmp_path), **({"use_vllm": True, "objective": objective, "use_cpu": True} | options))
