import contextlib
import dataclasses
import logging
from pathlib import Path

import pytest
from trl import GRPOConfig

from trl_qarl.qarl_config import _REFUSED, _REFUSED_BY_TBPO, OBJECTIVES, QaRLConfig


def config(tmp_path, **kwargs):
    return QaRLConfig(str(tmp_path), use_cpu=True, **kwargs)


def test_defaults_are_those_of_the_papers_table_2(tmp_path):
    c = config(tmp_path)
    assert (c.learning_rate, c.weight_decay, c.beta, c.temperature, c.top_p) == (1e-6, 0.01, 0.0, 1.0, 1.0)
    assert (c.epsilon_high, c.negative_epsilon_low, c.negative_epsilon_high, c.mismatch_cap) == (4e-4, 3e-4, 7e-4, 2.0)
    assert (c.num_generations, c.num_iterations, c.optim, c.objective, c.scheme) == (8, 1, "muon", "tbpo", "w4a16")
    assert c.steps_per_generation == 8 * c.gradient_accumulation_steps
    assert config(tmp_path, gradient_accumulation_steps=3).steps_per_generation == 24


def test_no_other_default_of_trl_changes(tmp_path):
    ours = {f.name: f.default for f in dataclasses.fields(QaRLConfig)}
    changed = {f.name for f in dataclasses.fields(GRPOConfig) if ours[f.name] != f.default}
    assert changed == {"optim", "weight_decay", "epsilon", "importance_sampling_level", "loss_type"}
    # The last three are filled with TRL's values for TRL's losses.
    c, stock = config(tmp_path, objective="dapo"), GRPOConfig(str(tmp_path), use_cpu=True)
    for name in ("epsilon", "epsilon_high", "importance_sampling_level", "loss_type"):
        assert getattr(c, name) == getattr(stock, name)


def test_every_own_field_has_help():
    inherited = {f.name for f in dataclasses.fields(GRPOConfig)}
    own = [f for f in dataclasses.fields(QaRLConfig) if f.name not in inherited]
    assert own and all(len(f.metadata.get("help", "")) > 20 for f in own)


def test_an_explicit_generation_batch_size_is_kept(tmp_path):
    c = config(tmp_path, generation_batch_size=32)
    assert (c.generation_batch_size, c.steps_per_generation) == (32, 4)


REFUSED_VALUES = {
    "use_vllm": True,
    "use_transformers_continuous_batching": True,
    "use_transformers_paged": True,
    "torch_compile": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "fsdp": "full_shard",
    "deepspeed": "ds.json",
    "epsilon": 0.2,
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
    assert REFUSED_VALUES.keys() == _REFUSED.keys() | _REFUSED_BY_TBPO.keys()


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_an_inherited_option_that_is_not_honoured_raises_and_names_value_and_fix(tmp_path, name):
    why = (_REFUSED | _REFUSED_BY_TBPO)[name]
    with pytest.raises(ValueError) as error:
        config(tmp_path, **{name: REFUSED_VALUES[name]})
    assert f"{name}={REFUSED_VALUES[name]!r}" in str(error.value) and why in str(error.value)


@pytest.mark.parametrize("name", _REFUSED)
def test_options_refused_for_every_objective(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        config(tmp_path, objective="grpo", **{name: REFUSED_VALUES[name]})


@pytest.mark.parametrize("name", [n for n in _REFUSED_BY_TBPO if not n.startswith("vllm")])
def test_options_of_trls_losses_are_honoured_with_trls_losses(tmp_path, name):
    assert getattr(config(tmp_path, objective="grpo", **{name: REFUSED_VALUES[name]}), name) == REFUSED_VALUES[name]


@pytest.mark.parametrize("kwargs", [{"top_k": 5}, {"do_sample": False}, '{"num_beams": 4}'])
def test_generation_kwargs_that_change_the_distribution_raise(tmp_path, kwargs):
    with pytest.raises(ValueError, match="generation_kwargs contains"):
        config(tmp_path, generation_kwargs=kwargs)


def test_other_generation_kwargs_pass(tmp_path):
    assert config(tmp_path, generation_kwargs={"stop_strings": ["\n"]}).generation_kwargs


def test_torch_compile_switched_on_by_its_backend_is_refused_too(tmp_path):
    with pytest.raises(ValueError, match="torch_compile=True"):
        config(tmp_path, torch_compile_backend="inductor")


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
        ({"scheme": "bf16", "exclude_modules": ["o_proj"]}, "quantizes nothing"),
        ({"negative_epsilon_low": -1e-4}, "negative_epsilon_low"),
        ({"negative_epsilon_low": 1.5}, "between 0 and 1"),
        ({"negative_epsilon_high": -1e-4}, "negative_epsilon_high"),
        ({"epsilon_high": float("nan")}, "epsilon_high"),
        ({"mismatch_cap": 1.0}, "greater than 1"),
        ({"loss_type": "dapo"}, "contradicts objective='tbpo'"),
        ({"loss_type": "dapo", "objective": "grpo"}, "contradicts objective='grpo'"),
        ({"objective": "grpo", "mismatch_cap": 3.0}, "belongs to objective='tbpo'"),
        ({"objective": "grpo", "importance_sampling_level": "word"}, "'word'"),
        ({"model_init_kwargs": {"quantization_config": {}}}, "quantization_config"),
        ({"num_generations": 1}, "at least 2 generations"),
        ({"optim": "lion_64bit"}, "lion_64bit"),
    ],
)
def test_bad_values_raise_with_the_reason(tmp_path, kwargs, match):
    with pytest.raises(ValueError, match=match):
        config(tmp_path, **kwargs)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_sets_the_loss_type(tmp_path, objective):
    assert config(tmp_path, objective=objective).loss_type == objective


def test_objectives_are_exactly_trls_losses_and_tbpo():
    help_text = {f.name: f.metadata for f in dataclasses.fields(GRPOConfig)}["loss_type"]["help"]
    assert all(f"'{name}'" in help_text or name in help_text for name in OBJECTIVES if name != "tbpo")


def test_fp16_warns_with_the_reason(tmp_path, caplog, monkeypatch):
    # transformers refuses fp16 on a CPU later; the warning comes first.
    with caplog.at_level(logging.WARNING), contextlib.suppress(ValueError):
        config(tmp_path, fp16=True)
    assert "underflow to NaN" in caplog.text


def test_config_survives_a_round_trip_through_yaml_like_dicts(tmp_path):
    c = config(tmp_path, objective="grpo", scheme="w8a8")
    assert c.to_dict()["optim"] == "muon" and c.to_dict()["scheme"] == "w8a8"
    assert QaRLConfig(str(tmp_path), use_cpu=True, loss_type=c.loss_type, objective=c.objective).loss_type == "grpo"


def test_every_refused_option_is_in_the_documentation():
    page = (Path(__file__).parents[1] / "docs" / "trainer.md").read_text()
    for name, why in (_REFUSED | _REFUSED_BY_TBPO).items():
        assert f"| `{name}` | {why} |" in page
