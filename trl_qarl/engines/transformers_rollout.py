"""
Rollouts without vLLM: the learner's own quantized modules generate through transformers. The log-prob of each sampled
token is recorded, so the mismatch between rollout and scoring is measured instead of assumed to be 0.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    SuppressTokensLogitsProcessor,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from typing_extensions import override

from ..bitwise.modules import cache_of
from ..quantization.names import base_model
from ..replacing import replaced


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
    truncation (top-k, top-p, min-p) and suppression of tokens, as the learner computes it.

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


# Fields of a generation configuration that change the distribution of tokens, with the values that do not: `generate`
# puts them in place of `None`.
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("do_sample", "temperature", "top_k", "min_p", "top_h", "bad_words_ids", "suppress_tokens")),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias")),
    **dict.fromkeys(("min_new_tokens", "exponential_decay_length_penalty", "guidance_scale", "penalty_alpha")),
    **dict.fromkeys(("watermarking_config",)),
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("renormalize_logits", "remove_invalid_values"), False),
    "num_beams": 1,
}


@contextmanager
def record_sampling_logps(
    model: PreTrainedModel, temperature: float, shares_prompts: bool = False
) -> Iterator[list[torch.Tensor]]:
    """
    While open, each `model.generate` call appends its sampling log-probs, `(B, T)`, to the yielded list. `ValueError`
    is raised if a `generate` of the user changes the distribution of tokens, which the learner computes without that.

    TRL calls `generate` with fixed arguments in the middle of a long method. The recorder is added where transformers
    collects the processors of a call, so that those which come with `generate`, bound by `functools.partial` or passed
    by a wrapper, arrive there too and are seen. With `shares_prompts`, for a model with plain attention, a prompt is
    computed once for all its completions.
    """
    recorded: list[torch.Tensor] = []
    generate, inner = model.generate, base_model(model)
    collect = inner._get_logits_processor
    given: GenerationConfig | None = None
    recorder = SamplingLogProbs(temperature)

    def collect_with_recorder(*args, **kwargs):
        _check_distribution(kwargs, given)
        processors = collect(*args, **kwargs | {"logits_processor": LogitsProcessorList([recorder])})
        # TRL suppresses the placeholder of pictures. The learner computes its probability too, and so does vLLM, which
        # draws completions with one again.
        for place, processor in enumerate(processors):
            if isinstance(processor, SuppressTokensLogitsProcessor):
                processors.remove(recorder)
                processors.insert(place, recorder)
                break
        return processors

    def generate_and_record(*args, **kwargs):
        nonlocal given, recorder
        given, recorder = kwargs.get("generation_config"), SamplingLogProbs(temperature)
        sequences = generate(*args, **kwargs)
        if not recorder.steps and recorder._pending is None:
            raise TypeError(
                f"The `generate` of {type(model).__name__} did not draw tokens by that of transformers, so the log-probs under "
                "which tokens were sampled are unknown. Have it call transformers' `generate`, or use `use_vllm=True` or "
                "`rollout_func`."
            )
        recorded.append(recorder.finish(sequences))
        return sequences

    inside = {"_get_logits_processor": collect_with_recorder}
    if shares_prompts:
        inside["_prefill"] = _prefill_once(inner._prefill)
    with replaced(inner, **inside), replaced(model, generate=generate_and_record):
        yield recorded


def _prefill_once(prefill: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' `_prefill`, changed to compute equal rows of a batch once and to copy their keys and
    values. Calls with another cache than that of attention, a filled one, or other inputs are left to it."""

    @wraps(prefill)
    def prefill_once(
        input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args, **kwargs
    ):
        cache = cache_of(model_kwargs)
        # From transformers 5.24 on there is no mask where it would mask nothing.
        tensors = {name: value for name, value in model_kwargs.items() if isinstance(value, torch.Tensor)}
        attends = (DynamicLayer, DynamicSlidingWindowLayer)
        takes_rows = (
            tensors.keys() <= {"attention_mask", "position_ids"}
            and all(tensor.shape == input_ids.shape for tensor in tensors.values())
            and all(type(layer) in attends for layer in getattr(cache, "layers", [None]))
            and cache.get_seq_length() == 0
        )
        if takes_rows:
            rows, places = torch.unique(torch.cat([input_ids, *tensors.values()], dim=1), dim=0, return_inverse=True)
            if len(rows) < len(places):
                chosen = places.new_empty(len(rows))
                chosen[places] = torch.arange(len(places), device=places.device)
                of_rows = {name: tensor[chosen] for name, tensor in tensors.items()}
                outputs = prefill(input_ids[chosen], generation_config, model_kwargs | of_rows, *args, **kwargs)
                cache_of(outputs).batch_select_indices(places)
                outputs.logits = outputs.logits[places]
                return outputs
        return prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    return prefill_once


def _check_distribution(call: dict[str, Any], given: GenerationConfig | None) -> None:
    """Raise `ValueError` if the arguments of a call to collect processors change the distribution beyond `given`."""
    changes = [type(each).__name__ for each in call.get("logits_processor") or ()]
    if call.get("prefix_allowed_tokens_fn") is not None:
        changes.append("prefix_allowed_tokens_fn")
    if given is not None:
        used = call["generation_config"]
        for name, neutral in _NEUTRAL.items():
            theirs, ours = getattr(given, name, None), getattr(used, name, None)
            if (neutral if theirs is None else theirs) != (neutral if ours is None else ours):
                changes.append(f"{name}={ours!r} instead of {theirs!r}")
    if changes:
        raise ValueError(
            f"The model's `generate` changes the distribution of tokens ({', '.join(changes)}), and the learner's log-probs are "
            "those without that. Remove it from `model.generate`: `temperature`, `top_p`, `top_k`, `min_p` and "
            "`repetition_penalty` are options. With a distribution of your own, give a `rollout_func` that returns its "
            "log-probs."
        )
