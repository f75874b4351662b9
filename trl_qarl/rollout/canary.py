"""
Log-probs of a fixed text, which engine and learner compare after each publication: fingerprints do not reach what
kernels keep for themselves, nor what a CUDA graph reads.

How much the two may differ depends on the weights: one model turns a rounding error of its first layer into a tenth of
a nat, another does not notice it. So the learner scores the text twice. The second time its embeddings are moved by
the last bit of the engine's dtype, each element up or down, and what leaves a decoder layer is rounded to that dtype,
as in the engine. From there on every sum is rounded otherwise, with all that follows: other codes of low-bit
activations, other experts of a token. What is left between the two, the *rounding*, is about what the engine is away
by: 0.5 to 1.6 times as much in the publications on which [`LIMIT`] was settled.

It sees what is wrong by more than a few roundings in the tokens of this text. It does not see one expert of many, a
bias of one update ago, one query or key bias among many layers in bfloat16, nor anything in a model whose outputs
hardly depend on its inputs, as those with random weights of a small scale.

A text shows nothing of a vision tower. So a model that takes pictures has a second text, after a fixed picture.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ..forward import learner_log_probs
from ..quantization.names import layer_of
from ..quantization.swap import quantized_forward
from ..wire.describe import CANARY_TOKENS, sample_token_ids
from ..wire.protocol import PublishError
from .engine import Engine
from .pictures import canary_prompt, takes_pictures


__all__ = ["Canary"]

LIMIT = 3.0
"""Mean difference from which on the engine is taken to be broken, in units of the learner's rounding."""

PICTURE_TOKENS = 16
"""Tokens after the picture that are compared."""

SMALLEST, LARGEST = 0.01, 2.5
"""
Bounds of that, in nats: the first as a single code of an activation can be rounded otherwise, which in float32 is
rare.
"""


class _Text(NamedTuple):
    """A text, of which the last `num_scored` tokens are compared; `inputs` are the rest of the learner's, `pictures`
    what the engine is shown."""

    metric: str
    token_ids: list[int]
    num_scored: int
    inputs: Mapping[str, torch.Tensor] = {}
    pictures: Sequence[Any] = ()


class Canary:
    """The fixed text of one learner, and the fixed picture of one that takes pictures. `dtype` is that in which the
    engine runs the model; without a `processing_class` nothing is compared."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, processing_class: Any):
        self.model, self.dtype = model, dtype
        self.texts: list[_Text] = []
        if processing_class is None:
            return
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        ids = sample_token_ids(tokenizer)[:CANARY_TOKENS]
        if len(ids) > 1:
            self.texts.append(_Text("publish/canary", ids, len(ids) - 1))
        if takes_pictures(model) and getattr(processing_class, "chat_template", None):
            prompt, inputs, pictures = canary_prompt(processing_class, PICTURE_TOKENS)
            self.texts.append(_Text("publish/canary_picture", prompt, PICTURE_TOKENS, inputs, pictures))

    def score(self) -> list[tuple[torch.Tensor, float]]:
        """Return for each text the learner's log-probs of the tokens that are compared, `(T,)` in nats on the CPU, and
        their mean change when everything is rounded otherwise. Where masters are sharded, every process calls it."""
        scores = []
        for text in self.texts:
            log_probs = self._log_probs(text)
            with self._otherwise_rounded():
                scores.append((log_probs, (self._log_probs(text) - log_probs).abs().mean().item()))
        return scores

    def compare(self, learner: list[tuple[torch.Tensor, float]], engine: Engine) -> dict[str, float]:
        """
        Compare what the engine, or each replica of a server, says of the texts with the `learner`'s
        [`~Canary.score`].

        Returns:
            `publish/canary_abs_logp`, the mean difference in nats, of the replica that is furthest away, and
            `publish/canary_rounding`, the learner's own; with a picture `publish/canary_picture_abs_logp` and
            `publish/canary_picture_rounding`.

        Raises:
            PublishError: if the difference is larger than rounding explains, or the engine makes another prompt of the
                picture.
        """
        found: dict[str, float] = {}
        for text, (log_probs, rounding) in zip(self.texts, learner, strict=True):
            difference = self._compare(text, log_probs, rounding, engine)
            found |= {f"{text.metric}_abs_logp": difference, f"{text.metric}_rounding": rounding}
        return found

    def _compare(self, text: _Text, log_probs: torch.Tensor, rounding: float, engine: Engine) -> float:
        scored = torch.tensor(engine.score(text.token_ids, text.pictures))
        replicas = scored.view(-1, len(text.token_ids) - 1)[:, -text.num_scored :]
        differences = (replicas - log_probs).abs().mean(1)
        # `nan` if one difference is not a number.
        worst = int(differences.argmax())
        theirs, difference = replicas[worst], differences[worst].item()
        limit = min(max(LIMIT * rounding, SMALLEST), LARGEST)
        # `not <=` also catches NaN.
        if not difference <= limit:
            engine.clear_cache()
            name = "the engine" if len(replicas) == 1 else f"replica {worst}"
            raise PublishError(
                f"After publication {name}'s log-probs of {len(log_probs)} fixed tokens{' after a picture' if text.pictures else ''} are {difference:.3g} nats from the "
                f"learner's on average, although it holds the learner's tensors. Rounding explains {limit:.3g}, {LIMIT:g} times what it "
                f"changes in the learner, so one of the two computes nonsense, or a kernel works with a copy of other weights. "
                f"Engine: {_rounded(theirs)}; learner: {_rounded(log_probs)}."
            )
        return difference

    def _log_probs(self, text: _Text) -> torch.Tensor:
        ids = torch.tensor(list(text.token_ids), device=next(self.model.parameters()).device)
        inputs = {name: value.to(ids.device) for name, value in text.inputs.items()}
        # The engine runs low-bit weights also where the learner does not.
        autocast = torch.autocast(ids.device.type, self.dtype, enabled=self.dtype is not torch.float32)
        with quantized_forward(self.model), autocast:
            log_probs = learner_log_probs(self.model, ids, text.num_scored, **inputs)
        return log_probs.gather(1, ids[-text.num_scored :, None])[:, 0].cpu()

    @contextmanager
    def _otherwise_rounded(self) -> Iterator[None]:
        embedding = self.model.get_input_embeddings()
        step = torch.finfo(self.dtype).eps
        if self.dtype is torch.float32 and next(self.model.parameters()).device.type != "cpu":
            # Attention in Triton rounds float32 to TF32.
            step = 2.0**-10

        def move(module, arguments, output):
            generator = torch.Generator().manual_seed(0)
            up = torch.rand(output.shape, generator=generator) < 0.5
            return output * torch.where(up, 1 + step, 1 - step).to(output)

        def round_output(module, arguments, output):
            if isinstance(output, tuple):
                return (output[0].to(self.dtype).to(output[0]), *output[1:])
            return output.to(self.dtype).to(output)

        handles = [embedding.register_forward_hook(move)]
        for name in {layer_of(name) for name, _ in self.model.named_parameters()}:
            if name.rpartition(".")[2].isdigit():
                handles.append(self.model.get_submodule(name).register_forward_hook(round_output))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]
