import math
from types import SimpleNamespace

import pytest
import torch

from reference.objectives_naive import naive_binary_kl, naive_mismatch_ratio
from testing_utils.batches import make_batch
from trl_qarl.objectives.ratios import binary_kl, mismatch_ratio
from trl_qarl.objectives.registry import find_objective


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
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_mismatch_ratio_equals_a_naive_loop_and_has_no_gradient(mode, bounds):
    batch = make_batch(3)
    # What padding holds does not matter.
    old = batch["old"].masked_fill(batch["mask"] == 0, math.inf).requires_grad_()
    ratio = mismatch_ratio(old, batch["sampling"], batch["mask"], mode, *bounds)
    assert not ratio.requires_grad
    naive = naive_mismatch_ratio(*(batch[n].tolist() for n in ("old", "sampling", "mask")), mode, *bounds)
    torch.testing.assert_close(ratio, torch.tensor(naive, dtype=torch.float64), rtol=1e-13, atol=0)
    assert ratio.shape == (24, 1 if mode.startswith("sequence") else 7)
    assert bounds == (None, None) or ratio.min() < 1 < ratio.max()


def test_unknown_mode_raises():
    batch = make_batch(0)
    with pytest.raises(ValueError, match="'word_mask'"):
        mismatch_ratio(batch["old"], batch["sampling"], batch["mask"], "word_mask", None, 2.0)


def test_advantages_stay_as_they_are_without_weights():
    advantages = torch.tensor([1.0, -2.0, 0.0])

    def weighed(objective, **ratio):
        config = SimpleNamespace(use_vllm=False)
        return find_objective(objective).for_trl(config, {"advantages": advantages} | ratio)["advantages"]

    assert weighed("grpo-tis") is advantages
    assert weighed("positive-only").tolist() == [1.0, 0.0, 0.0]
    ratio = torch.full((3, 2), 0.5)
    assert weighed("grpo-tis", importance_sampling_ratio=ratio).tolist() == [[0.5, 0.5], [-1.0, -1.0], [0.0, 0.0]]
