import math

import pytest
import torch

from reference.tbpo_naive import naive_tbpo
from testing_utils import batches
from trl_qarl.forward import Batch
from trl_qarl.objectives.objective import reduce_metrics
from trl_qarl.objectives.tbpo import tbpo_loss


NAN, INF = math.nan, math.inf
# Table 2 of the paper.
BAND = {"positive_epsilon_high": 4e-4, "negative_epsilon_low": 3e-4, "negative_epsilon_high": 7e-4}
# Offsets and bounds that float64 represents exactly, for tables made by hand.
EXACT_BAND = {"positive_epsilon_high": 0.25, "negative_epsilon_low": 0.25, "negative_epsilon_high": 0.5}
SETTINGS = EXACT_BAND | {"mismatch_cap": 1.2}
DROPPED = ["positive high", "negative low", "negative high"]
REGIONS = {*DROPPED, "positive inside", "negative inside", "zero advantage", "empty"}


def make_batch(seed, num_sequences=None, num_tokens=None):
    """A batch of a random shape, in some of which nothing counts, with a token to which the engine gives no chance."""
    shape = torch.randint(1, 13, (2,), generator=torch.Generator().manual_seed(seed)).tolist()
    whole = batches.make_batch(seed, num_sequences or 12, num_tokens or shape[1])
    batch = {name: tensor[: num_sequences or shape[0]] for name, tensor in whole.items()}
    batch["sampling"][-1, -1] = -INF
    batch["mask"] *= seed % 10 != 4
    return batch


def loss_of(batch, **settings):
    given = Batch(*(batch[name] for name in ("old", "sampling", "advantages", "mask", "logps")))
    return tbpo_loss(given, **(SETTINGS | settings))


def loss_and_gradient(batch, **settings):
    """Value, gradient, and metrics of each sequence."""
    logps = batch["logps"].clone().requires_grad_()
    loss = loss_of(batch | {"logps": logps}, **settings)
    loss.value.backward()
    return loss.value.detach(), logps.grad, loss.metrics


def clamp_without_gradient_at_bounds(tensor, min=None, max=None):
    """`clamp` as of torch 2.14."""
    is_inside = torch.ones_like(tensor, dtype=torch.bool)
    bounded = tensor.detach()
    if min is not None:
        is_inside, bounded = is_inside & (tensor > min), bounded.maximum(bounded.new_tensor(min))
    if max is not None:
        is_inside, bounded = is_inside & (tensor < max), bounded.minimum(bounded.new_tensor(max))
    return torch.where(is_inside, tensor, bounded)


def assert_same(ours, theirs):
    """Compare value, gradient and metrics, exactly."""
    for left, right in zip(ours[:2], theirs[:2], strict=True):
        assert torch.equal(left, right)
    for name, values in theirs[2].items():
        assert torch.equal(ours[2][name].nan_to_num(-1.0), values.nan_to_num(-1.0)), name


def assert_close(actual, expected):
    # float64 against float64: the two differ by the order of summation, of terms up to 10 in size
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14, equal_nan=True)


def shares_of(regions, *dropped):
    """1 where the region is one of `dropped`, 0 elsewhere on the same side, and NaN on the other and between."""
    sides = {region.split()[0] for region in dropped}
    return [float(region in dropped) if region.split()[0] in sides else NAN for region in regions]


@pytest.mark.parametrize("settings", [{}, {"mismatch_cap": 1.0}, {"mismatch_cap": 8.0}, BAND], ids=str)
def test_value_gradient_and_metrics_equal_loops_over_random_shapes(settings):
    seen = set()
    for seed in range(20 if settings else 300):
        batch = make_batch(seed)
        loss, gradient, metrics = loss_and_gradient(batch, **settings)
        tensors = (tensor.tolist() for tensor in batch.values())
        naive_loss, naive_gradient, ratios, regions = naive_tbpo(*tensors, **(SETTINGS | settings))

        assert_close(loss, naive_loss)
        assert_close(gradient, naive_gradient)
        for kind in ("mean", "min", "max"):
            assert_close(metrics[f"tbpo/ratio/{kind}"], ratios)
        for names in (*([name] for name in DROPPED), DROPPED):
            name = names[0].replace(" ", "_") if len(names) == 1 else "total"
            assert_close(metrics[f"tbpo/dropped/{name}"], shares_of(regions, *names))
        seen.update(regions)
    assert settings or seen == REGIONS


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_fresh_batch_has_its_gradient_with_bands_of_zero(monkeypatch, advantage):
    """Also where `clamp` has no gradient at its bounds, as since torch 2.14."""
    monkeypatch.setattr(torch.Tensor, "clamp", clamp_without_gradient_at_bounds)
    logps = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    batch = {"logps": logps, "old": logps, "sampling": logps, "mask": torch.ones(1, 2)}
    batch["advantages"] = torch.tensor([advantage], dtype=torch.float64)
    loss, gradient, metrics = loss_and_gradient(batch, **dict.fromkeys(EXACT_BAND, 0.0))
    assert loss.item() == -advantage and gradient.tolist() == [[-advantage / 2] * 2]
    assert metrics["tbpo/dropped/total"].tolist() == [0.0]


