"""Whether a run can be exact, and if not why: by its options, without vLLM, and by its model."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_config
from trl_qarl import QaRLConfig
from trl_qarl.numerics import cpu as kernels
from trl_qarl.numerics.availability import check_engine_numerics, choose_numerics, obstacles


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


def tiny(arch="llama"):
    return AutoModelForCausalLM.from_config(make_tiny_config(arch))


@pytest.mark.parametrize("numerics", [None, "engine"])
def test_a_configuration_does_not_load_vllm(tmp_path, without_vllm, numerics):
    assert config(tmp_path, numerics=numerics).numerics == numerics


def test_what_can_be_said_without_vllm_is_said_by_the_configuration(tmp_path, without_vllm, monkeypatch):
    monkeypatch.setattr(kernels, "reason_against_installation", lambda: "this processor has no AVX512")
    with pytest.raises(ValueError, match=r"contradicts use_vllm=True: .* no AVX512. .*, or use numerics='fast'"):
        config(tmp_path, numerics="engine")


def test_kernels_that_turn_out_not_to_be_there_are_an_error_for_who_asked_and_a_reason_for_others(
    tmp_path, without_vllm, monkeypatch
):
    configs = [config(tmp_path, numerics=numerics) for numerics in ("engine", None, "fast")]
    monkeypatch.setattr(kernels, "reason_against", lambda: "the vLLM that is installed is not built for CPUs")
    model = tiny()
    with pytest.raises(ValueError, match="numerics='engine' contradicts use_vllm=True: .* not built for CPUs"):
        choose_numerics(configs[0], model, torch.bfloat16)
    numerics, reason = choose_numerics(configs[1], model, torch.bfloat16)
    assert numerics == "fast" and reason.startswith("engine numerics contradict use_vllm=True: ")
    assert choose_numerics(configs[2], model, torch.bfloat16) == ("fast", "as configured")


def test_vllm_is_not_loaded_to_find_a_reason_that_is_there_without(tmp_path, without_vllm):
    found = choose_numerics(config(tmp_path, use_vllm=False), tiny(), torch.bfloat16)
    assert found == ("fast", "rollouts are the learner's own")


def test_everything_that_is_in_the_way_can_be_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "reason_against", lambda: "it is not installed")
    found = [*obstacles(config(tmp_path, scheme="w8a16", bf16=False), tiny("gemma"), torch.bfloat16)]
    for text in ("contradict bf16=False", "contradict scheme='w8a16'", "GemmaForCausalLM"):
        assert sum(text in reason for reason in found) == 1
    assert len(found) == 4


def test_a_model_without_parameters_of_a_known_class_is_refused_first():
    with pytest.raises(ValueError, match="the operations of SimpleNamespace are not known"):
        check_engine_numerics(SimpleNamespace())
