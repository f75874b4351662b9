"""Objectives by name, those of a user's own, and options that contradict an objective."""

import copy
import sys

import pytest

from testing_utils.trainings import config
from trl_qarl.objectives.registry import get_objective
from trl_qarl.trainer.qarl_config import QaRLConfig


MY_LOSSES = """
from dataclasses import dataclass

from trl_qarl.objectives.objective import Objective


@dataclass
class Sharp(Objective):
    tau: float = 1.0

    def problems(self, config):
        if self.tau <= 0:
            yield f"tau={self.tau} must be greater than 0."

    def loss(self, config, batch):
        raise NotImplementedError


SOMETHING = Sharp()
"""


@pytest.fixture
def my_losses(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(MY_LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_losses", None)


@pytest.mark.parametrize("kwargs", [{"tau": 0.5}, '{"tau": 0.5}'], ids=["dict", "command line"])
def test_an_objective_of_your_own_is_named_by_its_place(my_losses, kwargs):
    made = QaRLConfig("out", loss_type="my_losses:Sharp", objective_kwargs=kwargs, bf16=False, use_cpu=True)
    assert get_objective(made).tau == 0.5 and made.objective_kwargs == {"tau": 0.5}
    assert made.loss_type == "my_losses:Sharp" and made.vllm_importance_sampling_correction is False
    assert get_objective(copy.deepcopy(made)) == get_objective(made)


def test_gspo_is_trls_grpo_with_sequence_ratios(tmp_path):
    with pytest.raises(ValueError, match="loss_type='grpo' with importance_sampling_level='sequence'"):
        config(tmp_path, loss_type="gspo")
    gspo = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    made = config(tmp_path, loss_type="grpo", vllm_importance_sampling_correction=False, **gspo)
    assert {name: getattr(made, name) for name in gspo} == gspo


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "'ppo' is unknown"),
        ({"loss_type": "my_losses:Sharpe"}, "cannot be imported.*Sharpe"),
        ({"loss_type": "nowhere:Sharp"}, "cannot be imported.*nowhere"),
        ({"loss_type": ":Sharp"}, "':Sharp' cannot be imported.*'module:Class'"),
        ({"loss_type": "my_losses:SOMETHING"}, "my_losses:SOMETHING.*Name a subclass"),
        ({"loss_type": "my_losses:Sharp", "objective_kwargs": {"tao": 1}}, "does not take objective_kwargs.*tao"),
        ({"loss_type": "my_losses:Sharp", "objective_kwargs": {"tau": -1}}, "tau=-1 must be greater than 0"),
        ({"objective_kwargs": {"tau": 1}}, "objective_kwargs.*'tbpo'"),
        ({"loss_type": "my_losses:Sharp", "mismatch_cap": 3.0}, "mismatch_cap=3.0 belongs to loss_type='tbpo'"),
        ({"loss_type": "grpo", "positive_epsilon_high": 0.1}, "positive_epsilon_high=0.1 belongs to"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_a_wrong_objective_is_refused_by_name(my_losses, options, message):
    with pytest.raises(ValueError, match=message):
        QaRLConfig("out", bf16=False, use_cpu=True, **options)
