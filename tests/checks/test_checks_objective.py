"""Options that an objective sets, and options that contradict it."""

import pytest

from testing_utils.trainings import config
from trl_qarl.objectives.presets import Preset
from trl_qarl.objectives.registry import OBJECTIVES, all_objectives


PRESETS = {name: objective for name, objective in all_objectives().items() if isinstance(objective, Preset)}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_sets_the_loss_type(tmp_path, objective):
    assert config(tmp_path, objective=objective).loss_type == ("grpo" if objective in PRESETS else objective)


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
        ("gspo", {"vllm_importance_sampling_clip_max": 5.0}, "clip_max=5.0"),
        ("gspo", {"vllm_importance_sampling_mode": "sequence_mask"}, "mode='sequence_mask'"),
        ("grpo-tis", {"top_p": 0.9}, "top_p=0.9"),
        ("mis-gspo", {"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ("grpo-tis", {"sapo_temperature_neg": 2.0}, "sapo_temperature_neg=2.0"),
        ("dual-clip", {"delta": 1.1}, "delta=1.1"),
        ("dual-clip", {"delta": 1.25, "epsilon_high": 0.28}, "epsilon_high=1.28"),
        ("on-policy", {"num_iterations": 2}, "num_iterations=2"),
        ("on-policy", {"steps_per_generation": 4}, "steps_per_generation=4"),
        ("on-policy", {"generation_batch_size": 32}, "generation_batch_size=32"),
        ("gspo", {"loss_type": "dapo"}, "loss_type='dapo'"),
        ("gspo", {"mismatch_cap": 3.0}, "mismatch_cap"),
        ("icepop", {"vllm_importance_sampling_clip_max": 5.0}, "`mismatch_low`"),
        ("icepop", {"mismatch_low": 1.5}, "mismatch_low"),
        ("icepop", {"top_p": 0.9}, "top_p=0.9"),
        ("geo-mask", {"mismatch_high": 0.9}, "mismatch_high=0.9"),
        ("geo-mask", {"divergence_threshold": 0.1}, "divergence_threshold"),
        ("kpop", {"divergence_threshold": 0.0}, "divergence_threshold=0.0"),
        ("kpop", {"mismatch_low": 0.5}, "mismatch_low=0.5"),
        ("dppo-tv", {"divergence_threshold": 1.5}, "divergence_threshold"),
        ("dppo-tv", {"epsilon": 0.2}, "epsilon=0.2"),
        ("dppo-tv", {"entropy_coef": 0.01}, "entropy_coef=0.01"),
        ("acr", {"vllm_importance_sampling_mode": "token_mask"}, "mode='token_mask'"),
        ("acr", {"delta": 3.0}, "delta=3.0"),
        ("grpo-tis", {"mismatch_high": 5.0}, "mismatch_high=5.0"),
        ("tbpo", {"divergence_threshold": 0.1}, "divergence_threshold"),
        ("grpo", {"mismatch_low": 0.5}, "mismatch_low"),
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
