"""Detects loops, garbled text and the worst spans in sampled completions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


_MAX_LOOP_PERIOD, _MIN_LOOP_REPEATS, _MIN_LOOP_TOKENS = 64, 4, 16


def worst_span(scores: Sequence[float]) -> tuple[int, int]:
    """Return `(start, stop)` of the span of tokens around the largest score in which all scores exceed a quarter of
    it. NaN is ignored."""
    values = [-math.inf if math.isnan(score) else score for score in scores]
    peak = max(range(len(values)), key=values.__getitem__)
    start, stop = peak, peak + 1
    while start > 0 and values[start - 1] > values[peak] / 4:
        start -= 1
    while stop < len(values) and values[stop] > values[peak] / 4:
        stop += 1
    return start, stop


def worst_examples(
    old_per_token_logps: torch.Tensor,
    sampling_per_token_logps: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """
    Return two completions as rows of `worst_completions.jsonl`, with the [`worst_span`] between `⟦` and `⟧`: the one
    with the largest `|d|` (`"mismatch"`), and the one with the token that is least likely under both learner and
    sampler (`"improbable"`, by `-log p`). A row is left out if no token counts or no score is finite. Log-probs and
    mask, `(B, T)`, are those of [`mismatch_sums`]; ids are `B` sequences of tokens without padding.
    """
    known = mask.bool() & ~sampling_per_token_logps.isnan()
    examples = []
    for kind, scores in (
        ("mismatch", (old_per_token_logps - sampling_per_token_logps).abs()),
        ("improbable", -torch.maximum(old_per_token_logps, sampling_per_token_logps)),
    ):
        scores = scores.float().masked_fill(~known | ~scores.isfinite(), math.nan)
        worst = scores.nan_to_num(nan=-math.inf).amax(-1)  # (B,)
        row = int(worst.argmax())
        if not worst[row].isfinite():
            continue
        ids = list(completion_ids[row])
        start, stop = worst_span(scores[row, : len(ids)].tolist())
        text = f"{decode(ids[:start])[-200:]}⟦{decode(ids[start:stop])}⟧{decode(ids[stop:])[:100]}"
        examples.append(
            {
                "kind": kind,
                "nats": worst[row].item(),
                "advantage": advantages[row].item(),
                "prompt": decode(list(prompt_ids[row]))[-200:],
                "completion": text,
            }
        )
    return examples


def has_loop(token_ids: Sequence[int]) -> bool:
    """
    Return whether a completion repeats itself: a block of up to 64 tokens occurs at least 4 times in a row, over at
    least 16 tokens. A stretch of `n` tokens has period `p` if `n - p` consecutive tokens equal the one `p` before.
    """
    ids = torch.as_tensor(token_ids)
    for period in range(1, min(_MAX_LOOP_PERIOD, len(ids) // _MIN_LOOP_REPEATS) + 1):
        breaks = (ids[period:] != ids[:-period]).nonzero().flatten()
        ends = torch.cat([breaks.new_tensor([-1]), breaks, breaks.new_tensor([len(ids) - period])])
        longest = int(ends.diff().max()) - 1 + period
        if longest >= max(_MIN_LOOP_REPEATS * period, _MIN_LOOP_TOKENS):
            return True
    return False


def is_garbled(text: str) -> bool:
    """Return whether a text contains U+FFFD, the mark of invalid bytes, except at its end, where a completion may have
    been cut inside a character."""
    return "\ufffd" in text.rstrip("\ufffd")


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """Return the text of a completion, which may be a list of messages."""
    if isinstance(completion, str):
        return completion
    contents = (message.get("content") for message in completion)
    return "\n".join(content for content in contents if isinstance(content, str))


def without_padding(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Return the token ids of each row of `(B, T)` where `mask` is 1."""
    return [row[keep].tolist() for row, keep in zip(ids, mask.bool(), strict=True)]
