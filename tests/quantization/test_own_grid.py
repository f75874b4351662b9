"""Masters that give the weights of another tool back, for codes of every kind."""

import pytest
import torch

from trl_qarl.quantization.formats.registry import format_of
from trl_qarl.quantization.own_grid import compare_groups, masters_on_grid
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


def other_tools_weight(scheme, seed, scale_dtype):
    """A weight whose groups use all codes or a few less at either end, and its codes `(64, 4, 32)`."""
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
    return LowBitTensor.of_parts(parts, scheme, torch.float32), codes


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["w4a16", "w4a8-int8", "w8a16"])
def test_masters_give_weights_back_wherever_there_are_such(name, scale_dtype):
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
        size = torch.maximum(-low, high)
        if name == "w8a16":
            exact, moved = size >= largest, size == largest - 1
        else:
            exact, moved = low == smallest, size == largest
            # The weight that becomes the largest is the one that was.
            assert (steps.abs().amax(-1) == 8)[moved | exact].all()
        assert torch.equal(same, exact | moved), seed
        assert (num_differing[exact] == 0).all() and (num_differing[moved] == 1).all()
        assert ((steps != codes).sum(-1) <= 1)[(exact & (low > smallest)) | moved].all()
        # In units of the scale a master is not further from its code than others of this code are, or of the code
        # beside it.
        assert ((steps - codes).abs() <= 0.5 + moved.unsqueeze(-1) + 1e-4)[same].all()
        shares.append(same.double().mean())
    assert 0.2 < torch.stack(shares).mean() < 1


def test_groups_are_compared_by_steps_and_by_weights():
    scheme = get_scheme("w4a16", 32)
    theirs, _ = other_tools_weight(scheme, 0, torch.bfloat16)
    # Two codes of a word, in the first group of a row.
    codes, scale = theirs.qdata.clone(), theirs.scale.clone()
    codes[5, 1] ^= 0x11
    scale[7, 1] *= 2
    same, num_differing = compare_groups(LowBitTensor(codes, scale, scheme, torch.float32), theirs)
    assert (~same).nonzero().tolist() == [[7, 1]]
    assert num_differing[5].tolist() == [2, 0, 0, 0] and num_differing.nonzero().tolist() == [[5, 0], [7, 1]]
    # Codes and scales of opposite signs are the same weights.
    codes = theirs.format.pack(-theirs.codes().clamp(-7, 7))
    negated = LowBitTensor(codes, -theirs.scale, scheme, torch.float32)
    same, num_differing = compare_groups(negated, theirs)
    lowest = theirs.codes().view(*theirs.scale.shape, -1) == -8
    assert same.all() and torch.equal(num_differing, lowest.sum(-1))


def test_floating_point_codes_are_refused():
    with pytest.raises(ValueError, match="'mxfp4a16'"):
        masters_on_grid(LowBitTensor.from_hp(torch.randn(4, 32), get_scheme("mxfp4a16"), torch.bfloat16))
