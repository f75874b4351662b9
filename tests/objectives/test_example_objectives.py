"""`examples/objectives.py`: equal to naive loops, and trained with."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reference.objectives_naive import EPSILON, EPSILON_HIGH, OPTIONS, naive_objective
from testing_utils.batches import make_batch
from testing_utils.trainings import make, parameters, rows
from trl_qarl.forward import Batch
from trl_qarl.objectives.objective import reduce_metrics
from trl_qarl.objectives.registry import get_objective


EXAMPLES = Path(__file__).parents[2] / "examples"


def config_of(name, **options):
    given = {"epsilon": EPSILON, "epsilon_high": EPSILON_HIGH, "objective_kwargs": OPTIONS[name] | options}
    return SimpleNamespace(loss_type=f"objectives:{name}", **given)


@pytest.fixture(autouse=True)
def in_folder_of_examples(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("objectives", None)


def loss_of(name, batch):
    logps = batch["logps"].clone().requires_grad_()
    given = Batch(batch["old"], batch["sampling"], batch["advantages"], batch["mask"], logps)
    loss = get_objective(config_of(name)).loss(config_of(name), given)
    loss.value.backward()
    return loss, logps.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OPTIONS)
def test_value_and_gradient_equal_naive_loops(name, seed):
    batch = make_batch(seed)
    # What padding holds does not matter.
    for tensor in (batch["logps"], batch["old"], batch["sampling"]):
        tensor.masked_fill_(batch["mask"] == 0, math.nan)
    loss, gradient = loss_of(name, batch)
    tensors = (batch[key].tolist() for key in ("logps", "old", "sampling", "advantages", "mask"))
    expected, expected_gradient = naive_objective(name, *tensors)
    assert loss.value.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(expected_gradient, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    counts = (batch["mask"] != 0) & (batch["advantages"] != 0).unsqueeze(1)
    assert 0.05 < (gradient[counts] == 0).double().mean() < 0.95
    [(metric, shares)] = loss.metrics.items()
    assert metric.endswith("/dropped_tokens") and 0.01 < reduce_metrics(loss.metrics)[metric] < 0.95
    assert shares.shape == batch["advantages"].shape


@pytest.mark.parametrize("name", OPTIONS)
def test_a_mismatch_that_overflows_makes_no_nan(name):
    batch = {"logps": torch.tensor([[-1.0, -0.01]]), "old": torch.tensor([[-1.0, -0.01]])}
    batch |= {"sampling": torch.tensor([[-200.0, -0.01]]), "mask": torch.ones(1, 2), "advantages": torch.ones(1)}
    loss, gradient = loss_of(name, batch)
    assert loss.value.isfinite() and gradient.isfinite().all() and gradient.any()


@pytest.mark.parametrize("name", OPTIONS)
def test_an_example_objective_trains(tiny_model, tmp_path, name):
    options = {"loss_type": f"objectives:{name}", "objective_kwargs": OPTIONS[name], "max_steps": 2, "beta": 0.1}
    trainer = make(tiny_model, tmp_path, use_bias_correction_kl=True, **options)
    before = parameters(trainer)
    trainer.train()
    first, last = rows(trainer)
    assert 0 <= first[f"{name.lower()}/dropped_tokens"] <= 1 and first["grad_norm"] > 0 and last["kl"] > 0
    assert any(not before[name].equal(value) for name, value in parameters(trainer).items())


def test_bounds_that_exclude_one_are_refused(tmp_path):
    config = config_of("IcePop", low=1.5)
    assert "low=1.5" in "".join(get_objective(config).problems(config))
