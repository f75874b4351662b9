import re

import pytest
from transformers import AutoModelForImageTextToText

from testing_utils.layers import tiny
from testing_utils.pictures import make_picture_config
from testing_utils.trainings import SIGNED, lora
from trl_qarl import QaRLConfig
from trl_qarl.checks.adapter import (
    problems_of_adapted_model,
    problems_of_adapter,
    problems_of_options,
    problems_of_start,
)
from trl_qarl.checks.refused import REFUSED_BY_LORA


peft = pytest.importorskip("peft")


def adapted(**options):
    return peft.get_peft_model(tiny(), lora(**options))


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"use_rslora": True, "r": 4, "lora_alpha": 3, "lora_dropout": 0.1, "task_type": "CAUSAL_LM"},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False, "revision": "main"},
    ],
)
def test_what_lora_can_do_beside_a_low_bit_base_passes(lora):
    assert [*problems_of_adapter(peft.LoraConfig(**lora))] == []


def test_layers_may_be_excluded_from_all():
    model = peft.get_peft_model(tiny(), peft.LoraConfig(target_modules="all-linear", exclude_modules=["q_proj"]))
    assert [*problems_of_adapted_model(model)] == []


REFUSED = {
    "use_dora": True,
    "bias": "lora_only",
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "target_parameters": ["mlp.experts"],
    "trainable_token_indices": [1],
    "layer_replication": [(0, 1), (0, 2)],
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2},
}


@pytest.mark.parametrize("kind", ["idefics3", "qwen3_vl"])
def test_only_adapters_of_the_vision_tower_are_refused(kind):
    def problems(targets):
        model = AutoModelForImageTextToText.from_config(make_picture_config(kind))
        return [*problems_of_adapted_model(peft.get_peft_model(model, peft.LoraConfig(target_modules=targets)))]

    (problem,) = problems("all-linear")
    assert "outside the language model" in problem
    assert problems(eval(re.search(r": target_modules=(.*)\.$", problem)[1])) == []


@pytest.mark.parametrize("name", REFUSED_BY_LORA)
def test_what_it_cannot_is_refused_by_name(name):
    (problem,) = problems_of_adapter(peft.LoraConfig(**{name: REFUSED[name]}))
    assert problem.startswith(f"peft_config: {name}={REFUSED[name]!r} is not supported: ")
    assert problem.endswith(f"{REFUSED_BY_LORA[name]}.")
    is_merged = [*problems_of_adapter(peft.LoraConfig(**{name: REFUSED[name]}), is_merged=True)]
    assert (is_merged == []) == name.endswith("_pattern")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: object(), "peft_config=object"),
        (lambda: peft.IA3Config(), "peft_config=IA3Config"),
        (lambda: peft.LoraConfig(task_type="SEQ_CLS"), "'CAUSAL_LM'"),
        (lambda: peft.LoraConfig(use_qalora=True), "use_qalora=True"),
        (lambda: peft.LoraConfig(lora_alpha=0), "lora_alpha=0 multiplies the adapter by 0"),
        # It changes the base.
        (lambda: peft.LoraConfig(init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
    ],
)
def test_other_adapters_are_refused(config, message):
    (problem,) = problems_of_adapter(config())
    assert message in problem


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lora_mode": "merged", "scheme": "bf16"}, "lora_mode='merged'"),
        ({"precisions": [3], "scheme": SIGNED[4]}, "precisions=[3]"),
        ({"sync_ref_model": True, "beta": 0.1}, "sync_ref_model=True"),
    ],
)
def test_options_that_contradict_an_adapter_are_refused(tmp_path, kwargs, message):
    args = QaRLConfig(str(tmp_path), use_cpu=True, **kwargs)
    (problem,) = problems_of_options(args, has_adapter=True)
    assert problem.startswith(message)
    assert len([*problems_of_options(args, has_adapter=False)]) == ("lora_mode" in kwargs)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("query", ["target_modules ['query'] match no layer", "'down_proj'"]),
        ("lm_head", ["names 'lm_head'"]),
        ("embed_tokens", ["names 'model.embed_tokens'"]),
    ],
)
def test_head_embedding_and_absent_layers_are_no_targets(name, said):
    (problem,) = problems_of_adapted_model(adapted(target_modules=["q_proj", name]))
    assert all(part in problem for part in said)


def test_an_adapter_for_inference_is_not_trained(tmp_path):
    model = adapted()
    assert [*problems_of_adapted_model(model)] == []
    model.add_adapter("ref", model.peft_config["default"])
    assert [*problems_of_adapted_model(model)] == [], "TRL's copy of the start"
    model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))
    (problem,) = problems_of_adapted_model(model)
    assert "adapters ['default', 'second']" in problem
    adapted().save_pretrained(tmp_path)
    (problem,) = problems_of_adapted_model(peft.PeftModel.from_pretrained(tiny(), tmp_path))
    assert "`is_trainable=True`" in problem


def test_adapted_or_quantized_models_are_refused():
    model = tiny()
    assert [*problems_of_start(model, has_adapter=True)] == []
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    (problem,) = problems_of_start(model, has_adapter=True)
    assert "as a string" in problem and [*problems_of_start(model, has_adapter=False)] == []
    del model.config.quantization_config
    try:
        model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    except ValueError as error:
        # transformers 5.24 wants peft 0.22 for this.
        pytest.skip(str(error))
    (problem,) = problems_of_start(model, has_adapter=False)
    assert "adapter that was loaded by transformers" in problem
