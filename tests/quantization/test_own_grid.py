"""Masters that give codes and scales of another tool back, for codes of every kind."""

import pytest
import torch

from trl_qarl.quantization.formats.registry import format_of
from trl_qarl.quantization.own_grid import compare_groups, masters_on_grid
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


def other_tools_weight(scheme, seed, scale_dtype):
    """A weight whose groups use all codes or a few less at either end, with any zero point, and its codes
    `(64, 4, 32)`."""
    generator = torch.Generator().manual_seed(seed)
    smallest, largest = map(int, scheme.grid.quant_range)
    size = 128 // 4 if scheme.group_size else 128
    shape = (64, 128 // size, size)

    def randint(low, high, *rest):
        return torch.randint(low, high, (*shape[:2], *(rest or (1,))), generator=generator)

    low, high = smallest + randint(0, 3), largest - randint(0, 3)
    codes = (low + (high - low + 1) * torch.rand(shape, generator=generator)).floor().clamp(low, high)
    # Both ends occur, at any place.
    first = randint(0, size)
    codes.scatter_(-1, first, low.float()).scatter_(-1, (first + 1 + randint(0, size - 1)) % size, high.float())
    codes[0, 0] = 0
    scale = torch.ldexp(1 + torch.rand(shape[:2], generator=generator), randint(-12, 3)[..., 0]).to(scale_dtype)
    scale[1::2] = 2.0 ** randint(-12, 3)[1::2, :, 0].float()
    parts = [format_of(scheme.container).pack(codes.reshape(64, 128)), scale]
    if scheme.grid.has_zero_points:
        parts.append(randint(smallest, largest + 1)[..., 0].to(torch.int8))
    return LowBitTensor.of_parts(parts, scheme, torch.float32), codes


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["w4a16-observer", "w4a16", "w4a16-asym", "w8a16"])
def test_masters_give_codes_scales_and_zero_points_back_wherever_there_are_such(name, scale_dtype):
    scheme = get_scheme(name, 32 if name != "w8a16" else None)
    smallest, largest = scheme.grid.quant_range
    shares = []
    for seed in range(20):
        theirs, codes = other_tools_weight(scheme, seed, scale_dtype)
        masters = masters_on_grid(theirs)
        ours = LowBitTensor.from_hp(masters, scheme, scale_dtype)
        same, num_differing = compare_groups(ours, theirs)
        steps = masters.view_as(codes) / theirs.scale.float().unsqueeze(-1)
        low, high = codes.amin(-1), codes.amax(-1)
        if name == "w4a16":
            exact, moved = low == smallest, torch.zeros_like(same)
        elif theirs.zero_point is None:
            size = torch.maximum(-low, high)
            exact, moved = size >= largest, size == largest - 1
            # One master makes up for the code that does not occur.
            assert ((steps != codes).sum(-1) <= 1)[exact & (low > smallest)].all()
        else:
            zero = theirs.zero_point.float()
            steps += zero.unsqueeze(-1)
            is_inside = (low <= zero) & (zero <= high)
            span = torch.maximum(high, zero) - torch.minimum(low, zero)
            # Where zero is an end and no code is there, the weights stay.
            assert (steps == codes)[(span == 14) & ~is_inside].all()
            exact, moved = (span == 15) | (is_inside & (span == 14)), is_inside & (span == 13)
            # Elsewhere zero is an end itself, and no master is there to be moved.
            reachable = is_inside | (span == 15)
            exact, moved, same = exact & reachable, moved & reachable, same & reachable
        assert torch.equal(same, exact | moved), seed
        assert (num_differing[exact] == 0).all() and (num_differing[moved] == 1).all()
        # In units of the scale a master is not further from its code than others of this code are, or of the code
        # beside it.
        assert ((steps - codes).abs() <= 0.5 + moved.unsqueeze(-1) + 1e-4)[same].all()
        shares.append(same.double().mean())
    assert 0.2 < torch.stack(shares).mean() < 1


def test_groups_are_compared_by_scale_and_zero_point_and_by_codes():
    scheme = get_scheme("w4a16-asym", 32)
    theirs, _ = other_tools_weight(scheme, 0, torch.bfloat16)
    for changed in range(3):
        parts = [part.clone() for part in theirs.parts()]
        if changed == 0:
            # Two codes of a word, in the first group of a row.
            parts[0][5, 1] ^= 0x11
        else:
            parts[changed][5, 1] += 1
        same, num_differing = compare_groups(LowBitTensor.of_parts(parts, scheme, torch.float32), theirs)
        assert (~same).nonzero().tolist() == ([] if changed == 0 else [[5, 1]])
        assert num_differing.nonzero().tolist() == ([[5, 0]] if changed == 0 else [])
        assert num_differing.sum() == (2 if changed == 0 else 0)


def test_floating_point_codes_are_refused():
    with pytest.raises(ValueError, match="'mxfp4a16'"):
        masters_on_grid(LowBitTensor.from_hp(torch.randn(4, 32), get_scheme("mxfp4a16"), torch.bfloat16))
