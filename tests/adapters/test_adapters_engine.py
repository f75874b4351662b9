"""Adapter tensors for vLLM and the arguments of an engine; tests/vllm_plugin/test_adapters.py has real engines."""

import math
import re

import pytest
import torch

from testing_utils.layers import tiny
from testing_utils.trainings import lora
from trl_qarl.adapters.tensors import adapter_problems, iter_adapter_tensors, lora_arguments
from trl_qarl.checks.adapter import problems_of_adapter
from trl_qarl.hub import ENGINE_RANKS, engine_rank


peft = pytest.importorskip("peft")

ENGINE = {"dtype": "bfloat16", "lora": {"max_rank": 8, "dtype": "bfloat16", "modules": ["o_proj", "q_proj"]}}


def make(**kwargs):
    model = peft.get_peft_model(tiny(), lora(**({"target_modules": ["q_proj", "o_proj"]} | kwargs)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize(("use_rslora", "scaling"), [(False, 6 / 4), (True, 6 / math.sqrt(4))])
def test_b_is_sent_with_its_scaling_in_the_engines_dtype(use_rslora, scaling):
    model = make(use_rslora=use_rslora)
    sent = dict(iter_adapter_tensors(model, torch.bfloat16))
    assert len(sent) == 2 * 2 * 2
    layer = model.get_base_model().get_submodule("model.layers.1.self_attn.q_proj")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    name = "model.layers.1.self_attn.q_proj"
    assert torch.equal(sent[f"{name}.lora_A.weight"], a.to(torch.bfloat16))
    assert torch.equal(sent[f"{name}.lora_B.weight"], (b * scaling).to(torch.bfloat16))


def test_a_model_without_an_adapter_beside_it_sends_none():
    base = make().unload()
    merged = make()
    merged.get_base_model().get_submodule("model.layers.0.mlp.up_proj").holds_adapter = True
    for model in (base, merged):
        assert list(iter_adapter_tensors(model, torch.float32)) == []
        assert lora_arguments(model) == {}
        assert list(adapter_problems(model, ENGINE | {"lora": None})) == []


def test_a_rank_above_the_engines_is_refused_early():
    assert [engine_rank(rank) for rank in (1, 2, 8, 9, 65, 257, 512)] == [1, 8, 8, 16, 128, 320, 512]
    with pytest.raises(ValueError, match="rank 513 cannot be served: the largest rank in vLLM is 512"):
        engine_rank(513)
    config = peft.LoraConfig(r=1024, task_type="CAUSAL_LM")
    assert list(problems_of_adapter(config)) == []
    (problem,) = problems_of_adapter(config, is_served=True)
    assert "r=1024 is more than vLLM serves. Use at most 512" in problem
    assert lora_arguments(make()) == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 8,
        "lora_target_modules": ["o_proj", "q_proj"],
    }


@pytest.mark.vllm
def test_the_ranks_are_those_of_the_installed_vllm():
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == ENGINE_RANKS


@pytest.mark.parametrize(
    ("lora", "adapter", "message"),
    [
        (None, {}, "the learner trains one of rank 4, but the engine was started without LoRA. .*--max_lora_rank 8"),
        ({}, {"r": 12}, "learner rank 12, engine at most 8. Start it with `--max_lora_rank 16`"),
        ({}, {"target_modules": ["q_proj", "up_proj"]}, "'up_proj'"),
        ({"dtype": "float16"}, {}, "round it to float16, its weights are bfloat16"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_serve_the_adapter_is_refused(lora, adapter, message):
    assert list(adapter_problems(make(), ENGINE)) == []
    engine = ENGINE | {"lora": None if lora is None else ENGINE["lora"] | lora}
    (problem,) = adapter_problems(make(**adapter), engine)
    assert re.search(message, problem)
