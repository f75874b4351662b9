import math

import pytest
import torch

from reference.objectives_naive import naive_binary_kl, naive_mismatch_ratio
from testing_utils.batches import make_batch
from trl_qarl.objectives.ratios import binary_kl, mismatch_ratio, weigh_advantages
from trl_qarl.objectives.token_losses import MAX_RATIO, acr_loss, dppo_tv_loss


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def test_binary_kl_equals_a_naive_formula_and_stays_finite_at_certainty():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 200, generator=generator, dtype=torch.float64)
    naive = [naive_binary_kl(*pair) for pair in zip(p.tolist(), q.tolist(), strict=True)]
    torch.testing.assert_close(
        binary_kl(p.log(), q.log()), torch.tensor(naive, dtype=torch.float64), rtol=1e-9, atol=1e-15
    )
    ends = torch.tensor([0.0, -1e4, -math.inf])
    assert binary_kl(ends[:, None], ends[None]).isfinite().all()


@pytest.mark.parametrize("bounds", [(None, 2.0), (0.5, None), (0.5, 2.0), (None, None)])
@pytest.mark.parametrize("mode", MODES)
def test_mismatch_ratio_equals_a_naive_loop(mode, bounds):
    batch = make_batch(3)
    ratio = mismatch_ratio(batch["old"], batch["sampling"], batch["mask"], mode, *bounds)
    naive = naive_mismatch_ratio(*(batch[n].tolist() for n in ("old", "sampling", "mask")), mode, *bounds)
    torch.testing.assert_close(ratio, torch.tensor(naive, dtype=torch.float64), rtol=1e-13, atol=0)
    assert ratio.shape == (24, 1 if mode.startswith("sequence") else 7)
    assert bounds == (None, None) or ratio.min() < 1 < ratio.max()


@pytest.mark.parametrize("mode", MODES)
def test_mismatch_ratio_ignores_what_padding_holds_and_has_no_gradient(mode):
    batch = make_batch(4)
    old = batch["old"].clone().requires_grad_()
    expected = mismatch_ratio(old, batch["sampling"], batch["mask"], mode, None, 2.0)
    assert not expected.requires_grad
    padding = batch["mask"] == 0
    spoiled, sampling = old.detach().clone(), batch["sampling"].clone()
    spoiled[padding], sampling[padding] = math.inf, math.nan
    assert torch.equal(mismatch_ratio(spoiled, sampling, batch["mask"], mode, None, 2.0), expected)


def test_unknown_mode_raises():
    batch = make_batch(0)
    with pytest.raises(ValueError, match="'word_mask'"):
        mismatch_ratio(batch["old"], batch["sampling"], batch["mask"], "word_mask", None, 2.0)


def test_advantages_stay_as_they_are_without_weights():
    advantages = torch.tensor([1.0, -2.0, 0.0])
    assert weigh_advantages(advantages, None) is advantages
    assert weigh_advantages(advantages, None, is_positive_only=True).tolist() == [1.0, 0.0, 0.0]
    assert weigh_advantages(advantages, torch.full((3, 2), 0.5)).tolist() == [[0.5, 0.5], [-1.0, -1.0], [0.0, 0.0]]


def test_ratio_to_the_sampler_that_weighs_a_token_of_dppo_is_bounded():
    logps = torch.tensor([[-5.0]], requires_grad=True)
    loss, dropped = dppo_tv_loss(logps, torch.tensor([[-12.0]]), torch.ones(1), torch.ones(1, 1), 0.2)
    loss.backward()
    assert not dropped.any() and logps.grad.item() == pytest.approx(-MAX_RATIO)


def test_acr_widens_the_upper_clip_only_where_the_weight_was_truncated():
    old = torch.zeros(1, 2)
    sampling = torch.tensor([[-math.log(4.0), -math.log(1.5)]])
    logps = torch.full((1, 2), math.log(1.8)).requires_grad_()
    loss, dropped = acr_loss(logps, old, sampling, torch.ones(1), torch.ones(1, 2), 0.2, 0.2, 2.0)
    loss.backward()
    # 1.8 is below 1.2 * 4 / 2 and above 1.2.
    assert dropped.tolist() == [[False, True]] and logps.grad[0, 0] < 0 and logps.grad[0, 1] == 0
