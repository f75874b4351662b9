"""
Rollouts without vLLM: the learner's own quantized modules generate through transformers, and the log-probs under which
each token was sampled are recorded, so that the mismatch between rollout and scoring is measured rather than assumed
to be 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from typing_extensions import override


__all__ = ["OwnGenerationConfig", "SamplingLogProbs", "record_sampling_logps"]


class OwnGenerationConfig(GenerationConfig):
    """Generation configuration whose fields that are `None` `generate` does not fill from the model's: its `min_p`
    would truncate rollouts while `QaRLConfig(min_p=None)` says that nothing does."""

    @override
    def update(self, defaults_only=False, allow_custom_entries=False, **kwargs):
        """Leaves out the update from the model's configuration, the only one that allows custom entries."""
        return kwargs if allow_custom_entries else super().update(defaults_only=defaults_only, **kwargs)


class SamplingLogProbs(LogitsProcessor):
    """
    Logits processor that leaves the scores as they are and keeps the log-prob of each sampled token: that of
    `softmax(scores / temperature)`, before any truncation (top-k, top-p, min-p), as the learner computes it.

    A processor sees the scores before a token is drawn, so step `t` is settled when step `t + 1` (or
    [`~SamplingLogProbs.finish`]) shows which token it was. Only one `(B, V)` tensor is held at a time.
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
        """Log-probs of all sampled tokens, `(B, T)` float32 in nats, padding included; `sequences`, `(B, P + T)`, is
        what `generate` returned."""
        self._settle(sequences[:, -1])
        self._pending = None
        return torch.stack(self.steps, dim=1)

    def _settle(self, tokens: torch.Tensor) -> None:
        if self._pending is not None:
            self.steps.append(self._pending.gather(1, tokens.unsqueeze(1)).squeeze(1))


@contextmanager
def record_sampling_logps(model: PreTrainedModel, temperature: float) -> Iterator[list[torch.Tensor]]:
    """
    While the context is open, each `model.generate` call appends its sampling log-probs, `(B, T)`, to the yielded
    list.

    TRL calls `generate` with fixed arguments in the middle of a long method; an instance attribute that shadows the
    method is the only place to add a processor without copying that method.
    """
    recorded: list[torch.Tensor] = []
    generate, own = model.generate, vars(model).get("generate")

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

    model.generate = generate_and_record
    try:
        yield recorded
    finally:
        del model.generate
        if own is not None:
            # One that was set on the instance.
            model.generate = own