def test_no_gradient_flows_into_old_or_sampling_logps():
    batch = {name: tensor.clone() for name, tensor in make_batch(3, 8, 6).items()}
    for name in ("logps", "old", "sampling"):
        batch[name].requires_grad_()
    loss = loss_of(batch)
    loss.value.backward()
    assert batch["logps"].grad.abs().sum() > 0
    assert batch["old"].grad is None and batch["sampling"].grad is None
    assert not any(tensor.requires_grad for tensor in loss.metrics.values())


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_masked_positions_may_hold_anything(garbage):
    for seed in range(20):
        batch = make_batch(seed)
        clean = loss_and_gradient(batch)
        for name in ("logps", "old", "sampling"):
            batch[name] = batch[name].masked_fill(batch["mask"] == 0, garbage)
        assert_same(loss_and_gradient(batch), clean)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_nan_of_the_learner_is_not_hidden(advantage):
    batch = make_batch(0, num_sequences=4, num_tokens=4) | {"mask": torch.ones(4, 4)}
    batch["logps"][0, 0], batch["advantages"][0] = NAN, advantage
    assert loss_and_gradient(batch)[0].isnan()


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [500.0, INF])
def test_an_overflowing_ratio_gives_no_gradient(advantage, log_ratio):
    batch = {
        "logps": torch.zeros(1, 1),
        "old": torch.full((1, 1), -log_ratio),
        "sampling": torch.zeros(1, 1),
        "advantages": torch.tensor([advantage]),
        "mask": torch.ones(1, 1),
    }
    loss, gradient, metrics = loss_and_gradient(batch, mismatch_cap=1.0)
    assert loss.item() == {1.0: -1.25, -1.0: 1.5, 0.0: 0.0}[advantage]
    assert gradient.item() == 0.0 and metrics["tbpo/ratio/max"].isfinite().all()


def test_bfloat16_logps_are_averaged_in_float32():
    batch = make_batch(1, num_sequences=32, num_tokens=64)
    names = ("logps", "old", "sampling")
    batch["logps"] = batch["old"] + 0.05 * torch.sin(torch.arange(64.0))
    batch |= {name: batch[name].bfloat16() for name in names}
    batch["advantages"] = batch["advantages"].float()
    loss, gradient, metrics = loss_and_gradient(batch, positive_epsilon_high=0.1)
    assert {loss.dtype, *(values.dtype for values in metrics.values())} == {torch.float32}
    assert gradient.dtype == torch.bfloat16 and gradient.any()
    widened = batch | {name: batch[name].float() for name in names}
    expected_loss, expected, expected_metrics = loss_and_gradient(widened, positive_epsilon_high=0.1)
    assert_same((loss, gradient, metrics), (expected_loss, expected.bfloat16(), expected_metrics))


def test_mask_dtype_does_not_matter():
    batch = make_batch(5, num_sequences=8, num_tokens=6)
    expected = loss_and_gradient(batch)
    for dtype in (torch.bool, torch.int32, torch.float32, torch.bfloat16):
        assert_same(loss_and_gradient(batch | {"mask": batch["mask"].to(dtype)}), expected)


def test_advantages_that_would_broadcast_raise():
    batch = make_batch(0, num_sequences=4, num_tokens=5)
    batch["advantages"] = batch["advantages"].unsqueeze(1)
    with pytest.raises(ValueError, match=r"advantages must have shape \(4,\), got \(4, 1\)"):
        loss_and_gradient(batch)


def test_shares_and_ratios_equal_counts_by_hand():
    log_ratios = [0.0, 1.0, 1.0, -1.0, 1.0, 0.0, 0.1, 1.0, 3.0]
    advantages = torch.tensor([1.0, 1.0, 2.0, -1.0, -1.0, -1.0, -1.0, 0.0, 1.0], dtype=torch.float64)
    mask = torch.ones(9, 1)
    mask[8] = 0  # an empty completion counts nowhere, whatever its padding holds
    logps = torch.tensor(log_ratios, dtype=torch.float64).unsqueeze(1)
    old = torch.zeros_like(logps)
    batch = {"logps": logps, "old": old, "sampling": old, "advantages": advantages, "mask": mask}
    metrics = reduce_metrics(loss_of(batch).metrics | {"of none": torch.tensor([NAN])})
    ratios = [math.exp(x) for x in log_ratios[:8]]
    assert metrics == pytest.approx(
        {
            "tbpo/ratio/mean": sum(ratios) / 8,
            "tbpo/ratio/min": min(ratios),
            "tbpo/ratio/max": max(ratios),
            "tbpo/dropped/positive_high": 2 / 3,
            "tbpo/dropped/negative_low": 1 / 4,
            "tbpo/dropped/negative_high": 1 / 4,
            "tbpo/dropped/total": 4 / 7,
        },
        rel=1e-14,
    )
