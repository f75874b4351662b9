r"""
Masters that a scheme quantizes to codes and scales that another tool chose.

AWQ, GPTQ and AutoRound choose scales by their own rules. A scheme computes the scale of a group from its masters
([`~trl_qarl.quantization.quantize`]), so the dequantized weights give back their scale only if they span the range
that the rule assumes. Every master within half a step rounds to the same code, and every master beyond the range to
the largest code. So one master per group can move to the value from which the rule derives the scale:

| grid | value from which the rule derives the scale | moved masters, in steps |
|---|---|---|
| INT4, INT8 | the largest magnitude is 7.5 (127.5) steps | -8 to -7.5; without a code -8 one 7 to 7.5; without both one -7 near -7.5 |
| with zero points | the ends are 15 (255) steps apart | none if -8 and 7 occur; both ends if one end is a single code short |
| signed scales | the largest weight is -8 steps | none |

The derived scale is off by up to 0.00014 of its value, which rounding to 16 bits removes. Groups that are one more
code short have no such masters: one of their codes moves outwards by one, while the other codes, scale and zero point
are kept. Groups of still fewer codes get the dequantized weights, with a smaller scale and other codes.
"""

import torch

from .schemes import Grid
from .tensors import LowBitTensor


# Distance of a moved master from a tie, in steps.
_FROM_TIE = 1e-3
# Relative reduction of a scale with zero points, so that the zero point is not a tie either; less than the resolution
# of 16-bit floats.
_SMALLER = 2.0**-13


@torch.no_grad()
def masters_on_grid(low_bit: LowBitTensor) -> torch.Tensor:
    """Return float32 masters that [`LowBitTensor.from_hp`] quantizes to `low_bit` wherever possible, for an integer
    weight `(N, K)` with scales in bfloat16 or float16. Floating-point codes raise `ValueError`."""
    grid = low_bit.scheme.grid
    if grid is None or grid.type != "int":
        raise ValueError(
            f"Scheme {low_bit.scheme.name!r} does not have integer codes; masters that reproduce other codes are unsupported. Start from "
            "the high-precision checkpoint."
        )
    codes, scale, *operands = low_bit.codes(), *low_bit.parts()[1:]
    codes, scale = codes.view(*scale.shape, -1), scale.float().unsqueeze(-1)
    if grid.has_zero_points:
        zero = operands[0].float().unsqueeze(-1)
        places = _with_zero_points(codes, zero, grid) - zero
    else:
        places = codes if grid.has_signed_scales else _symmetric(codes, grid)
    return (places * scale).view(low_bit.shape)


def compare_groups(ours: LowBitTensor, theirs: LowBitTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the groups `(N, K / group_size)` of two weights: whether scale and zero point are the same, and the
    number of differing codes."""
    codes, other_codes = (weight.codes().view(*weight.scale.shape, -1) for weight in (ours, theirs))
    pairs = zip(ours.parts()[1:], theirs.parts()[1:], strict=True)
    return torch.stack([part == other for part, other in pairs]).all(0), (codes != other_codes).sum(-1)


def _symmetric(codes: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return masters, in steps, for codes `(N, groups, group_size)` whose largest magnitude gives the scale."""
    smallest, largest = grid.quant_range
    edge = grid.scale_divisor
    is_short = codes.abs().amax(-1, keepdim=True) == largest - 1
    codes = torch.where(is_short & _first(codes.abs() == largest - 1), largest * codes.sign(), codes)
    places = codes.clamp(min=-edge)
    # Without the smallest code, the first 7 moves, else the first -7.
    lacks = codes.amin(-1, keepdim=True) > smallest
    has_largest = codes.amax(-1, keepdim=True) == largest
    up, down = _first(codes == largest), _first(codes == -largest)
    places = torch.where(lacks & up, edge, places)
    return torch.where(lacks & ~has_largest & down, _FROM_TIE - edge, places)


def _with_zero_points(codes: torch.Tensor, zero: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return masters, in steps from the code 0, for scales derived from the distance of the ends, zero included."""
    smallest, largest = grid.quant_range
    span = grid.scale_divisor * (1 - _SMALLER)
    low, high = _ends(codes, zero)
    # Two codes short: one end moves, so that the other is one short at most.
    is_short = high - low == largest - smallest - 2
    is_lower = is_short & ((high == largest) | (low == smallest + 1))
    codes = torch.where(is_lower & _first(codes == low), low - 1, codes)
    codes = torch.where(is_short & ~is_lower & _first(codes == high), high + 1, codes)
    low, high = _ends(codes, zero)
    # One end, `near`, moves close to a tie with the missing code, the other to the distance that the scale requires.
    places = codes
    for is_short, near, end, sign in (
        ((low == smallest + 1) & (high == largest), low, high, -1.0),
        ((low == smallest) & (high == largest - 1), high, low, 1.0),
    ):
        ends = codes == near, codes == end
        is_short &= ends[0].any(-1, keepdim=True) & ends[1].any(-1, keepdim=True)
        edge = near + sign * (0.5 - _SMALLER / 8)
        places = torch.where(is_short & _first(ends[0]), edge, places)
        places = torch.where(is_short & _first(ends[1]), edge - sign * span, places)
    return places


def _ends(codes: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest code of each group, including the code of zero."""
    return torch.minimum(codes.amin(-1, keepdim=True), zero), torch.maximum(codes.amax(-1, keepdim=True), zero)


def _first(where: torch.Tensor) -> torch.Tensor:
    """Mark the first true element along the last dimension."""
    return where & (where.cumsum(-1) == 1)
