"""
Compares the log-probs of a fixed text in engine and learner after each publication. This finds errors in kernels' own
copies of weights and in CUDA graphs, which fingerprints do not cover.

A difference of more than [`SMALLEST`] is compared with a multiple of the learner's own rounding: the learner scores
the text again, with other rounding, and the difference between the two passes, the *rounding*, is close to the
engine's distance from the learner: that was 0.5 to 1.6 times as large in the publications from which [`LIMIT`] was
derived. docs/reliability.md names errors that remain undetected.

A text does not reach a vision tower, so a model that takes pictures has a second text, after a fixed picture.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ..checkpoint.export import has_own_code
from ..engines.engine import Engine
from ..engines.pictures import canary_prompt, takes_pictures
from ..forward import learner_log_probs
from ..quantization.inventory import Inventory
from ..quantization.names import layer_of
from ..quantization.storage import device_of, is_sharded
from ..quantization.swap import quantized_forward
from ..wire.describe import CANARY_TOKENS, sample_token_ids
from ..wire.protocol import PublishError


LIMIT = 3.0
"""Largest mean difference of a working engine, in units of the learner's rounding."""

PICTURE_TOKENS = 16
"""Tokens after the picture that are compared."""

SMALLEST, LARGEST = 0.01, 2.5
"""Bounds of the allowed difference, in nats."""


class _Text(NamedTuple):
    """A text whose last `num_scored` tokens are compared; `inputs` are further inputs of the learner, `pictures` those
    of the engine."""

    metric: str
    token_ids: list[int]
    num_scored: int
    inputs: Mapping[str, torch.Tensor] = {}
    pictures: Sequence[Any] = ()


class Canary:
    """The fixed texts of a learner. `dtype` is the engine's; without a `processing_class` nothing is compared."""

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

    def score(self) -> list[tuple[torch.Tensor, float | None]]:
        """Return for each text the learner's log-probs of the compared tokens, `(T,)` in nats on the CPU. With sharded
        masters every process has to call, and only then the mean change of the log-probs under other rounding is
        returned too: [`~Canary.compare`] is a call of one process."""
        scores = []
        for text in self.texts:
            log_probs = self._log_probs(text)
            scores.append((log_probs, self._rounding(text, log_probs) if is_sharded(self.model) else None))
        return scores

    def _rounding(self, text: _Text, log_probs: torch.Tensor) -> float:
        with self._otherwise_rounded():
            return (self._log_probs(text) - log_probs).abs().mean().item()

    def compare(self, learner: list[tuple[torch.Tensor, float | None]], engine: Engine) -> dict[str, float]:
        """
        Compare the log-probs of the engine, or of each replica of a server, with the `learner`'s [`~Canary.score`].

        Return `publish/canary_abs_logp`, the largest mean difference of a replica in nats, and
        `publish/canary_rounding`, the learner's own, if it was needed; with a picture the same under
        `publish/canary_picture_`.
        [`PublishError`] is raised if rounding does not explain the difference, or the engine builds another prompt
        from the picture.
        """
        found: dict[str, float] = {}
        for text, (log_probs, rounding) in zip(self.texts, learner, strict=True):
            scored = torch.tensor(engine.score(text.token_ids, text.pictures))
            replicas = scored.view(-1, len(text.token_ids) - 1)[:, -text.num_scored :]
            differences = (replicas - log_probs).abs().mean(1)
            # `argmax` finds NaN too.
            worst = int(differences.argmax())
            difference = differences[worst].item()
            # `not <=` also catches NaN.
            if rounding is None and not difference <= SMALLEST:
                rounding = self._rounding(text, log_probs)
            limit = min(max(LIMIT * (rounding or 0.0), SMALLEST), LARGEST)
            if not difference <= limit:
                engine.clear_cache()
                name = "the engine" if len(replicas) == 1 else f"replica {worst}"
                own_code = "The model's own code (trust_remote_code) may compute otherwise than vLLM. "
                own_code *= has_own_code(self.model)
                raise PublishError(
                    f"After publication {name}'s log-probs of {len(log_probs)} fixed tokens{' after a picture' if text.pictures else ''} are {difference:.3g} nats from the "
                    f"learner's on average, although it holds the learner's tensors. Rounding explains {limit:.3g}, {LIMIT:g} times what it "
                    f"changes in the learner. {own_code}One of the two is broken, or a kernel works with a copy of other weights. Engine: {_rounded(replicas[worst])}; learner: {_rounded(log_probs)}."
                )
            found[f"{text.metric}_abs_logp"] = difference
            if rounding is not None:
                found[f"{text.metric}_rounding"] = rounding
        return found

    def _log_probs(self, text: _Text) -> torch.Tensor:
        ids = torch.tensor(list(text.token_ids), device=device_of(self.model))
        inputs = {name: value.to(ids.device) for name, value in text.inputs.items()}
        # The engine runs low-bit weights even if the learner does not.
        autocast = torch.autocast(ids.device.type, self.dtype, enabled=self.dtype is not torch.float32)
        with quantized_forward(self.model), autocast:
            log_probs = learner_log_probs(self.model, ids, text.num_scored, **inputs)
        return log_probs.gather(1, ids[-text.num_scored :, None])[:, 0].cpu()

    @contextmanager
    def _otherwise_rounded(self) -> Iterator[None]:
        """While open, embeddings move by the last bit of the engine's dtype, or of codes of activations, and each
        decoder layer's output is rounded to it, as in the engine. All later sums are then rounded differently, and
        codes of activations and experts of tokens may change."""
        step = torch.finfo(self.dtype).eps
        if any(layer.scheme.activation for layer in Inventory.of(self.model).layers.values()):
            # In float32 few codes are rounded differently, in one pass perhaps none, but each by a whole step.
            step = max(step, 2.0**-8)
        if self.dtype is torch.float32 and device_of(self.model).type != "cpu":
            # Attention in Triton rounds float32 to TF32.
            step = 2.0**-10

        def move(module, arguments, output):
            generator = torch.Generator().manual_seed(0)
            up = torch.rand(output.shape, generator=generator) < 0.5
            return output * torch.where(up, 1 + step, 1 - step).to(output)

        def round_output(module, arguments, output):
            if isinstance(output, tuple):
                return (round_output(module, arguments, output[0]), *output[1:])
            return output.to(self.dtype).to(output)

        with ExitStack() as stack:
            stack.enter_context(self.model.get_input_embeddings().register_forward_hook(move))
            for name in {layer_of(name) for name, _ in self.model.named_parameters()}:
                if name.rpartition(".")[2].isdigit():
                    stack.enter_context(self.model.get_submodule(name).register_forward_hook(round_output))
            yield


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]
