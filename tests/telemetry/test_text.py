import math

import pytest
import torch

from trl_qarl.telemetry.text import has_loop, is_garbled, worst_examples, worst_span


@pytest.mark.parametrize(
    ("scores", "span"),
    [
        ([0.0, 1.0, 4.0, 1.1, 0.9, 3.0], (2, 4)),
        ([5.0], (0, 1)),
        ([2.0, 3.0, 2.0], (0, 3)),
        ([math.nan, 4.0, math.nan, 3.0], (1, 2)),
    ],
)
def test_worst_span_is_the_run_around_the_largest_score(scores, span):
    assert worst_span(scores) == span


def test_worst_examples_mark_the_offending_span():
    sampling = torch.tensor([[-1.0, -1.0, -1.0, -9.0], [-1.0, -1.0, -0.5, -0.5]])
    old = torch.tensor([[-1.1, -1.0, -1.0, -9.0], [-1.0, -4.0, -0.5, -99.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    completions = [[97, 98, 99, 100], [101, 102, 103]]
    prompts = [[65], [66]]
    advantages = torch.tensor([0.5, -0.5])

    def find(**changes):
        arguments = {"sampling_per_token_logps": sampling, "mask": mask} | changes
        return worst_examples(
            old,
            **arguments,
            advantages=advantages,
            prompt_ids=prompts,
            completion_ids=completions,
            decode=lambda ids: bytes(ids).decode(),
        )

    mismatch, improbable = find()
    assert mismatch == {"kind": "mismatch", "nats": 3.0, "advantage": -0.5, "prompt": "B", "completion": "e⟦f⟧g"}
    assert improbable == {"kind": "improbable", "nats": 9.0, "advantage": 0.5, "prompt": "A", "completion": "abc⟦d⟧"}
    assert find(mask=torch.zeros_like(mask)) == []
    diverged = torch.full_like(old, math.nan)
    assert worst_examples(diverged, sampling, mask, advantages, prompts, completions, bytes) == []
    unknown = sampling.clone()
    unknown[1] = math.nan
    assert [example["prompt"] for example in find(sampling_per_token_logps=unknown)] == ["A", "A"]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], False),
        ([7] * 15, False),
        ([7] * 16, True),
        ([1, 2, 3] + [7] * 16 + [4, 5], True),
        (list(range(100)), False),
        ([1, 2, 3, 4] * 4, True),
        ([1, 2, 3, 4] * 3, False),
        ([9, 9, 8] + [1, 2, 3, 4, 5] * 4, True),
        ([9, 9, 8] + [1, 2, 3, 4, 5] * 3 + [1, 2, 3, 4, 6], False),
        (list(range(64)) * 4, True),
        (list(range(65)) * 4, False),
        ([i // 2 for i in range(200)], False),
    ],
)
def test_loops_are_blocks_that_repeat_in_a_row(ids, expected):
    assert has_loop(ids) is expected


def test_garbled_text_has_bytes_that_are_no_character_before_its_end():
    assert is_garbled("a\ufffdb") and not is_garbled("ab") and not is_garbled("") and not is_garbled("ab\ufffd\ufffd")
