import math

import pytest
import torch

from reference.tbpo_naive import naive_tbpo
from testing_utils import batches
from trl_qarl.objectives.objective import reduce_metrics
from trl_qarl.objectives.tbpo import tbpo_loss, tbpo_metrics, trust_band_clip


NAN, INF = math.nan, math.inf
# Table 2 of the paper.
BAND = {"positive_epsilon_high": 4e-4, "negative_epsilon_low": 3e-4, "negative_epsilon_high": 7e-4}
# Offsets and bounds that float64 represents exactly, for tables made by hand.
EXACT_BAND = {"positive_epsilon_high": 0.25, "negative_epsilon_low": 0.25, "negative_epsilon_high": 0.5}
SETTINGS = EXACT_BAND | {"mismatch_cap": 1.2}
REGIONS = {
    "positive inside",
    "positive high",
    "negative low",
    "negative inside",
    "negative high",
    "zero advantage",
    "empty",
}


def make_batch(seed, num_sequences=None, num_tokens=None):
    """A batch of a random shape, in some of which nothing counts, with a token to which the engine gives no chance."""
    shape = torch.randint(1, 13, (2,), generator=torch.Generator().manual_seed(seed)).tolist()
    whole = batches.make_batch(seed, num_sequences or 12, num_tokens or shape[1])
    batch = {name: tensor[: num_sequences or shape[0]] for name, tensor in whole.items()}
    batch["sampling"][-1, -1] = -INF
    batch["mask"] *= seed % 10 != 4
    return batch


def loss_and_gradient(batch, **settings):
    logps = batch["logps"].clone().requires_grad_()
    loss, output = tbpo_loss(logps, *[*batch.values()][1:], **(SETTINGS | settings))
    loss.backward()
    return loss.detach(), logps.grad, output


def clamp_without_gradient_at_bounds(tensor, min=None, max=None):
    """`clamp` as of torch 2.14."""
    is_inside = torch.ones_like(tensor, dtype=torch.bool)
    bounded = tensor.detach()
    if min is not None:
        is_inside, bounded = is_inside & (tensor > min), bounded.maximum(bounded.new_tensor(min))
    if max is not None:
        is_inside, bounded = is_inside & (tensor < max), bounded.minimum(bounded.new_tensor(max))
    return torch.where(is_inside, tensor, bounded)


def naive_from_tensors(batch, **settings):
    return naive_tbpo(
        *(None if tensor is None else tensor.tolist() for tensor in batch.values()), **(SETTINGS | settings)
    )


def assert_close(actual, expected):
    # float64 against float64: the two differ by the order of summation, of terms up to 10 in size
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("with_sampling", [True, False])
@pytest.mark.parametrize("settings", [{}, {"mismatch_cap": 1.0}, {"mismatch_cap": 8.0}, BAND], ids=str)
def test_value_gradient_and_flags_equal_loops_over_random_shapes(with_sampling, settings):
    seen = set()
    for seed in range(20 if settings else 300):
        batch = make_batch(seed)
        if not with_sampling:
            batch["sampling"] = None
        loss, gradient, output = loss_and_gradient(batch, **settings)
        naive_loss, naive_gradient, sequences = naive_from_tensors(batch, **settings)

        assert_close(loss, naive_loss)
        assert_close(gradient, naive_gradient)
        assert_close(output.ratio, [s["ratio"] for s in sequences])
        assert_close(output.mismatch_weight, [s["weight"] for s in sequences])
        regions = [s["region"] for s in sequences]
        assert output.dropped_positive_high.tolist() == [r == "positive high" for r in regions]
        assert output.dropped_negative_low.tolist() == [r == "negative low" for r in regions]
        assert output.dropped_negative_high.tolist() == [r == "negative high" for r in regions]
        assert output.is_empty.tolist() == [r == "empty" for r in regions]
        seen.update(regions)
    assert settings or seen == REGIONS


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_fresh_batch_has_its_gradient_with_bands_of_zero(monkeypatch, advantage):
    """Also where `clamp` has no gradient at its bounds, as since torch 2.14."""
    monkeypatch.setattr(torch.Tensor, "clamp", clamp_without_gradient_at_bounds)
    logps = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    bands = dict.fromkeys(EXACT_BAND, 0.0)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    old = logps.detach()
    loss, output = tbpo_loss(logps, old, old, advantages, torch.ones(1, 2), **bands, mismatch_cap=2.0)
    loss.backward()
    assert loss.item() == -advantage and logps.grad.tolist() == [[-advantage / 2] * 2]
    assert not output.dropped_positive_high.any() and not output.dropped_negative_high.any()


def test_a_ratio_of_nan_is_not_hidden():
    ratio, advantages = torch.tensor([NAN, NAN]), torch.tensor([1.0, -1.0])
    assert trust_band_clip(ratio, advantages, **EXACT_BAND).isnan().all()


