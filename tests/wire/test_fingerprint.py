import pytest
import torch

from trl_qarl.wire.fingerprint import (
    _sums,
    _sums_in_steps,
    differing_entries,
    fingerprint,
    fingerprint_differences,
    fingerprints,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int8, torch.float8_e4m3fn])
def test_any_single_changed_byte_changes_the_fingerprint(dtype):
    data = torch.randint(0, 100, (40, 24), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    tensor = data.view(dtype)
    seen = {fingerprint(tensor)}
    for position in range(0, data.numel(), 7):
        changed = data.clone().view(-1)
        changed[position] += 1
        seen.add(fingerprint(changed.view(40, 24).view(dtype)))
    assert len(seen) == 1 + len(range(0, data.numel(), 7))


def test_a_slice_has_the_fingerprint_of_its_copy():
    tensor = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    for rows in (slice(1, 4), slice(3, 9), slice(0, 0)):
        assert fingerprint(tensor[rows]) == fingerprint(tensor[rows].clone())
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous())
    assert fingerprint(torch.tensor(3.0)).startswith("float32[]")


def test_entries_of_a_stack_are_told_apart():
    """Short ones, that are mixed together, and such as take several blocks; an odd number of bytes each."""
    for shape in ((5, 3, 7), (9, 300, 80), (3, 2**15 + 1, 3)):
        stack = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        before = fingerprint(stack)
        assert before.split(" ")[-1].split("-") == [fingerprint(entry).split(" ")[-1] for entry in stack]
        stack[[1, 2]] = stack[[2, 1]]
        [(first, ours, theirs), (second, *_)] = differing_entries("gate_up_proj", before, fingerprint(stack))
        assert (first, second) == ("gate_up_proj[1]", "gate_up_proj[2]") and ours != theirs
    assert list(differing_entries("a", before, before)) == []
    assert list(differing_entries("a", before, fingerprint(stack[0]))) == [("a", before, fingerprint(stack[0]))]


def test_tensors_are_fingerprinted_together(monkeypatch):
    tensors = {
        "a": torch.arange(12.0),
        "experts": torch.arange(24, dtype=torch.int32).view(2, 3, 4),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(1.0, dtype=torch.bfloat16),
    }
    expected = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    waited, to_list = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: (waited.append(tensor), to_list(tensor))[1])
    assert fingerprints(tensors.items()) == expected and list(fingerprints([])) == []
    assert len(waited) == 1


def test_a_known_value_pins_the_definition():
    mask = 2**64 - 1

    def mix(word):
        word = (word ^ (word >> 32)) * 0xBF58476D1CE4E5B9 & mask
        return word ^ (word >> 29)

    def odd(index):
        x = (index + 1) * 0x9E3779B97F4A7C15 & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return (x ^ (x >> 31)) | 1

    blocks = torch.randint(-(2**63), 2**63 - 1, (3 * 2**15 + 5,), generator=torch.Generator().manual_seed(0))
    for words in ([3, -5, 2**62, -(2**63)], blocks.tolist()):
        terms = ((2 * (i >> 15) + 1) * odd(i % 2**15) * mix(word & mask) for i, word in enumerate(words))
        assert fingerprint(torch.tensor(words)) == f"int64[{len(words)}] {sum(terms) & mask:016x}"


@pytest.mark.parametrize("num_words", [0, 1, 2**14, 2**15 + 1, 3 * 2**15 + 77, 7 * 2**15 + 2**14 + 3])
def test_cpu_and_gpu_take_their_own_steps_to_the_same_sums(monkeypatch, num_words):
    """A CPU takes parts of blocks, a GPU several blocks at a time."""
    monkeypatch.setattr("trl_qarl.wire.fingerprint._BLOCKS_AT_A_TIME", 3)
    generator = torch.Generator().manual_seed(0)
    entries = torch.randint(-(2**63), 2**63 - 1, (2, num_words), generator=generator)
    assert _sums(entries).tolist() == _sums_in_steps(entries).tolist()


def test_differences_name_each_kind():
    lines = fingerprint_differences({"a": "1", "b": "2", "c": "3"}, {"b": "2", "c": "4", "d": "5"})
    assert lines == ["a: the engine received nothing", "d: the learner did not announce it", "c: learner 3, engine 4"]
    assert fingerprint_differences({"a": "1"}, {"a": "1"}) == []
    many = fingerprint_differences({f"n{i}": "x" for i in range(9)}, {}, limit=2)
    assert many[-1] == "... and 7 more" and len(many) == 3
