r"""
Masters that a scheme quantizes to the weights that another tool chose.

GPTQ and AutoRound choose scales by their own rules. A scheme computes the scale of a group from its masters
([`~trl_qarl.quantization.quantize`]), so dequantized weights give back their scale only if the largest of them is the
number from which the rule derives it. Masters are the dequantized weights, except for one per group:

| grid | number from which the rule derives the scale | moved masters, in steps |
|---|---|---|
| signed scales (`w4a16`, `w4a8-int8`) | the largest weight is 8 steps, of either sign | without a code -8 one 7 to 8, else one -7 to -8 |
| INT4 of `w4a8`, INT8 | the largest magnitude is 7.5 (127.5) steps | -8 to -7.5; without a code -8 one 7 to 7.5; without both one -7 near -7.5 |

With signed scales a group without a code -8 starts with one weight changed by one step, and with the opposite sign of
scale and codes if that weight is positive. With the other grids every master within half a step keeps its code; the
derived scale is off by up to 0.00014 of its value, which rounding to 16 bits removes, and groups that are one more
code short start with one weight changed by one step. Groups of still fewer codes get the dequantized weights, with a
smaller scale and other codes.
"""

import torch

from .schemes import Grid
from .tensors import LowBitTensor


# Distance of a moved master from a tie, in steps.
_FROM_TIE = 1e-3


@torch.no_grad()
def masters_on_grid(low_bit: LowBitTensor) -> torch.Tensor:
    """Return float32 masters that [`LowBitTensor.from_hp`] quantizes to the weights of `low_bit` wherever possible,
    for an integer weight `(N, K)` with scales in bfloat16 or float16. Floating-point codes raise `ValueError`."""
    grid = low_bit.scheme.grid
    if grid is None or grid.type != "int":
        raise ValueError(
            f"Scheme {low_bit.scheme.name!r} does not have integer codes; masters that reproduce other codes are unsupported. Start from "
            "the high-precision checkpoint."
        )
    scale = low_bit.scale.float().unsqueeze(-1)
    codes = low_bit.codes().view(*low_bit.scale.shape, -1)
    places = _signed(codes, grid) if grid.has_signed_scales else _symmetric(codes, grid)
    return (places * scale).view(low_bit.shape)


def compare_groups(ours: LowBitTensor, theirs: LowBitTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the groups `(N, K / group_size)` of two weights: whether the size of a step is the same, and the number
    of differing weights."""
    weights, others = (w.dequantize(torch.float32).view(*w.scale.shape, -1) for w in (ours, theirs))
    return ours.scale.abs() == theirs.scale.abs(), (weights != others).sum(-1)


def _signed(codes: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return masters, in steps, for codes `(N, groups, group_size)` whose largest weight gives the scale."""
    smallest, largest = grid.quant_range
    lacks = codes.amin(-1, keepdim=True) > smallest
    has_largest = codes.amax(-1, keepdim=True) == largest
    places = torch.where(lacks & _first(codes == largest), -smallest, codes)
    return torch.where(lacks & ~has_largest & _first(codes == -largest), smallest, places)


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


def _first(where: torch.Tensor) -> torch.Tensor:
    """Mark the first true element along the last dimension."""
    return where & (where.cumsum(-1) == 1)
