"""
Log-probs of a fixed text, which engine and learner compare after each publication: fingerprints do not reach what kernels keep for
themselves, nor what a CUDA graph reads.

How much the two may differ depends on the weights: some models turn a rounding error of the first layer into a tenth of a nat, others do
not notice it. So the learner scores the text twice, the second time with its embeddings moved by the last bit of the engine's dtype, each
element up or down. From there on every sum is rounded otherwise, and what is left between the two is what a second program makes
of the same weights, with all that follows from it: other codes of low-bit activations, other experts of a token. The engine may be
[`LIMIT`] times as far from the learner as that.

What it does not see: weights that are wrong by less than they are rounded by, such as one expert's of many, a bias of one update ago,
or anything in a model whose outputs hardly depend on its inputs, as those with random weights of a small scale do not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..forward import learner_log_probs
from ..quantization.swap import quantized_forward
from ..wire.describe import CANARY_TOKENS, sample_token_ids
from ..wire.protocol import PublishError
from .transports import Transport


__all__ = ["Canary"]

LIMIT = 10.0
"""Mean difference from which on the engine is taken to be broken, in units of the learner's own rounding."""

SMALLEST, LARGEST = 1e-3, 2.5
"""Bounds of that, in nats: the first for a model in float32 in which no code happened to be rounded otherwise."""


class Canary:
    """
    The fixed text of one learner.

    Args:
        model (`nn.Module`):
            The learner.
        dtype (`torch.dtype`):
            Dtype in which the engine runs the model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The learner's; without it nothing is compared.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, tokenizer: Any):
        self.model, self.dtype = model, dtype
        self.token_ids = [] if tokenizer is None else sample_token_ids(tokenizer)[:CANARY_TOKENS]

    def score(self) -> tuple[torch.Tensor, float] | None:
        """
        Return the learner's log-probs of the text's tokens from the second on, `(T,)` in nats on the CPU, and how much they change, on
        average, when the embeddings are rounded otherwise; nothing without a text. Where masters are sharded, every process calls it.
        """
        if len(self.token_ids) < 2:
            return None
        log_probs = self._log_probs()
        with self._otherwise_rounded():
            return log_probs, (self._log_probs() - log_probs).abs().mean().item()

    def compare(self, learner: tuple[torch.Tensor, float] | None, transport: Transport) -> dict[str, float]:
        """
        Compare what the engine, or each replica of a server, says of the text.

        Args:
            learner:
                What [`~Canary.score`] has returned.
            transport ([`Transport`]):
                The way to the engine.

        Returns:
            `publish/canary_abs_logp`, the mean difference in nats, of the replica that is furthest away, and `publish/canary_rounding`,
            the learner's own.

        Raises:
            PublishError: if the difference is no rounding.
        """
        if learner is None:
            return {}
        log_probs, rounding = learner
        replicas = torch.tensor(transport.score(self.token_ids)).view(-1, len(log_probs))
        differences = (replicas - log_probs).abs().mean(1)
        # The first that is not a number, if there is one.
        worst = int(differences.argmax())
        engine, difference = replicas[worst], differences[worst].item()
        limit = min(max(LIMIT * rounding, SMALLEST), LARGEST)
        # Also where it is not a number.
        if not difference <= limit:
            transport.clear_cache()
            name = "the engine" if len(replicas) == 1 else f"replica {worst}"
            raise PublishError(
                f"After publication {name}'s log-probs of {len(log_probs)} fixed tokens are {difference:.3g} nats from the "
                f"learner's on average, although it holds the learner's tensors. Rounding explains {limit:.3g}, {LIMIT:g} times what it "
                f"changes in the learner, so one of the two computes nonsense, or a kernel works with a copy of other weights. "
                f"Engine: {_rounded(engine)}; learner: {_rounded(log_probs)}."
            )
        return {"publish/canary_abs_logp": difference, "publish/canary_rounding": rounding}

    def _log_probs(self) -> torch.Tensor:
        ids = torch.tensor(self.token_ids, device=next(self.model.parameters()).device)
        # The engine runs low-bit weights also where the learner does not.
        autocast = torch.autocast(ids.device.type, self.dtype, enabled=self.dtype is not torch.float32)
        with quantized_forward(self.model), autocast:
            log_probs = learner_log_probs(self.model, ids, len(ids) - 1)
        return log_probs.gather(1, ids[1:, None])[:, 0].cpu()

    @contextmanager
    def _otherwise_rounded(self) -> Iterator[None]:
        embedding = self.model.get_input_embeddings()
        step = torch.finfo(self.dtype).eps
        if self.dtype is torch.float32 and embedding.weight.device.type != "cpu":
            # Attention in Triton rounds float32 to TF32.
            step = 2.0**-10

        def move(module, arguments, output):
            generator = torch.Generator().manual_seed(0)
            up = torch.rand(output.shape, generator=generator) < 0.5
            return output * torch.where(up, 1 + step, 1 - step).to(output)

        handle = embedding.register_forward_hook(move)
        try:
            yield
        finally:
            handle.remove()


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]
