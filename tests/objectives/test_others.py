import math

import pytest
import torch

from trl_qarl.forward import Batch
from trl_qarl.objectives.others import MAX_RATIO, acr_loss, dppo_tv_loss


def test_ratio_to_the_sampler_that_weighs_a_token_of_dppo_is_bounded():
    logps = torch.tensor([[-5.0]], requires_grad=True)
    batch = Batch(torch.tensor([[-5.0]]), torch.tensor([[-12.0]]), torch.ones(1), torch.ones(1, 1), logps)
    loss, dropped = dppo_tv_loss(batch, 0.2)
    loss.backward()
    assert not dropped.any() and logps.grad.item() == pytest.approx(-MAX_RATIO)


def test_acr_widens_the_upper_clip_only_where_the_weight_was_truncated():
    old = torch.zeros(1, 2)
    sampling = torch.tensor([[-math.log(4.0), -math.log(1.5)]])
    logps = torch.full((1, 2), math.log(1.8)).requires_grad_()
    batch = Batch(old, sampling, torch.ones(1), torch.ones(1, 2), logps)
    loss, dropped = acr_loss(batch, 0.2, 0.2, 2.0)
    loss.backward()
    # 1.8 is below 1.2 * 4 / 2 and above 1.2.
    assert dropped.tolist() == [[False, True]] and logps.grad[0, 0] < 0 and logps.grad[0, 1] == 0
