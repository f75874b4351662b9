"""Probability ratios of completions: geometric means over their tokens."""

import math

import torch


def sequence_log_ratio(
    per_token_logps: torch.Tensor, reference_per_token_logps: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """
    Log of the geometric-mean probability ratio: `1/L sum_t m_t (per_token_logps - reference_per_token_logps)`.

    All arguments have shape `(B, T)`, the result `(B,)`, float32 or wider. Positions where `mask` is zero may have any
    value, including NaN and inf. A token whose reference is NaN (vLLM may return it) counts in `L` with a difference
    of 0; a NaN in `per_token_logps` is not hidden. An empty completion gives 0.
    """
    mask = mask.bool()
    has_both = mask & ~torch.isnan(reference_per_token_logps)
    dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
    # Select before subtracting: NaN * 0 is NaN, in the value and in the gradient.
    log_ratio = torch.where(has_both, per_token_logps.to(dtype), 0.0)  # (B, T)
    log_ratio = log_ratio - torch.where(has_both, reference_per_token_logps.to(dtype), 0.0)
    return log_ratio.sum(-1) / mask.sum(-1).clamp(min=1)  # (B,)


@torch.no_grad()
def mismatch_weight(
    old_per_token_logps: torch.Tensor, sampling_per_token_logps: torch.Tensor, mask: torch.Tensor, cap: float
) -> torch.Tensor:
    """
    Return the weight `w~` (Eq. 5) that corrects for sampling with the engine instead of the learner: shape `(B,)`, in
    `[1/cap, cap]`, without gradient, 1 for an empty completion. Tokens are handled as in [`sequence_log_ratio`]. A
    `cap` of 1 turns the correction off.
    """
    log_weight = sequence_log_ratio(old_per_token_logps, sampling_per_token_logps, mask)
    return torch.exp(log_weight.clamp(-math.log(cap), math.log(cap)))  # (B,)
