import random
import tracemalloc

import numpy as np
import pytest
import torch

from trl_qarl.wire.delta import apply_delta, base_digest, elements, pack_delta
from trl_qarl.wire.fingerprint import fingerprint


def make_layer(num_rows=64, share=0.02, dtype=torch.bfloat16):
    """A packed matrix, its scales, a vector that does not change, and an empty tensor; before and after an update."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-(2**31), 2**31, (num_rows, 48), dtype=torch.int32, generator=generator)
    scales = torch.randn(num_rows, 6, generator=generator)
    old = {"q.weight_packed": codes, "q.weight_scale": scales.to(dtype), "norm.weight": torch.ones(9, dtype=dtype)}
    old["none"] = torch.empty(0, dtype=dtype)
    flips = torch.rand(codes.shape, generator=generator) < share
    new = old | {"q.weight_packed": codes ^ (flips.int() << 13)}
    new["q.weight_scale"] = (scales * (1 + 0.05 * (torch.rand(scales.shape, generator=generator) < share))).to(dtype)
    return old, new


def pack(old, new, base=None):
    base = base or {name: fingerprint(tensor) for name, tensor in old.items()}
    return pack_delta([(name, base[name], elements(old[name]), elements(new[name])) for name in old])


def apply(block, held, base=None):
    """A copy of `held` with the changes applied."""
    copies = {name: tensor.clone() for name, tensor in held.items()}
    base = base or {name: fingerprint(tensor) for name, tensor in held.items()}
    names = apply_delta(block, {name: elements(tensor) for name, tensor in copies.items()}, base)
    return names, copies


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.1])
def test_changes_make_the_new_tensors_of_the_old_ones(dtype, share):
    old, new = make_layer(5000, share, dtype)
    block, left_out = pack(old, new)
    assert left_out == ["none"]
    names, copies = apply(block, old)
    assert names == ["q.weight_packed", "q.weight_scale", "norm.weight"]
    for name in names:
        assert np.array_equal(elements(copies[name]), elements(new[name])), name
    # A flip takes a byte for the distance and one for the value, and neither is incompressible.
    assert len(block) < 400 + 2.5 * sum(int((elements(old[n]) != elements(new[n])).sum()) for n in names)


def test_elements_of_every_value_and_distance_survive():
    """All 65536 values of two bytes, before and after; distances below, at and above 255."""
    draw = np.random.default_rng(0)
    old = np.arange(2**16, dtype=np.uint16).repeat(40)
    new = old.copy()
    for distance in (1, 254, 255, 256, 257, 70_000, 2_097_151, 2_097_153):
        new[distance] = draw.integers(2**16)
    at = draw.choice(len(old), 2**16, replace=False)
    new[at] = np.arange(2**16, dtype=np.uint16)
    narrow_old, narrow_new = old.view(np.uint8).copy(), new.view(np.uint8).copy()
    block, left_out = pack_delta([("wide", "a", old, new), ("narrow", "b", narrow_old, narrow_new)])
    assert not left_out
    held = {"wide": old.copy(), "narrow": narrow_old.copy()}
    assert apply_delta(block, held, {"wide": "a", "narrow": "b"}) == ["wide", "narrow"]
    assert np.array_equal(held["wide"], new) and np.array_equal(held["narrow"], narrow_new)


def test_a_tensor_of_which_most_changed_is_left_to_be_sent_whole():
    old, new = make_layer()
    new["q.weight_scale"] = -old["q.weight_scale"]
    block, left_out = pack(old, new)
    assert left_out == ["q.weight_scale", "none"]
    assert apply(block, old)[0] == ["q.weight_packed", "norm.weight"]
    # A sum of bytes that nothing is gained by, is none.
    assert pack_delta([("a", "x", np.zeros(4, np.uint8), np.ones(4, np.uint8))]) == (b"", ["a"])


def test_a_tensor_that_changed_everywhere_by_little_takes_few_bits_per_element():
    draw = np.random.default_rng(0)
    old = draw.integers(2**16, size=50_000).astype(np.uint16)
    new = old + draw.choice(np.array([1, 2, -1, -2], np.int16), size=len(old)).view(np.uint16)
    block, left_out = pack_delta([("all", "a", old, new)])
    # Four values are two bits; where they are and that they are small takes next to nothing more.
    assert not left_out and len(block) < 200 + len(old) * 2.4 / 8
    assert apply_delta(block, held := {"all": old.copy()}, {"all": "a"}) == ["all"]
    assert np.array_equal(held["all"], new)


def test_memory_grows_by_some_bytes_for_each_change_on_both_sides():
    """Positions are eight bytes each, and there are never more of them than in a block of two million elements."""
    peaks = {}
    for millions in (4, 6):
        old = np.arange(millions << 20, dtype=np.uint32).astype(np.uint16)
        held = {"wide": old.copy()}
        new = old + np.uint16(1)
        tracemalloc.start()
        block, _ = pack_delta([("wide", "a", old, new)])
        peaks["pack", millions] = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        apply_delta(block, held, {"wide": "a"})
        peaks["apply", millions] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.array_equal(held["wide"], new)
    assert all(peaks[side, 6] - peaks[side, 4] < 8 * 2**21 for side in ("pack", "apply"))


def test_changes_are_for_what_was_confirmed_and_nothing_else():
    old, new = make_layer()
    block, _ = pack(old, new)
    base = {name: fingerprint(tensor) for name, tensor in old.items()}
    with pytest.raises(ValueError, match=r"q.weight_packed: the changes are for int32\[64, 48\] \w+, but int32"):
        apply(block, new)
    with pytest.raises(ValueError, match="but nothing was confirmed last"):
        apply(block, old, {"norm.weight": base["norm.weight"]})
    other = old | {"q.weight_packed": old["q.weight_packed"][:5].contiguous()}
    with pytest.raises(ValueError, match="q.weight_packed has another size: the changes are for"):
        apply(block, other, base)
    assert base_digest(base) != base_digest({**base, "none": "x"}) and base_digest({}) == ""


def test_no_damage_is_taken_for_the_new_tensors():
    """A block that is cut off at any place, continued, or changed in one bit is an error that changes nothing."""
    old, new = make_layer(16)
    block, _ = pack(old, new)
    draw = random.Random(0)
    damaged = [block[:length] for length in (0, 3, 7, 20, len(block) // 2, len(block) - 1)] + [block + b"x"]
    for bit in draw.sample(range(8 * len(block)), min(800, 8 * len(block))):
        changed = bytearray(block)
        changed[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(changed))
    base = {name: fingerprint(tensor) for name, tensor in old.items()}
    for data in damaged:
        held = {name: elements(tensor.clone()) for name, tensor in old.items()}
        with pytest.raises(ValueError, match="damaged"):
            apply_delta(data, held, base)
        assert all(np.array_equal(elements(old[name]), held[name]) for name in old)
