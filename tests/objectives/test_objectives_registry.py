"""Objectives by name, and those of a user's own."""

import copy
import sys

import pytest

from testing_utils.trainings import make, parameters, rows
from trl_qarl.objectives import registry
from trl_qarl.objectives.registry import get_objective
from trl_qarl.qarl_config import QaRLConfig


MY_LOSSES = '''
from dataclasses import dataclass

from trl_qarl.objectives.objective import Loss, Objective
from trl_qarl.objectives.presets import COMPARISON, Preset


@dataclass(frozen=True)
class Sharp(Objective):
    """REINFORCE with the sampler's ratio raised to a power."""

    tau: float = 1.0
    has_own_loss = True

    def loss(self, config, batch):
        mask = batch.mask.bool() & ~batch.sampling_per_token_logps.isnan()
        ratio = (self.tau * (batch.per_token_logps - batch.sampling_per_token_logps)).exp().where(mask, 0.0)
        value = -(ratio * batch.advantages.unsqueeze(1)).sum() / mask.sum()
        return Loss(value, ratio.detach(), {"sharp/ratio": ratio.detach().mean(-1)})


NARROW = Preset("narrow", dict(COMPARISON[0].options), {"epsilon": 0.01})
SLOPED = Objective("sloped", clip="above")
LOW = Objective("dapo", defaults={"epsilon": 0.01})
SOMETHING = 1
'''


@pytest.fixture
def my_losses(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(MY_LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_losses", None)
    registry._of_user.cache_clear()


@pytest.mark.parametrize("kwargs", [{"tau": 0.5}, '{"tau": 0.5}'], ids=["dict", "command line"])
def test_an_objective_of_a_users_own_is_named_by_its_place(my_losses, kwargs):
    config = QaRLConfig("out", objective="my_losses:Sharp", objective_kwargs=kwargs, bf16=False, use_cpu=True)
    objective = get_objective(config)
    assert objective.tau == 0.5 and config.objective_kwargs == {"tau": 0.5} and config.loss_type == "grpo"
    assert get_objective(copy.deepcopy(config)) is objective


def test_a_training_takes_an_objective_of_a_users_own(my_losses, tiny_model, tmp_path):
    args = {"objective": "my_losses:Sharp", "objective_kwargs": {"tau": 0.5}, "max_steps": 2}
    trainer = make(tiny_model, tmp_path / "out", **args)
    before = parameters(trainer)
    trainer.train()
    first = rows(trainer)[0]
    # Learner and sampler are the same policy before the first update, so its loss is the mean advantage of a token.
    assert 0.9 < first["sharp/ratio"] <= 1.1 and first["grad_norm"] > 0
    assert any(not before[name].equal(value) for name, value in parameters(trainer).items())


@pytest.mark.parametrize(
    ("name", "epsilon", "loss_type"), [("NARROW", 0.01, "grpo"), ("SLOPED", 0.2, "grpo"), ("LOW", 0.01, "dapo")]
)
def test_an_object_may_be_named_in_place_of_a_class(my_losses, name, epsilon, loss_type):
    config = QaRLConfig("out", objective=f"my_losses:{name}", bf16=False, use_cpu=True)
    assert config.epsilon == epsilon and config.loss_type == loss_type


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "tpbo"}, "'tpbo'"),
        ({"objective": "my_losses:Sharpe"}, "cannot be imported.*Sharpe"),
        ({"objective": "nowhere:Sharp"}, "cannot be imported.*nowhere"),
        ({"objective": ":Sharp"}, "':Sharp' cannot be imported.*'module:Name'"),
        ({"objective": ".here:Sharp"}, "'.here:Sharp' cannot be imported.*'module:Name'"),
        ({"objective": "my_losses:SOMETHING"}, "is a int.*subclass"),
        ({"objective": "my_losses:Sharp", "objective_kwargs": {"tao": 1}}, "does not take objective_kwargs.*tao"),
        ({"objective": "my_losses:Sharp", "objective_kwargs": {"tau": {1}}}, "objective_kwargs=.*set is not JSON"),
        ({"objective": "my_losses:NARROW", "objective_kwargs": {"tau": 1}}, "Name its class"),
        ({"objective_kwargs": {"tau": 1}}, "objective_kwargs.*'tbpo'"),
        ({"objective": "my_losses:Sharp", "mismatch_cap": 3.0}, "mismatch_cap"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_an_objective_that_does_not_exist_is_refused_by_name(my_losses, options, message):
    with pytest.raises(ValueError, match=message):
        QaRLConfig("out", bf16=False, use_cpu=True, **options)
