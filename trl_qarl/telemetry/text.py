"""Detects loops and garbled text in sampled completions."""

from collections.abc import Sequence
from typing import Any

import torch


_MAX_LOOP_PERIOD, _MIN_LOOP_REPEATS, _MIN_LOOP_TOKENS = 64, 4, 16


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
