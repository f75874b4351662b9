"""A padded batch becomes one row in which a prompt occurs once, and values of the row go back to the batch."""

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors

from trl_qarl.token_row import Layout, divide


# Two completions of one prompt, one of another.
IDS = torch.tensor([[1, 2, 3, 11, 12, 0], [1, 2, 3, 21, 22, 23], [0, 4, 5, 31, 0, 0]])
MASK = (IDS > 0).long()
LABELS = IDS.masked_fill((MASK == 0) | (torch.arange(6) < 3), -100)


def test_a_prompt_of_two_completions_occurs_once():
    layout = Layout.of(IDS, MASK, LABELS)
    assert layout.input_ids.tolist() == [[1, 2, 3, 11, 3, 21, 22, 4, 5]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1]]
    assert layout.labels.tolist() == [[-100, -100, 11, 12, 21, 22, 23, -100, 31]]
    assert layout.counts.tolist() == [[2, 2, *[1] * 7]]
    assert (layout.segments.query_lengths, layout.segments.key_lengths) == ((2, 2, 3, 2), (2, 4, 5, 2))
    assert layout.segments.runs == ((slice(2, 7), slice(0, 2)),)
    assert layout.segments.keys.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8]
    values = layout.unpack(layout.labels.float())
    assert torch.equal(values, LABELS[:, 1:].clamp(min=0).float())


def test_calls_of_copies_are_counted_together():
    """FSDP2 with mixed precision gives every layer a copy of its arguments."""
    layout = Layout.of(IDS, MASK, LABELS)
    _apply_to_tensors(torch.clone, {"layout": layout})["layout"].calls.append("sdpa")
    assert [*layout.calls] == ["sdpa"]


def test_prompts_of_one_completion_are_not_divided():
    layout = Layout.of(IDS[1:], MASK[1:], LABELS[1:])
    assert layout.input_ids.tolist() == [[1, 2, 3, 21, 22, 4, 5]] and (layout.segments.keys, layout.segments.runs) == (
        None,
        (),
    )
    assert layout.segments.query_lengths == layout.segments.key_lengths == (5, 2)


def test_sequences_without_a_scored_token_are_left_out():
    labels = LABELS.clone()
    labels[1] = -100
    assert Layout.of(IDS, MASK, labels).input_ids.tolist() == [[1, 2, 3, 11, 4, 5]]
    # A forward has at least one sequence, the shortest.
    layout = Layout.of(IDS, MASK, torch.full_like(LABELS, -100))
    assert layout.input_ids.tolist() == [[4, 5, 31]] and not layout.unpack(torch.ones(1, 3)).any()


def test_a_loss_of_every_token_gets_each_as_often_as_it_occurs():
    labels = LABELS.clone()
    labels[2] = -100
    layout = Layout.of(IDS, MASK, labels, every_token=True)
    occurring = torch.repeat_interleave(layout.input_ids[0], layout.counts[0])
    assert torch.equal(occurring.sort().values, IDS[MASK.bool()].sort().values)


@pytest.mark.parametrize(
    "mask",
    [torch.zeros(3, 6), torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]])],
    ids=["a sequence without tokens", "a hole before what is scored"],
)
def test_batches_that_no_row_can_hold_have_no_layout(mask):
    assert Layout.of(IDS, mask, LABELS) is None


@pytest.mark.parametrize(
    ("max_tokens", "rows"),
    [
        # Tokens: 2 of the first prompt, 2 and 3 of its completions; 2 in all of the other.
        (9, [(0, 3)]),
        (8, [(0, 2), (2, 3)]),
        (6, [(0, 1), (1, 2), (2, 3)]),
        (1, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_parts_of_a_batch_keep_groups_and_the_budget(max_tokens, rows):
    parts = divide(IDS, MASK, LABELS, max_tokens)
    assert [(part.start, part.stop) for part in parts] == rows
    for part in parts:
        assert Layout.of(IDS[part], MASK[part], LABELS[part]).input_ids.numel() <= max(max_tokens, 5)
