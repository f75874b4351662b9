"""Attention in passes of bounded rows: the bits of decoding at any length."""

import pytest
import torch

from testing_utils.learners import make_attention, needs_vllm
from trl_qarl.bitwise import cpu


@pytest.fixture(params=["amx", "vec"])
def instructions(request, monkeypatch):
    """vLLM's kernels for processors with AMX, and those for AVX512 alone, which run here too."""
    if request.param == "vec":
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    elif not torch.cpu._is_amx_tile_supported():
        pytest.skip("no AMX")
    cpu._layout.cache_clear()
    yield
    cpu._layout.cache_clear()


@needs_vllm
@pytest.mark.parametrize(
    ("length", "num_heads", "num_key_heads", "head_dim"),
    # With AMX heads that share keys are rows of one pass if 32 is a multiple of their number. A tile of decoding has
    # 8,096 keys.
    [(5000, 2, 2, 64), (2500, 2, 2, 128), (3000, 3, 1, 64), (2000, 16, 1, 96), (9000, 2, 1, 64)],
)
def test_attention_has_the_bits_of_decoding_at_any_length(
    length, num_heads, num_key_heads, head_dim, instructions, monkeypatch
):
    attend = make_attention(length, num_heads, num_key_heads, head_dim)
    (whole,) = attend((0, length))
    # Chunks that begin and end anywhere, in one batch with decoding and with another prefill.
    ranges = [(0, 700), (700, 737), (737, 1500), (1500, length), (length - 1, length), (1, 1599)]
    for (start, end), output in zip(ranges, attend(*ranges), strict=True):
        assert torch.equal(output, whole[start:end]), (start, end)
    # One token at a time; first of some steps, then of all in one batch.
    decoded = {position: attend((position, position + 1))[0][0] for position in (0, 1, 736, 1376, length - 1)}
    monkeypatch.setattr(cpu, "PASS_ROWS", {})
    cpu._layout.cache_clear()
    (all_decoded,) = attend((0, length))
    assert all(torch.equal(all_decoded[position], row) for position, row in decoded.items())
    assert (whole != all_decoded).flatten(1).any(dim=1).nonzero().flatten().tolist() == []


@needs_vllm
@pytest.mark.parametrize("window", [1, 32, 100, 1500, 4000])
def test_attention_to_a_window_has_the_bits_of_decoding(window, instructions):
    attend = make_attention(3000, 4, 2, 64)
    (whole,) = attend((0, 3000), window=window)
    for start, end in ((0, 700), (700, 1999), *((p, p + 1) for p in (0, 31, 32, 99, 100, 1500, 1531, 2999))):
        assert torch.equal(attend((start, end), window=window)[0], whole[start:end]), (start, end)
    is_cut = (whole != attend((0, 3000))[0]).flatten(1).any(dim=1)
    assert not is_cut[:window].any() and (window > 3000 or is_cut[window + 32 :].any())


@needs_vllm
def test_a_prefill_of_vllm_has_other_bits_at_some_length(instructions, monkeypatch):
    """Without which all of this would be for nothing."""
    whole = make_attention(3000, 4, 2, 128)((0, 3000))[0]
    monkeypatch.setattr(cpu, "PASS_ROWS", dict.fromkeys(cpu.PASS_ROWS, 1 << 20))
    cpu._layout.cache_clear()
    prefill = make_attention(3000, 4, 2, 128)((0, 3000))[0]
    is_equal = (prefill == whole).flatten(1).all(dim=1)
    assert is_equal[:320].all() and not is_equal[2000:].all()


def test_requests_of_one_pass_see_what_they_saw():
    counts, keys = [1, 16, 17, 0, 40, 1], [9, 16, 30, 5, 40, 1]
    query_starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    starts, lengths, request = cpu.one_pass_requests(query_starts, torch.tensor(keys, dtype=torch.int32), 16)
    assert starts.dtype == lengths.dtype == torch.int32 and starts.diff().max() <= 16 and len(request) == 8

    def seen(starts, lengths, names):
        return [
            (name, end - (stop - query) + 1)
            for start, stop, end, name in zip(starts, starts[1:], lengths, names, strict=False)
            for query in range(start, stop)
        ]

    parts = seen(starts.tolist(), lengths.tolist(), request.tolist())
    assert parts == seen(query_starts.tolist(), keys, range(len(keys)))


def test_sequences_share_the_full_blocks_of_their_prompt():
    prompt = (0, 1, 2, 3, 4)
    seen = [prompt, (*prompt, 5, 6), (*prompt, 7)]
    counts = tuple(map(len, seen))
    slots, places, table, starts, lengths = cpu.blocks_of_keys((5, 2, 1), counts, sum(seen, ()), 2)
    assert (starts.tolist(), lengths.tolist()) == ([0, 5, 7, 8], [5, 7, 6])
    # Two blocks of all, the prompt's last one, and two and one of the others.
    assert int(table.max()) == 5 and len(places) == 10
    blocks = torch.full((6, 2), -1)
    blocks.view(-1)[slots] = places
    assert [tuple(blocks[row].flatten()[:count].tolist()) for row, count in zip(table, counts, strict=True)] == seen
