"""Random sampling of an engine on a CPU."""

import inspect

import pytest
import torch

from trl_qarl.vllm_plugin.cpu_sampling import random_sample, register_sampling


@pytest.mark.parametrize("size", [5, 128, 300, 1000], ids="V={}".format)
def test_tokens_are_drawn_by_their_probability(size):
    torch.manual_seed(0)
    logits = torch.randn(size) * 2
    num_draws = 200_000
    counts = sum(torch.bincount(random_sample(logits.repeat(10_000, 1)), minlength=size) for _ in range(20))
    expected = num_draws * logits.double().softmax(-1)
    # Twelve standard deviations of chi-square.
    assert ((counts - expected) ** 2 / expected).sum() < size + 12 * (2 * size) ** 0.5


def test_a_token_without_probability_is_never_drawn():
    torch.manual_seed(0)
    logits = torch.full((100_000, 300), -torch.inf)
    logits[:, [3, 255]] = torch.tensor([0.0, -8.0])
    assert set(random_sample(logits).tolist()) == {3, 255}
    logits[:, 255] = -torch.inf
    assert set(random_sample(logits).tolist()) == {3}


def test_rows_are_drawn_independently():
    torch.manual_seed(0)
    logits = torch.zeros(50_000, 2, 256)
    left, right = random_sample(logits.flatten(0, 1)).view(-1, 2).double().unbind(-1)
    assert torch.corrcoef(torch.stack([left, right]))[0, 1].abs() < 0.02


def test_logits_that_are_nan_give_a_token_of_the_vocabulary():
    assert random_sample(torch.full((2, 256), torch.nan)).max() < 256


@pytest.mark.vllm
def test_vllm_samples_by_it_what_has_no_seed(monkeypatch):
    ops = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    if "fused_gumbel_argmax" in inspect.getsource(ops):
        pytest.skip("vLLM 0.32 has a kernel that draws")
    monkeypatch.setattr(ops, "compiled_random_sample", ops.compiled_random_sample)
    register_sampling()

    def exponential(*_, **__):
        raise AssertionError("drew one number per entry of the vocabulary")

    monkeypatch.setattr(torch.Tensor, "exponential_", exponential)
    sampler = ops.TopKTopPSampler("processed_logprobs")
    logits = torch.randn(4, 300)
    best = logits.argmax(-1)
    tokens, logps = sampler.forward_cpu(logits, {}, torch.ones(4, dtype=torch.int32), None)
    assert tokens.equal(best) and logps[0].isinf().sum() == 299
    with pytest.raises(AssertionError, match="drew"):
        sampler.forward_cpu(torch.randn(4, 300), {0: torch.Generator()}, None, None)
