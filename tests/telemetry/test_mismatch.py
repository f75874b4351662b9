import math
from collections import ChainMap

import pytest
import torch

from trl_qarl.telemetry.mismatch import mismatch_metrics, mismatch_sums, weight_metrics


def naive(old, sampling, advantages, mask):
    """By loops over Python floats: mismatch of all tokens, and that of some by name with the share of error tokens."""
    found = {name: [] for name in ("", "/positive", "/negative", "/q1", "/q2", "/q3", "/q4")}
    errors = []
    for o_row, s_row, advantage, m_row in zip(
        old.tolist(), sampling.tolist(), advantages.tolist(), mask.tolist(), strict=True
    ):
        tokens = [(o, s) for o, s, m in zip(o_row, s_row, m_row, strict=True) if m]
        for rank, (o, s) in enumerate(tokens):
            if math.isnan(s):
                continue
            found[""].append(o - s)
            if advantage:
                found["/positive" if advantage > 0 else "/negative"].append(o - s)
            found[f"/q{4 * rank // len(tokens) + 1}"].append(o - s)
            errors.append(math.exp(o) < 1e-3 and math.exp(s) < 1e-3)
    whole, *splits = (
        {
            f"mismatch/abs_logp_mean{name}": sum(map(abs, d)) / len(d),
            f"mismatch/abs_logp_max{name}": max(map(abs, d)),
            f"mismatch/k1{name}": -sum(d) / len(d),
            f"mismatch/k3{name}": sum(math.exp(x) - 1 - x for x in d) / len(d),
        }
        for name, d in found.items()
    )
    return whole, dict(ChainMap(*splits, {"rollout/error_token_share": sum(errors) / len(errors)}))


@pytest.mark.parametrize("seed", range(5))
def test_mismatch_equals_a_naive_loop_over_processes(seed):
    torch.manual_seed(seed)
    old = -6 + 2 * torch.randn(8, 11).double()
    sampling = old + torch.randn(8, 11).double()
    mask = (torch.rand(8, 11) > 0.3).long()
    mask[1] = 0
    sampling[mask == 0] = float("nan")
    mask[2, 3], sampling[2, 3] = 1, float("nan")
    advantages = torch.randn(8)
    advantages[3] = 0
    whole, splits = naive(old, sampling, advantages, mask)
    whole["mismatch/unknown_tokens"] = 1
    assert 0 < splits["rollout/error_token_share"] < 1
    for of_advantages, expected in ((None, whole), (advantages, whole | splits)):
        for parts in ([slice(None)], [slice(0, 5), slice(5, 8)]):
            sums, counts, maxima = zip(
                *(
                    mismatch_sums(old[p], sampling[p], mask[p], None if of_advantages is None else advantages[p])
                    for p in parts
                ),
                strict=True,
            )
            metrics = mismatch_metrics(sum(sums), sum(counts), torch.stack(maxima).amax(0))
            assert metrics == pytest.approx(expected, rel=1e-12)


def test_no_known_token_gives_no_mismatch_rather_than_nan():
    nothing = torch.zeros(2, 3)
    for advantages in (None, torch.ones(2)):
        sums = mismatch_sums(nothing, nothing, nothing, advantages)
        assert mismatch_metrics(*sums) == {"mismatch/unknown_tokens": 0}


def test_split_without_a_token_is_left_out_and_only_that():
    old = torch.full((1, 8), -1.0)
    metrics = mismatch_metrics(*mismatch_sums(old, old - 0.5, torch.ones(1, 8), torch.ones(1)))
    assert metrics.pop("rollout/error_token_share") == metrics.pop("mismatch/unknown_tokens") == 0
    for kind, value in (("abs_logp_mean", 0.5), ("abs_logp_max", 0.5), ("k1", -0.5), ("k3", math.exp(0.5) - 1.5)):
        found = [metrics.pop(f"mismatch/{kind}{part}") for part in ("", "/positive", "/q1", "/q2", "/q3", "/q4")]
        assert found == [pytest.approx(value)] * 6
    assert metrics == {}
    # A log-prob that is not a number is not hidden.
    old[0, 0] = math.nan
    metrics = mismatch_metrics(*mismatch_sums(old, torch.full((1, 8), -1.0), torch.ones(1, 8), torch.ones(1)))
    assert math.isnan(metrics["mismatch/abs_logp_mean/positive"]) and math.isnan(metrics["mismatch/k3/q1"])


def test_weights_by_sign_of_the_advantage():
    weights, advantages = torch.tensor([1.0, 2.0, 0.5, 0.5, 1.5]), torch.tensor([1.0, 0.2, -1.0, -0.1, 0.0])
    metrics = weight_metrics(weights, advantages)
    whole = {
        "mismatch/weight_min": 0.5,
        "mismatch/weight_max": 2.0,
        "mismatch/weight_mean": 1.1,
        "mismatch/effective_sample_size": pytest.approx(5.5**2 / 7.75 / 5),
    }
    assert weight_metrics(weights) == whole
    assert metrics == whole | {
        "mismatch/weight_mean/positive": 1.5,
        "mismatch/effective_sample_size/positive": pytest.approx(9 / 5 / 2),
        "mismatch/weight_mean/negative": 0.5,
        "mismatch/effective_sample_size/negative": 1.0,
    }
    assert weight_metrics(weights, advantages.abs()).keys() - whole.keys() == {
        "mismatch/weight_mean/positive",
        "mismatch/effective_sample_size/positive",
    }
