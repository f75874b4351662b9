"""GRPO with truncated importance sampling (TIS) token by token, which TRL has only for rollouts by vLLM."""

import math
from dataclasses import dataclass

import torch

from trl_qarl.objectives.objective import Loss, Objective


@dataclass
class TruncatedGRPO(Objective):
    """`min(w, cap) min(r A, clip(r) A)` with the ratio `r` of a token, learner now to learner at rollout, and its
    mismatch `w`, learner at rollout to sampler. Terms are averaged over each completion, then over completions."""

    cap: float = 3.0

    def loss(self, config, batch):
        mask, advantages = batch.mask.bool(), batch.advantages.unsqueeze(1)
        is_known = mask & ~batch.sampling_per_token_logps.isnan()
        ratio = torch.where(mask, batch.per_token_logps - batch.old_per_token_logps, 0.0).exp()
        mismatch = torch.where(is_known, batch.old_per_token_logps - batch.sampling_per_token_logps, 0.0)
        weight = mismatch.clamp(max=math.log(self.cap)).exp()
        high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        clipped = ratio.clamp(1 - config.epsilon, 1 + high)
        terms = weight * torch.minimum(ratio * advantages, clipped * advantages)
        return Loss(-((terms * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean())
