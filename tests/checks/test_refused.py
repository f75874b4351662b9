"""Options of TRL that are refused: each is named with the reason, and neutral values pass."""

import pytest

from testing_utils.trainings import config
from trl_qarl.checks.refused import MODEL_INIT_KWARGS_REFUSED, REFUSED
from trl_qarl.objectives.tbpo import REFUSED_BY_TBPO


REFUSED_VALUES = {
    **dict.fromkeys(("use_transformers_continuous_batching", "use_transformers_paged"), True),
    **dict.fromkeys(("torch_compile", "use_liger_kernel", "bf16_full_eval", "fp16_full_eval"), True),
    "fsdp": "full_shard",
    "deepspeed": "ds.json",
    "neftune_noise_alpha": 5.0,
    "label_smoothing_factor": 0.1,
    "enable_jit_checkpoint": True,
    "epsilon": 0.1,
    "epsilon_high": 0.28,
    "delta": 1.5,
    "importance_sampling_level": "sequence",
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), 2.0),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), 9.0),
    "off_policy_mask_threshold": 0.5,
    "top_entropy_quantile": 0.2,
    "entropy_coef": 0.01,
    "use_adaptive_entropy": True,
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
def test_an_unsupported_inherited_option_names_the_fix(tmp_path, name):
    why = (REFUSED | REFUSED_BY_TBPO)[name]
    with pytest.raises(ValueError) as error:
        config(tmp_path, **{name: REFUSED_VALUES[name]})
    assert f"{name}={REFUSED_VALUES[name]!r}" in str(error.value) and why in str(error.value)


@pytest.mark.parametrize("name", [n for n in REFUSED_BY_TBPO if not n.startswith("vllm")])
def test_options_of_trls_losses_are_honoured_with_trls_losses(tmp_path, name):
    assert getattr(config(tmp_path, loss_type="grpo", **{name: REFUSED_VALUES[name]}), name) == REFUSED_VALUES[name]


@pytest.mark.parametrize("kwargs", [{"top_k": 5}, {"temperature": 0.5}, {"do_sample": False}, '{"num_beams": 4}'])
def test_generation_kwargs_that_change_the_distribution_raise(tmp_path, kwargs):
    with pytest.raises(ValueError, match="generation_kwargs contains"):
        config(tmp_path, generation_kwargs=kwargs)


MODEL_INIT_VALUES = {
    "quantization_config": {},
    "load_in_4bit": True,
    "load_in_8bit": True,
    "use_kernels": True,
    "tp_plan": "auto",
    "tp_size": 2,
    "distributed_config": {"tp_size": 2},
}


@pytest.mark.parametrize("name", MODEL_INIT_KWARGS_REFUSED)
def test_loading_a_model_in_a_way_that_is_not_honoured_raises(tmp_path, name):
    with pytest.raises(ValueError) as error:
        config(tmp_path, model_init_kwargs={name: MODEL_INIT_VALUES[name], "dtype": "float32"})
    assert f"model_init_kwargs[{name!r}] is not supported" in str(error.value)
    assert MODEL_INIT_KWARGS_REFUSED[name] in str(error.value)
    neutral = {name: False if MODEL_INIT_VALUES[name] is True else None}
    assert config(tmp_path, model_init_kwargs=neutral).model_init_kwargs == neutral


def test_neutral_values_pass(tmp_path):
    c = config(tmp_path, min_p=0.0, generation_kwargs={"do_sample": True, "max_time": 9.0})
    assert (c.min_p, c.generation_kwargs) == (0.0, {"max_time": 9.0})
    assert config(tmp_path, generation_kwargs='{"do_sample": true}', use_vllm=True).generation_kwargs == {}
