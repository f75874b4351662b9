"""Causal attention of one segment, by the whole matrix of scores, in the dtype of its inputs."""

import torch


def attend(query, key, value, scale, window=None, softcap=None):
    """Outputs of `query`, `(queries, heads, head_dim)`, the last positions of `key` and `value`, `(keys, key_heads,
    head_dim)`."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    distance = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
    hidden = (distance < 0) | (distance >= (window or len(key)))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
