import math

import pytest
import torch

from trl_qarl.telemetry.probe import compare_positions, likeliest, probe_metrics


def random_log_probs(seed, shape=(6, 50)):
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(3 * torch.randn(*shape, generator=generator), dim=-1)


def measure(p, q, k):
    """Measures two parts, as for two sequences."""
    return probe_metrics([compare_positions(*p[part].topk(k), q[part]) for part in (slice(2), slice(2, None))])


def naive_kl(p, q):
    """Mean over positions of `KL(p || q)` over the whole vocabulary, term by term in float64."""
    rows = zip(p.double().tolist(), q.double().tolist(), strict=True)
    return sum(sum(math.exp(a) * (a - b) for a, b in zip(x, y, strict=True)) for x, y in rows) / len(p)


@pytest.mark.parametrize("seed", range(5))
def test_divergence_over_all_tokens_is_the_naive_one(seed):
    p, q = random_log_probs(seed), random_log_probs(seed + 100)
    metrics = measure(p, q, 50)
    assert metrics["mismatch/probe_kl"] == pytest.approx(naive_kl(p, q), rel=1e-5)
    same = sum(a.argmax() == b.argmax() for a, b in zip(p, q, strict=True)) / len(p)
    assert metrics["mismatch/probe_top1_agreement"] == pytest.approx(float(same))


def test_divergence_of_the_likeliest_is_a_bound_that_rises_with_their_number():
    p, q = random_log_probs(1), random_log_probs(2)
    values = [measure(p, q, k)["mismatch/probe_kl"] for k in (1, 5, 20, 50)]
    assert 0 < values[0] < values[1] < values[2] < values[3]


def test_a_distribution_on_few_tokens_has_no_rest():
    """Rounding must not turn a rest of the vocabulary without probability into a divergence."""
    p = torch.log_softmax(torch.tensor([[50.0, 49.0] + [-50.0] * 40]), -1)
    metrics = probe_metrics([compare_positions(*p.topk(2), p)])
    assert metrics["mismatch/probe_kl"] == pytest.approx(0, abs=1e-6)


def test_likeliest_of_an_engines_answer_are_ranked_and_cut():
    # The token that stands at a position comes first, wherever it ranks.
    logps, ids = likeliest([{7: -4.0, 3: -0.1, 5: -2.5}, {1: -0.2, 2: -1.0}], k=2)
    assert ids.tolist() == [[3, 5], [1, 2]]
    torch.testing.assert_close(logps, torch.tensor([[-0.1, -2.5], [-0.2, -1.0]]))
