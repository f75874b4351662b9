"""
Three losses of other papers, as objectives of your own. Start the training in the folder of this file:

    trl-qarl train --config recipe.yaml --loss_type objectives:IcePop --objective_kwargs '{"high": 3}'

or copy the file next to your script and write `QaRLConfig(loss_type="objectives:IcePop")`.

A token has the ratio `r = pi_learner(theta) / pi_learner(theta_old)` and the mismatch
`w = pi_learner(theta_old) / pi_sampler(theta_old)`. Terms are averaged over the tokens of a completion, then over
completions. Tensors have the shape `(B, T)`.
"""

import math
from dataclasses import dataclass

import torch

from trl_qarl.objectives.objective import Loss, Objective


def clip_bounds(config):
    """Return the logarithms of TRL's clip bounds of a ratio, from `epsilon` and `epsilon_high`."""
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    return math.log1p(-config.epsilon), math.log1p(high)


def clipped(log_ratio, advantages, low, high):
    """Return the ratio, constant at its bound where a clipped loss has no gradient, and a mask of these tokens."""
    is_above, is_below = (advantages > 0) & (log_ratio > high), (advantages < 0) & (log_ratio < low)
    bounded = torch.where(is_above, high, torch.where(is_below, low, log_ratio))
    return bounded.exp(), is_above | is_below


def token_mean(terms, mask):
    """Return the mean over tokens of each completion, `(B,)`."""
    return (terms * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def log_ratios(batch):
    """Return `log r`, `log w` and the mask; `log w` is 0 where the sampler's log-prob is unknown."""
    mask = batch.mask.bool()
    is_known = mask & ~batch.sampling_per_token_logps.isnan()
    log_ratio = torch.where(mask, batch.per_token_logps, 0.0) - torch.where(mask, batch.old_per_token_logps, 0.0)
    log_weight = torch.where(is_known, batch.old_per_token_logps - batch.sampling_per_token_logps, 0.0)
    return log_ratio, log_weight, mask


@dataclass
class IcePop(Objective):
    """`1[low <= w <= high] w min(r A, clip(r) A)`, https://huggingface.co/papers/2510.18855"""

    low: float = 0.5
    high: float = 5.0

    def problems(self, config):
        if not 0 < self.low < 1 < self.high:
            yield f"IcePop has low={self.low!r} and high={self.high!r}: they must be bounds of a ratio around 1."

    def loss(self, config, batch):
        log_ratio, log_weight, mask = log_ratios(batch)
        advantages = batch.advantages.unsqueeze(1)
        is_kept = (log_weight >= math.log(self.low)) & (log_weight <= math.log(self.high))
        # A weight that is dropped may be infinite, and `0 * inf` is NaN.
        weight = torch.where(is_kept, log_weight, -math.inf).exp()
        ratio, _ = clipped(log_ratio, advantages, *clip_bounds(config))
        dropped = token_mean(~is_kept, mask)
        return Loss(-token_mean(weight * ratio * advantages, mask).mean(), {"icepop/dropped_tokens": dropped})


@dataclass
class ACR(Objective):
    """
    `min(w, cap) min(r A, clip(r, 1 - e, (1 + e_high) max(1, w / cap)) A)`, https://huggingface.co/papers/2602.13953:
    the upper clip is wider by the factor by which the mismatch was truncated.
    """

    cap: float = 3.0

    def loss(self, config, batch):
        log_ratio, log_weight, mask = log_ratios(batch)
        advantages, (low, high) = batch.advantages.unsqueeze(1), clip_bounds(config)
        widening = (log_weight - math.log(self.cap)).clamp(min=0)
        ratio, is_clipped = clipped(log_ratio, advantages, low, high + widening)
        weight = log_weight.clamp(max=math.log(self.cap)).exp()
        dropped = token_mean(is_clipped, mask)
        return Loss(-token_mean(weight * ratio * advantages, mask).mean(), {"acr/dropped_tokens": dropped})


@dataclass
class DPPO(Objective):
    """
    `1[sign(A) (p - p_s) <= threshold] min(p / p_s, 20) A log p`, https://huggingface.co/papers/2602.04879, with the
    probabilities `p` and `p_s` of a token under learner and sampler. The ratio is a constant for the gradient.
    """

    threshold: float = 0.2

    def loss(self, config, batch):
        mask, advantages = batch.mask.bool(), batch.advantages.unsqueeze(1)
        is_known = mask & ~batch.sampling_per_token_logps.isnan()
        now = torch.where(is_known, batch.per_token_logps, 0.0)
        sampling = torch.where(is_known, batch.sampling_per_token_logps, 0.0)
        moved = (now.exp() - sampling.exp()).detach() * advantages.sign()
        is_kept = is_known & (moved <= self.threshold)
        ratio = (now - sampling).detach().clamp(max=math.log(20)).exp()
        terms = torch.where(is_kept, ratio * advantages * now, 0.0)
        return Loss(-token_mean(terms, mask).mean(), {"dppo/dropped_tokens": token_mean(~is_kept, mask)})
