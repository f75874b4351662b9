"""
Rollouts without vLLM: the learner's own quantized modules generate through transformers. The log-prob of each sampled
token is recorded, so the mismatch between rollout and scoring is measured instead of assumed to be 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from typing_extensions import override


class OwnGenerationConfig(GenerationConfig):
    """Generation configuration whose `None` fields are not filled from the model's configuration by `generate`: the
    model's `min_p` would truncate rollouts despite `QaRLConfig(min_p=None)`."""

    @override
    def update(self, defaults_only=False, allow_custom_entries=False, **kwargs):
        """Skips the update from the model's configuration, the only one that allows custom entries."""
        return kwargs if allow_custom_entries else super().update(defaults_only=defaults_only, **kwargs)


class SamplingLogProbs(LogitsProcessor):
    """
    Logits processor that records the log-prob of each sampled token under `softmax(scores / temperature)`, before any
    truncation (top-k, top-p, min-p), as the learner computes it.

    It sees the scores before a token is drawn, so step `t` is settled at step `t + 1` or in
    [`~SamplingLogProbs.finish`]. Only one `(B, V)` tensor is held at a time.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.steps: list[torch.Tensor] = []
        self._pending: torch.Tensor | None = None

    @override
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._settle(input_ids[:, -1])
        self._pending = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        return scores

    def finish(self, sequences: torch.Tensor) -> torch.Tensor:
        """Return the log-probs of all sampled tokens, `(B, T)` float32 in nats, including padding; `sequences`,
        `(B, P + T)`, is the output of `generate`."""
        self._settle(sequences[:, -1])
        self._pending = None
        return torch.stack(self.steps, dim=1)

    def _settle(self, tokens: torch.Tensor) -> None:
        if self._pending is not None:
            self.steps.append(self._pending.gather(1, tokens.unsqueeze(1)).squeeze(1))


@contextmanager
def record_sampling_logps(model: PreTrainedModel, temperature: float) -> Iterator[list[torch.Tensor]]:
    """
    While open, each `model.generate` call appends its sampling log-probs, `(B, T)`, to the yielded list.

    TRL calls `generate` with fixed arguments in the middle of a long method. Shadowing `generate` by an instance
    attribute is the only way to add a processor without copying that method.
    """
    recorded: list[torch.Tensor] = []
    generate = model.generate

    def generate_and_record(*args, **kwargs):
        recorder = SamplingLogProbs(temperature)
        sequences = generate(*args, logits_processor=LogitsProcessorList([recorder]), **kwargs)
        if not recorder.steps and recorder._pending is None:
            raise TypeError(
                f"The `generate` of {type(model).__name__} did not call its `logits_processor`, so the log-probs under which "
                "tokens were sampled are unknown. Have it pass `logits_processor` on, or use `use_vllm=True` or `rollout_func`."
            )
        recorded.append(recorder.finish(sequences))
        return sequences

    # Afterwards the model has again what was set on the instance, or nothing.
    with patch.object(model, "generate", generate_and_record):
        yield recorded
