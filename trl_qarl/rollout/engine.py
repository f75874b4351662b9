"""
Engines as the trainer sees them, and channels, on which tensors reach an engine in another process.

| when | methods of an engine | called by |
|---|---|---|
| connected | `describe` | [`Publisher`][trl_qarl.rollout.publisher] |
| weight sync | `begin`, `keep_copy` if only changes are sent, `send` for each chunk, `finish` | the same |
| after it | `score`; `clear_cache` if the log-probs are wrong | [`Canary`][trl_qarl.rollout.canary] |
| rollout | `generate`, `weight_version` | [`QaRLVLLMGeneration`][trl_qarl.rollout.generation] |
| mismatch probe | `log_probs` | [`Recorder`][trl_qarl.telemetry.recorder] |

The other side has the same names: a worker of vLLM answers `describe` by `qarl_describe`
([`trl_qarl.vllm_plugin.worker`]), and what a `FileChannel` sends a `FileChannel` receives
([`trl_qarl.vllm_plugin.weight_transfer`]). What comes over HTTP becomes a file first.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch


__all__ = ["Channel", "Engine", "Tensors", "num_bytes_of"]

Tensors = list[tuple[str, torch.Tensor]]


def num_bytes_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for _, tensor in tensors)


class Engine(Protocol):
    """Samples completions with the weights it is sent. What it refuses in a weight sync is a [`PublishError`]."""

    works_meanwhile: bool
    """Whether a thread may call `begin` and `send` while its caller quantizes what is sent next."""

    def describe(self) -> dict[str, Any]:
        """Return what the engine was built for, as [`trl_qarl.vllm_plugin.worker`] describes it; for a server also how
        many `replicas` it has, which are all alike."""

    def begin(self) -> list[str]:
        """Start a weight sync, from which on the engine does not generate, and return the names of tensors that it no
        longer holds as they were published."""

    def keep_copy(self) -> str:
        """Have the engine keep a copy of what it is sent, to which changes can be applied, and return the digest of
        the fingerprints of what it holds; the empty string for nothing, or where ranks differ."""

    def send(self, tensors: Tensors) -> None:
        """Deliver a chunk."""

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        """End the weight sync and raise [`PublishError`] unless the engine holds what the fingerprints say."""

    def weight_version(self) -> str:
        """Return what the last weight sync has stamped on the weights."""

    def generate(
        self, prompts: list[list[int]], pictures: Sequence[Any] | None = None, **sampling: Any
    ) -> dict[str, Any]:
        """Return completions as [`~trl_qarl.rollout.answers.check_answer`] describes them. `pictures` has those of
        each prompt, or `None`; `sampling` are parameters of `vllm.SamplingParams`."""

    def score(self, token_ids: list[int], pictures: Sequence[Any] = ()) -> list[float]:
        """Return the engine's log-probs of the tokens from the second on, NaN where there is none; replica by replica.
        With `pictures` the tokens are an [`~trl_qarl.rollout.pictures.ExpandedPrompt`]; [`PublishError`] is raised if
        the engine makes another prompt of it."""

    def log_probs(self, sequences: list[list[int]], num_top: int = 0) -> list[list[dict[int, float]]]:
        """Return, for each position of `sequences` from the second token on, `{token id: log-prob}` of the token that
        stands there and of the `num_top` likeliest ones, at temperature 1."""

    def clear_cache(self) -> None:
        """Set all keys and values that the engine holds to 0."""


class Channel:
    """Way of tensors to a server, to which `client` has a session. A subclass defines `send`, and whatever else it
    needs."""

    works_meanwhile = False
    """Whether tensors may be sent by a thread."""

    def __init__(self, client: Any):
        self.client = client

    def connect(self) -> None:
        """Set up what the channel needs in addition to the session, for each session."""

    def begin(self) -> None:
        """Prepare a weight sync."""

    def send(self, tensors: Tensors) -> None:
        """Deliver a chunk, within a weight sync."""
        raise NotImplementedError
