"""
Random sampling of vLLM on a CPU with two random numbers per token instead of one per entry of the vocabulary.

vLLM 0.31 divides each probability by exponential noise and takes the largest quotient (`random_sample` in
`vllm/v1/sample/ops/topk_topp_sampler.py`); 0.32 has a kernel. With 64 sequences and a vocabulary of 152,000 this
draws ten million numbers per step. Here a block of the vocabulary is drawn by its summed probability, and then a token
within the block, each by inverting its cumulative distribution. The distribution of tokens is the same; the tokens of
a seed are not.
"""

import torch


_BLOCK = 128


def register_sampling() -> None:
    """Replace vLLM's function for random requests without a seed of their own, in this process; calling it again
    changes nothing."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.compiled_random_sample = random_sample


def random_sample(logits: torch.Tensor) -> torch.Tensor:
    """Draw a token id per row, `(B,)` int64, from the softmax of `logits`, `(B, V)` float32 after temperature and
    filters, `-inf` for what must not be drawn, with torch's default generator."""
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    if missing := -probs.shape[-1] % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, missing))
    blocks = probs.unflatten(-1, (-1, _BLOCK))
    block = _draw(blocks.sum(-1))
    return block * _BLOCK + _draw(blocks[torch.arange(len(blocks)), block])


def _draw(weights: torch.Tensor) -> torch.Tensor:
    ends = weights.double().cumsum(-1)
    # Below the last end also after rounding, so that an entry of weight 0 is never drawn.
    point = torch.rand(len(weights), 1, dtype=torch.float64) * ends[:, -1:]
    # No end is above a point that is NaN.
    return torch.searchsorted(ends, point, right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)
