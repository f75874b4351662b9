import pytest

from trl_qarl.telemetry.text import has_loop, is_garbled


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


def test_garbled_text_has_invalid_bytes_before_its_end():
    assert is_garbled("a\ufffdb") and not is_garbled("ab") and not is_garbled("") and not is_garbled("ab\ufffd\ufffd")
