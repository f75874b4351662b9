"""
Choice of the module that computes the engine's operations in this process, without gradients.

| backend | computes with | where |
|---|---|---|
| [`trl_qarl.numerics.cpu`] | vLLM's kernels for CPUs | CPUs, if the kernels are available and agree with the learner |
| [`trl_qarl.numerics.portable`] | torch | other CPUs, where only decoding and scoring have to agree |
| [`trl_qarl.numerics.cuda`] | vLLM's batch-invariant kernels | GPUs |

Each gives a token the same bits in any batch.
"""

from typing import Any, Protocol

import torch

from . import cpu, cuda, portable


__all__ = ["Backend", "Product", "backend_of", "is_on_gpu"]


class Product(Protocol):
    """A matrix product with one weight `(N, K)`, made once. It takes `(..., K)` in the weight's dtype and a bias `(N,)`
    in any dtype."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor: ...


class Backend(Protocol):
    """The operations of each module."""

    def PackedLinear(self, weight: torch.Tensor) -> Product:
        """Return the product with `weight`, `(N, K)` bfloat16 or float32, which is copied: later changes have no
        effect."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """
        Return `x / sqrt(mean(x**2) + epsilon) * weight`, computed in float32; on a CPU rounded before the product with
        `weight` and after it. `x`, `(..., H)`, is float32 for the residual stream, else in the engine's dtype, like
        `weight`, `(H,)`, and the result.
        """

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return `silu(gate) * up`, both in the engine's dtype; on a CPU rounded after each operation."""

    def log_softmax(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """Return the log-probs `(M, V)` float32 of `logits` `(M, V)` like the engine's sampler."""

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Return the rotary position embedding of `x`, `(tokens, heads, head_dim)`, at `positions`, `(tokens,)` int64,
        from `cache`, `(max_positions, head_dim)` in the dtype of `x`, cosines before sines."""

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_lengths: tuple[int, ...],
        key_lengths: tuple[int, ...],
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """
        Return the causal attention, `(sum(query_lengths), heads, head_dim)`, of packed sequences, with the same bits
        for any number of queries. The queries of a sequence are its last positions.

        `query` has the shape of the result, `key` and `value` are `(sum(key_lengths), key_heads, head_dim)`. The
        lengths are per sequence, `scale` is a factor of the scores. `window` is the number of last keys that a query
        sees, including its own; only vLLM's kernels for CPUs support it, other backends raise `NotImplementedError`.
        """


def backend_of(x: torch.Tensor) -> Any:
    """Return the [`Backend`] that computes with `x`."""
    if is_on_gpu(x):
        return cuda
    return cpu if cpu.has_engine_kernels() else portable


def is_on_gpu(x: torch.Tensor) -> bool:
    """Return whether [`trl_qarl.numerics.cuda`] computes with `x`."""
    return x.is_cuda
