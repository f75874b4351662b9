"""The lower bound of `benchmarks/wire_bounds.py`, on masters whose low bits are uniform."""

import math
import runpy
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def bounds():
    return runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/wire_bounds.py"))


def masters(size=100_000):
    """Anywhere in the steps of bf16 from 1 to 1.5, where one is 2 ** -7."""
    return 1.25 + 0.2 * torch.rand(size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("steps", [0.1, 0.5, 1.25])
def test_the_bound_is_the_entropy_of_crossing_and_what_is_found(bounds, steps):
    old = masters()
    signs = torch.randint(2, old.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    new = old + signs * steps * 2**-7
    told, sized, changed = bounds["bits_when_told"](old, new)
    p = steps % 1
    entropy = -p * math.log2(p) - (1 - p) * math.log2(1 - p)
    assert told == pytest.approx(entropy * len(old), rel=1e-3)
    assert sized == pytest.approx((entropy + min(1, steps)) * len(old), rel=1e-3)
    assert changed == pytest.approx(min(1, steps) * len(old), rel=1e-3)
    # The same size and odds everywhere: nothing is left that a code of the values alone does not know, so it reaches the bound.
    found = bounds["row"]([old, new])
    assert found["exponents"] == pytest.approx(sized, rel=0.03)
    assert found["changed"] == pytest.approx(found["if uniform"], rel=0.03)
    assert found["exponents"] < found["sent"] < 1.5 * found["exponents"]


def test_where_the_step_may_change_nothing_is_counted(bounds):
    old = torch.tensor([1.0, 1.9999, 0.0, -1.0, 1.5])
    assert bounds["bits_when_told"](old, old + 2**-8)[0] == pytest.approx(1.0)


def test_a_context_that_says_all_leaves_nothing_to_be_sent(bounds):
    changes = torch.tensor([0, 65535, 0, 65535])
    assert bounds["entropy_given"](changes, torch.tensor([1, 2, 1, 2])) == pytest.approx(0)
    assert bounds["entropy_given"](changes, torch.tensor([1, 1, 2, 2])) == pytest.approx(4)
