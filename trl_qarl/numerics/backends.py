"""
Choice of the module that computes the engine's operations in this process, without gradients.

| backend | computes with | where |
|---|---|---|
| [`trl_qarl.numerics.cpu`] | vLLM's kernels for CPUs | they can be called, and compute what the learner does |
| [`trl_qarl.numerics.portable`] | torch | other CPUs: there is no engine to agree with, but decoding has to agree with scoring |
| [`trl_qarl.numerics.cuda`] | vLLM's batch-invariant kernels | GPUs |

Each gives a token the same bits whatever it is computed with.
"""

from typing import Any, Protocol

import torch

from . import cpu, cuda, portable


__all__ = ["Backend", "Product", "backend_of", "is_on_gpu"]


class Product(Protocol):
    """A matrix product with one weight `(N, K)`, made once; it takes `(..., K)` in the weight's dtype and a bias
    `(N,)` in any."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor: ...


class Backend(Protocol):
    """The operations that each of the modules has."""

    def PackedLinear(self, weight: torch.Tensor) -> Product:
        """Return the product with `weight`, `(N, K)` bfloat16 or float32, which is copied: later changes have no
        effect."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """
        Return `x / sqrt(mean(x**2) + epsilon) * weight`, in float32; on a CPU rounded before the product with `weight`
        and after it. `x`, `(..., H)`, is float32 if it is the residual stream, else in the engine's dtype, which is
        that of `weight`, `(H,)`, and of the result.
        """

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`, both in the engine's dtype; on a CPU rounded after each."""

    def log_softmax(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-probs `(M, V)` float32 of `logits` `(M, V)` as the engine's sampler takes them."""

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
        for any other number of queries; those of a sequence are its last positions.

        `query` has the shape of the result, `key` and `value` are `(sum(key_lengths), key_heads, head_dim)`; lengths
        are those of each sequence, `scale` is a factor of the scores. `window` is the number of last keys that a query
        sees, its own among them; the backends other than vLLM's kernels for CPUs raise `NotImplementedError` for it.
        """


def backend_of(x: torch.Tensor) -> Any:
    """Return the [`Backend`] that computes with `x`."""
    if is_on_gpu(x):
        return cuda
    return cpu if cpu.has_engine_kernels() else portable


def is_on_gpu(x: torch.Tensor) -> bool:
    """Return whether [`trl_qarl.numerics.cuda`] computes with `x`."""
    return x.is_cuda
