"""
Interface of engines for the trainer, and of channels, which carry tensors to an engine in another process.

| when | methods of an engine | called by |
|---|---|---|
| connected | `describe` | [`Publisher`][trl_qarl.sync.publisher] |
| weight sync | `begin`, `send` for each chunk, `finish` | `Publisher` |
| after a weight sync | `score`; `clear_cache` if the log-probs are wrong | [`Canary`][trl_qarl.sync.canary] |
| rollout | `generate`, `weight_version` | [`QaRLVLLMGeneration`][trl_qarl.rollout.generation] |

The other side uses the same names: a worker of vLLM implements `describe` as `qarl_describe`
([`trl_qarl.vllm_plugin.worker`]), and a `FileChannel` here sends to the `FileReceiver` in
[`trl_qarl.vllm_plugin.weight_transfer`].
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch


Tensors = list[tuple[str, torch.Tensor]]


def num_bytes_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for _, tensor in tensors)


class Engine(Protocol):
    """Samples completions with the weights that it is sent. An error of a weight sync is a [`PublishError`]."""

    works_meanwhile: bool
    """True if a thread may call `begin` and `send` while its caller quantizes the next chunk."""
    in_every_process: bool
    """True if every process of the trainer publishes to an engine of its own."""

    def describe(self) -> dict[str, Any]:
        """Return the engine's settings in the form of [`trl_qarl.vllm_plugin.worker`]; for a server also the number of
        `replicas`, which are all alike."""

    def begin(self) -> list[str]:
        """Start a weight sync, during which the engine does not generate, and return the names of tensors that the
        engine no longer holds as they were published."""

    def send(self, tensors: Tensors) -> None:
        """Deliver a chunk."""

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        """End the weight sync and raise [`PublishError`] unless the engine holds tensors with these fingerprints."""

    def weight_version(self) -> str:
        """Return the version that the last weight sync has stamped on the weights."""

    def generate(
        self, prompts: list[list[int]], pictures: Sequence[Any] | None = None, **sampling: Any
    ) -> dict[str, Any]:
        """Return completions in the form of [`~trl_qarl.engines.answers.check_answer`]. `pictures` has the pictures of
        each prompt, or `None`; `sampling` are parameters of `vllm.SamplingParams`."""

    def score(self, token_ids: list[int], pictures: Sequence[Any] = ()) -> list[float]:
        """Return the engine's log-probs of the tokens from the second on, replica by replica; NaN if one is missing.
        With `pictures` the tokens are an [`~trl_qarl.engines.pictures.ExpandedPrompt`]; [`PublishError`] is raised if
        the engine expands the prompt differently."""

    def clear_cache(self) -> None:
        """Set all keys and values that the engine holds to 0."""


class Channel:
    """Carries tensors to a server with which `client` has a session. `works_meanwhile` is true if a thread may send
    tensors. A subclass defines `send` and overrides the other methods if needed."""

    works_meanwhile = False

    def __init__(self, client: Any):
        self.client = client

    def connect(self) -> None:
        """Set up the channel; called once for each session."""

    def begin(self) -> None:
        """Prepare a weight sync."""

    def send(self, tensors: Tensors) -> None:
        """Deliver a chunk, within a weight sync."""
        raise NotImplementedError
