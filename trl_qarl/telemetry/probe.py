r"""
Full-vocabulary mismatch between learner and engine on a few sequences.

The log-probs of sampled tokens show the mismatch only at these tokens; the probe covers the whole vocabulary. The
engine returns its `k` likeliest tokens at each position, and the rest of the vocabulary counts as one outcome `o`:

    KL_k = sum_{v in top k} p(v) (log p(v) - log q(v)) + p(o) (log p(o) - log q(o))       p the engine, q the learner

Merging outcomes never raises a divergence, so `KL_k` is a lower bound of the full one, and equals it for `k = V`.
"""

from collections.abc import Mapping, Sequence

import torch


NUM_PROBES = 4
"""Sequences of each process that a probe scores."""

MAX_SCORED = 1024
"""First tokens of each completion that a probe scores: log-probs over a large vocabulary take memory."""

TOP_K = 20
"""Number of likeliest tokens requested from the engine at each position; vLLM's default limit."""


def likeliest(positions: Sequence[Mapping[int, float]], k: int = TOP_K) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and ids, both `(N, k)`, of the likeliest tokens, largest first, from an engine's
    `{token id: log-prob}` with at least `k` entries at each of `N` positions."""
    ranked = [sorted(entry.items(), key=lambda item: -item[1])[:k] for entry in positions]
    return torch.tensor([[p for _, p in row] for row in ranked]), torch.tensor([[i for i, _ in row] for row in ranked])


def compare_positions(
    engine_logps: torch.Tensor, engine_ids: torch.Tensor, learner_logps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return `KL_k` in nats, and 1 if the likeliest token is the same, else 0, both `(N,)` float64, at `N` positions.
    `engine_logps` and `engine_ids`, both `(N, k)`, are the engine's `k` likeliest tokens, likeliest first;
    `learner_logps`, `(N, V)`, are the learner's log-probs over the vocabulary. Log-probs are in nats.
    """
    p, q = engine_logps.double(), learner_logps.gather(-1, engine_ids).double()
    # A rest below the rounding of float32 probabilities cannot be computed.
    rest_p, rest_q = ((1 - x.exp().sum(-1)).clamp(min=torch.finfo(torch.float32).eps) for x in (p, q))
    kl = (p.exp() * (p - q)).sum(-1)
    if engine_ids.shape[-1] < learner_logps.shape[-1]:
        kl = kl + rest_p * (rest_p.log() - rest_q.log())
    return kl, (learner_logps.argmax(-1) == engine_ids[:, 0]).double()


def probe_metrics(positions: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """
    Return `mismatch/probe_kl` in nats, and `mismatch/probe_top1_agreement`, the share of positions with the same
    likeliest token: one minus the argmax-flip rate. Both are means over the positions of all results of
    [`compare_positions`].
    """
    kl, agreement = (torch.cat(part).mean().item() for part in zip(*positions, strict=True))
    return {"mismatch/probe_kl": kl, "mismatch/probe_top1_agreement": agreement}
