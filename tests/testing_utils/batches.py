"""Batches of completions for tests of what weighs and clips them."""

import math

import torch


def make_batch(seed, num_sequences=24, num_tokens=7):
    """Float64, with ratios on both sides of every bound, empty completions, advantages of 0 and unknown log-probs."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -4 + randn(num_sequences, num_tokens)
    sampling = old + 0.4 * randn(num_sequences, num_tokens)
    sampling[0, 0] = math.nan
    mask = (torch.rand(num_sequences, num_tokens, generator=generator) > 0.2).long()
    mask[1] = 0
    advantages = randn(num_sequences)
    advantages[2] = 0
    logps = old + 0.8 * randn(num_sequences, num_tokens)
    return {"logps": logps, "old": old, "sampling": sampling, "advantages": advantages, "mask": mask}