def test_no_gradient_flows_into_old_or_sampling_logps():
    batch = {name: tensor.clone() for name, tensor in make_batch(3, 8, 6).items()}
    for name in ("logps", "old", "sampling"):
        batch[name].requires_grad_()
    loss, output = tbpo_loss(*batch.values(), **SETTINGS)
    loss.backward()
    assert batch["logps"].grad.abs().sum() > 0
    assert batch["old"].grad is None and batch["sampling"].grad is None
    assert not any(tensor.requires_grad for tensor in output)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_masked_positions_may_hold_anything(garbage):
    for seed in range(20):
        batch = make_batch(seed)
        clean_loss, clean_gradient, clean_output = loss_and_gradient(batch)
        for name in ("logps", "old", "sampling"):
            batch[name] = batch[name].masked_fill(batch["mask"] == 0, garbage)
        loss, gradient, output = loss_and_gradient(batch)
        assert torch.equal(loss, clean_loss)
        assert torch.equal(gradient, clean_gradient)
        assert all(torch.equal(a, b) for a, b in zip(output, clean_output, strict=True))


def test_nan_of_the_learner_is_not_hidden():
    batch = make_batch(0, num_sequences=4, num_tokens=4)
    batch["mask"] = torch.ones(4, 4)
    batch["logps"][0, 0] = NAN
    assert loss_and_gradient(batch)[0].isnan()


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [500.0, INF])
def test_an_overflowing_ratio_gives_no_gradient(advantage, log_ratio):
    batch = {
        "logps": torch.zeros(1, 1),
        "old": torch.full((1, 1), -log_ratio),
        "sampling": None,
        "advantages": torch.tensor([advantage]),
        "mask": torch.ones(1, 1),
    }
    loss, gradient, output = loss_and_gradient(batch, **EXACT_BAND)
    assert loss.item() == {1.0: -1.25, -1.0: 1.5, 0.0: 0.0}[advantage]
    assert gradient.item() == 0.0
    assert output.ratio.isfinite().all()


def test_bfloat16_logps_are_averaged_in_float32():
    batch = make_batch(1, num_sequences=32, num_tokens=64)
    names = ("logps", "old", "sampling")
    batch["logps"] = batch["old"] + 0.05 * torch.sin(torch.arange(64.0))
    batch |= {name: batch[name].bfloat16() for name in names}
    batch["advantages"] = batch["advantages"].float()
    loss, gradient, output = loss_and_gradient(batch, positive_epsilon_high=0.1)
    assert loss.dtype == output.ratio.dtype == output.mismatch_weight.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16 and gradient.any()
    widened = batch | {name: batch[name].float() for name in names}
    expected_loss, expected_gradient, expected_output = loss_and_gradient(widened, positive_epsilon_high=0.1)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(gradient, expected_gradient.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(output, expected_output, strict=True))


def test_mask_dtype_does_not_matter():
    batch = make_batch(5, num_sequences=8, num_tokens=6)
    expected = loss_and_gradient(batch)
    for dtype in (torch.bool, torch.int32, torch.float32, torch.bfloat16):
        loss, gradient, _ = loss_and_gradient(batch | {"mask": batch["mask"].to(dtype)})
        assert torch.equal(loss, expected[0]) and torch.equal(gradient, expected[1])


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
    _, output = tbpo_loss(logps, torch.zeros_like(logps), None, advantages, mask, **EXACT_BAND, mismatch_cap=2.0)
    metrics = reduce_metrics(tbpo_metrics(output, advantages))
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


def test_reduction_does_not_depend_on_the_split_over_processes():
    batch = make_batch(7, num_sequences=64, num_tokens=6)
    _, _, output = loss_and_gradient(batch)
    whole = tbpo_metrics(output, batch["advantages"])
    parts = []
    for part in torch.arange(64).split(16):
        _, _, output = loss_and_gradient({name: tensor[part] for name, tensor in batch.items()})
        parts.append(tbpo_metrics(output, batch["advantages"][part]))
    gathered = {name: torch.cat([part[name] for part in parts]) for name in whole}
    assert reduce_metrics(gathered) == reduce_metrics(whole)


def test_metric_without_a_sequence_that_counts_is_left_out():
    batch = make_batch(0, num_sequences=3, num_tokens=4)
    batch["advantages"] = torch.ones(3, dtype=torch.float64)
    batch["mask"] = torch.ones(3, 4)
    metrics = tbpo_metrics(loss_and_gradient(batch)[2], batch["advantages"])
    assert metrics.keys() - reduce_metrics(metrics).keys() == {
        "tbpo/dropped/negative_low",
        "tbpo/dropped/negative_high",
    }
