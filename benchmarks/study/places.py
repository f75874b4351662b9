"""
Records where in an answer error tokens and mismatch are, and which answers an objective drops. `long_study.py --places`
writes one row per generation batch to `places.jsonl`.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trl_qarl.telemetry.mismatch import ERROR_PROBABILITY


PLACES_FILE = "places.jsonl"
# Tokens per place.
WIDTH = 100
# Columns of `describe`: by third of an answer of 1,000 tokens, by sign of the advantage, and with and without error
# tokens.
COLUMNS = (
    *(f"error tokens of 100,000, {third}" for third in ("to 300", "to 600", "beyond")),
    *(f"mismatch, nats per token, {third}" for third in ("to 300", "to 600", "beyond")),
    *(f"nats per {sign} answer" for sign in ("right", "wrong")),
    *(f"dropped {kind} error tokens, %" for kind in ("with", "without")),
)


class PlaceRecorder:
    """
    Appends a row to `path` for each generation batch of a trainer: the counts of [`summarize`], and with TBPO under
    `dropped`, over the updates on the previous batch, the answers with and without error tokens and how many of them
    were dropped.
    """

    def __init__(self, trainer, path: Path):
        self.trainer, self.path = trainer, path
        self.answers = {"with": [0, 0], "without": [0, 0]}
        self._complete, trainer._generate_and_score_completions = (
            trainer._generate_and_score_completions,
            self.complete,
        )
        self._compute, trainer._compute_loss = trainer._compute_loss, self.compute
        self._reduce, trainer.recorder.reduce = trainer.recorder.reduce, self.reduce
        self.has_errors = torch.zeros(0, dtype=torch.bool)

    def compute(self, model, inputs):
        """Compute the trainer's loss, and note which answers have error tokens."""
        self.has_errors = error_tokens(inputs).any(1)
        return self._compute(model, inputs)

    def reduce(self, per_sequence):
        """Average over the answers of an update as the trainer does, and count those that TBPO drops."""
        dropped = per_sequence.get("tbpo/dropped/total")
        if dropped is not None:
            counts = ~dropped.isnan()
            for name, chosen in (("with", counts & self.has_errors), ("without", counts & ~self.has_errors)):
                self.answers[name][0] += int(chosen.sum())
                self.answers[name][1] += int(dropped[chosen].sum())
        return self._reduce(per_sequence)

    def complete(self, inputs):
        """Generate and score a batch as the trainer does, and write its row."""
        output = self._complete(inputs)
        row = {"step": self.trainer.state.global_step + 1} | summarize(output) | {"dropped": self.answers}
        self.answers = {"with": [0, 0], "without": [0, 0]}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return output


def error_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a mask `(B, T)` of the tokens that are improbable to learner and sampler (`rollout/error_token_share`)."""
    likelier = torch.maximum(batch["old_per_token_logps"], batch["sampling_per_token_logps"])
    return (likelier < math.log(ERROR_PROBABILITY)) & batch["completion_mask"].bool()


def summarize(batch: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """
    Return counts by hundreds of tokens: `tokens`, `errors`, and the summed `mismatch` in nats. And by sign of the
    advantage, first positive, then negative: `sequences`, and their summed mismatch of whole answers, `|sum d|`.

    >>> mask = torch.ones(2, 150)
    >>> old = torch.full((2, 150), -0.5)
    >>> sampling = old.clone()
    >>> old[0, 120] = sampling[0, 120] = -20.0
    >>> sampling[1, 0] = -0.25
    >>> summarize({"completion_mask": mask, "old_per_token_logps": old, "sampling_per_token_logps": sampling,
    ...            "advantages": torch.tensor([1.0, -1.0])})  # doctest: +NORMALIZE_WHITESPACE
    {'tokens': [200.0, 100.0], 'errors': [0.0, 1.0], 'mismatch': [0.25, 0.0], 'sequences': [1.0, 1.0],
     'sequence_mismatch': [0.0, 0.25]}
    """
    mask = batch["completion_mask"].bool()
    difference = torch.where(mask, batch["old_per_token_logps"] - batch["sampling_per_token_logps"], 0.0).double()
    sums = [mask.double(), error_tokens(batch).double(), difference.abs()]
    tokens, errors, mismatch = ([part.sum().item() for part in values.split(WIDTH, 1)] for values in sums)
    chosen = [batch["advantages"] > 0, batch["advantages"] < 0]
    whole = difference.sum(1).abs()
    return {
        "tokens": tokens,
        "errors": errors,
        "mismatch": mismatch,
        "sequences": [rows.sum().item() * 1.0 for rows in chosen],
        "sequence_mismatch": [whole[rows].sum().item() for rows in chosen],
    }


def add(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """
    Add several rows, or several such sums, to four digits.

    >>> add([{"step": 1, "tokens": [2.0], "dropped": {"with": [1, 0]}}, {"step": 9, "tokens": [1.0, 3.0], "dropped": {"with": [1, 1]}}])
    {'tokens': [3.0, 3.0], 'dropped': {'with': [2, 1]}}
    """

    def total(parts: Sequence[Sequence[float]]) -> list[float]:
        return [
            part if isinstance(part, int) else float(f"{part:.4g}")
            for part in map(sum, itertools.zip_longest(*parts, fillvalue=0))
        ]

    names = [name for name in rows[0] if name not in ("step", "dropped")]
    dropped = {kind: total([row["dropped"][kind] for row in rows]) for kind in rows[0]["dropped"]}
    return {name: total([row[name] for row in rows]) for name in names} | {"dropped": dropped}


def describe(counts: Mapping[str, Any]) -> list[str]:
    """
    Format the values of `COLUMNS` from a sum of [`add`]; a dash where there is nothing to count.

    >>> counts = {"tokens": [1e4] * 8, "errors": [1, 2, 0, 0, 0, 0, 4, 0], "mismatch": [3.0] * 8, "sequences": [4, 0]}
    >>> describe(counts | {"sequence_mismatch": [2.0, 0.0], "dropped": {"with": [5, 2], "without": [0, 0]}})
    ['10', '0', '20', '0.0003', '0.0003', '0.0003', '0.5', '-', '40', '-']
    """

    def share(part: float, whole: float) -> str:
        return f"{float(f'{part / whole:.2g}'):g}" if whole else "-"

    tokens, errors, mismatch = (
        [sum(counts[name][first:last]) for first, last in ((0, 3), (3, 6), (6, None))]
        for name in ("tokens", "errors", "mismatch")
    )
    return [
        *(share(1e5 * part, whole) for part, whole in zip(errors, tokens, strict=True)),
        *(share(part, whole) for part, whole in zip(mismatch, tokens, strict=True)),
        *(share(part, whole) for part, whole in zip(counts["sequence_mismatch"], counts["sequences"], strict=True)),
        *(share(100 * dropped, number) for number, dropped in counts["dropped"].values()),
    ]
