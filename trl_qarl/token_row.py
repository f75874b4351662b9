"""
[`Layout`]: a padded batch as one row of tokens, in which a prompt of several completions occurs once.

    batch     pad  p  p  p | a  a  pad        row          p  p | p  a  a | p  b  b  b | q  q  c
              pad  p  p  p | b  b  b          segments     0      1         2            3
              pad pad  q  q | c pad pad       keys seen    0      0, 1      0, 2         3

A segment attends to its own tokens and, if its prompt is shared, to those of the prompt's segment before them. The
last token of a prompt predicts the first of a completion, so it belongs to the completion's segment. Tokens that
predict nothing that is scored are left out.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import torch


class Segments:
    """
    Sequences in one row of tokens, and the keys that each of them sees.

    Not a dataclass: FSDP2 copies those for every layer, and the places on the host would be read again for each.

    Args:
        query_lengths (`tuple[int, ...]`):
            Tokens of each segment. They follow each other in the row.
        key_lengths (`tuple[int, ...]`, *optional*):
            Number of keys that each segment sees, of which its queries are the last positions; by default
            `query_lengths`.
        keys (`torch.Tensor`, *optional*):
            Places of the keys of all segments, one segment after the other, `(sum(key_lengths),)` int64. By default
            they follow each other.
        runs (`tuple[tuple[slice, slice], ...]`):
            Places of queries that follow each other and see the same shared prompt, and those of the prompt.
    """

    def __init__(
        self,
        query_lengths: tuple[int, ...],
        key_lengths: tuple[int, ...] | None = None,
        keys: torch.Tensor | None = None,
        runs: tuple[tuple[slice, slice], ...] = (),
    ):
        self.query_lengths, self.key_lengths, self.keys = query_lengths, key_lengths or query_lengths, keys
        self.runs = runs

    @cached_property
    def places(self) -> tuple[int, ...] | None:
        """Return `keys` on the host."""
        return None if self.keys is None else tuple(self.keys.tolist())


@dataclass(frozen=True, eq=False)
class Layout:
    """
    One row of `N` tokens that stands for a padded batch `(B, T)`, made once for all layers of a forward.

    Args:
        input_ids, position_ids (`torch.Tensor` of shape `(1, N)`):
            Tokens, and their places in their sequences.
        labels (`torch.Tensor` of shape `(1, N)`):
            The token after each one if it is scored, else -100.
        counts (`torch.Tensor` of shape `(1, N)`):
            Number of times that each token occurs in the batch.
        segments ([`Segments`]):
            The segments of the row. Their `keys` are `None` if every segment sees only itself.
        scored (`torch.Tensor` of shape `(B, T - 1)`):
            True where the next token of the batch is scored.
        calls (`deque[str]`):
            Attention functions that have been called with the layout, which is how a forward knows that all were.
            FSDP2 gives every layer a copy of the layout with copies of lists, but with this deque itself.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    counts: torch.Tensor
    segments: Segments
    scored: torch.Tensor
    calls: deque[str] = field(default_factory=deque)

    @classmethod
    def of(
        cls, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor, every_token: bool = False
    ) -> "Layout | None":
        """
        Return the layout of a batch, or `None` if a sequence has no token, or a scored token comes after padding.

        `ids`, `mask` and `labels` are `(B, T)`; `labels` are -100 where a token is not scored. Sequences without
        scored tokens are left out, but at least one sequence is kept. With `every_token` all tokens are kept, for a
        loss that counts them.
        """
        scored = labels[:, 1:] != -100
        sequences = _sequences(ids, mask, scored, every_token)
        if sequences is None:
            return None
        occurrences = Counter(each.tokens_of_prompt for each in sequences)
        places, positions, counts, keys, query_lengths = [], [], [], [], []
        starts: dict[tuple[int, ...], int] = {}
        runs: list[tuple[slice, slice]] = []
        length = 0

        def append(segment: torch.Tensor, first: int, count: int, seen: torch.Tensor) -> None:
            nonlocal length
            places.append(segment)
            positions.append(torch.arange(first, first + len(segment)))
            counts.append(torch.full((len(segment),), count))
            keys.append(torch.cat([seen, torch.arange(length, length + len(segment))]))
            query_lengths.append(len(segment))
            length += len(segment)

        nothing = torch.arange(0)
        for _, tokens_of_prompt, prompt, rest in sequences:
            count = occurrences[tokens_of_prompt]
            if count == 1 or not len(prompt):
                append(torch.cat([prompt, rest]), 0, 1, nothing)
                continue
            if tokens_of_prompt not in starts:
                starts[tokens_of_prompt] = length
                append(prompt, 0, count, nothing)
            if len(rest):
                start, first = starts[tokens_of_prompt], length
                append(rest, len(prompt), 1, torch.arange(start, start + len(prompt)))
                shared = slice(start, start + len(prompt))
                if runs and runs[-1] == (slice(runs[-1][0].start, first), shared):
                    first = runs.pop()[0].start
                runs.append((slice(first, length), shared))
        following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        place, position, count = (torch.cat(each).to(ids.device) for each in (places, positions, counts))
        return cls(
            input_ids=ids.flatten()[place][None],
            position_ids=position[None],
            labels=following.flatten()[place][None],
            counts=count[None],
            segments=Segments(
                tuple(query_lengths),
                tuple(map(len, keys)),
                torch.cat(keys).to(ids.device) if starts else None,
                tuple(runs),
            ),
            scored=scored,
        )

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` of the row, `(1, N)`, at the places of the batch that they score, `(B, T - 1)`, else 0."""
        return values.new_zeros(self.scored.shape).masked_scatter(self.scored, values[self.labels != -100])


def divide(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor, max_tokens: int) -> list[slice]:
    """
    Return the rows of parts of a batch whose layouts have at most `max_tokens` tokens each, or one sequence. Tensors
    are those of [`Layout.of`]. Completions of a prompt are divided only if their own layout has too many tokens.
    """
    sequences = _sequences(ids, mask, labels[:, 1:] != -100, False) or []
    firsts, length = [0], 0
    for _, group in groupby(sequences, key=lambda each: each.tokens_of_prompt):
        members = [*group]
        size = len(members[0].prompt) + sum(len(each.rest) for each in members)
        if length and length + size > max_tokens:
            firsts.append(members[0].row)
            length = 0
        if length + size <= max_tokens:
            length += size
            continue
        for index, each in enumerate(members):
            if index and length + len(each.rest) > max_tokens:
                firsts.append(each.row)
                length = 0
            length += len(each.rest) + (0 if length else len(each.prompt))
    return [slice(*bounds) for bounds in pairwise([*firsts, len(ids)])]


class _Sequence(NamedTuple):
    """A sequence of a batch: its row, and the places in the flattened batch of its tokens before the first one whose
    next token is scored, and from there on."""

    row: int
    tokens_of_prompt: tuple[int, ...]
    prompt: torch.Tensor
    rest: torch.Tensor


def _sequences(
    ids: torch.Tensor, mask: torch.Tensor, scored: torch.Tensor, every_token: bool
) -> list[_Sequence] | None:
    """Return the sequences of a layout, or `None` if it cannot have them."""
    is_token, is_scored, tokens = mask.bool().cpu(), scored.cpu(), ids.cpu()
    if not (is_token.any(dim=1).all() and is_token[:, :-1][is_scored].all()):
        return None
    chosen = every_token | is_scored.any(dim=1)
    if not chosen.any():
        chosen[is_token.sum(dim=1).argmin()] = True
    sequences = []
    for row in chosen.nonzero()[:, 0].tolist():
        columns, scoring = is_token[row].nonzero()[:, 0], is_scored[row].nonzero()[:, 0]
        # Without scored tokens all are the prompt's.
        first, last = (scoring[0], scoring[-1]) if len(scoring) else (ids.shape[1], 0)
        before = columns < first
        after = ~before if every_token else ~before & (columns <= last)
        start = row * ids.shape[1]
        prompt = columns[before]
        sequences.append(_Sequence(row, tuple(tokens[row, prompt].tolist()), start + prompt, start + columns[after]))
    return sequences
