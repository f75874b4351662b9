"""
Rotary embeddings of queries and keys with an axis of heads on a CPU.

vLLM's kernel for CPUs takes rows of all heads (csrc/cpu/pos_encoding.cpp in 0.31). LFM2 and latent attention give it
`(N, heads, head_dim)`, of which it would rotate the first N heads as if they were N tokens.
"""

from functools import wraps
from typing import Any

import torch


def register_rotations() -> None:
    """Have vLLM call its kernel with rows of all heads; calling it again changes nothing."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    forward = RotaryEmbedding.forward_cpu
    if hasattr(forward, "__wrapped__"):
        return

    @wraps(forward)
    def forward_cpu(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        given = [query, key]
        rows = [None if each is None else each.reshape(len(each), -1) for each in given]
        rotated = forward(self, positions, *rows)
        return tuple(new if old is None else new.view_as(old) for old, new in zip(given, rotated, strict=True))

    RotaryEmbedding.forward_cpu = forward_cpu
