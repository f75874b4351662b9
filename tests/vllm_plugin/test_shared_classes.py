"""Models of a class that vLLM decorates for its engine."""

import pytest
import torch
from torch import nn


pytest.importorskip("vllm")

from vllm.compilation import decorators
from vllm.config import VllmConfig, set_current_vllm_config

from trl_qarl.vllm_plugin.shared_classes import register_classes


pytestmark = pytest.mark.vllm


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_models_outside_of_an_engine_work_with_their_hooks(monkeypatch):
    monkeypatch.setattr(decorators, "_support_torch_compile", decorators._support_torch_compile)
    register_classes()
    register_classes()
    older, calls = Model(), []
    for _ in range(2):
        decorators.support_torch_compile(dynamic_arg_dims={"x": 0})(Model)
    newer = Model()
    for model in (older, newer):
        model.register_forward_hook(lambda module, *_: calls.append(module))
        assert model(torch.zeros(1)) == 1
        assert "do_not_compile" not in vars(model)
    assert calls == [older, newer]
    config = VllmConfig()
    with set_current_vllm_config(config):
        engines = Model()
    assert engines.vllm_config is config and engines(torch.zeros(1)) == 1
