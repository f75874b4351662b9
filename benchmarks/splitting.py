"""
Outlier channel splitting (OCS, https://arxiv.org/abs/1901.09504): duplicates outlier channels at half magnitude.
Transparent to the engine.

The inputs of `down_proj` are the rows of `gate_proj` and `up_proj`, so repeating these rows duplicates a channel. The
inputs of other layers come from norms or heads, whose channels cannot be repeated.

A weight `w` with code `q` and scale `s` becomes `floor(q / 2) s + r` and `ceil(q / 2) s + r` with `r = (w - q s) / 2`.
At the scale `s`, both halves are within half a step of their codes, including ties, and the codes sum to `q`. Only the
scale changes: groups that lose their largest weight get a smaller one.
"""

import math

import torch
from torch import nn

from trl_qarl.quantization.schemes import QuantScheme
from trl_qarl.quantization.tensors import LowBitTensor


# Largest remainder of a half, in steps; 0.5 would be a tie. The largest weight of a group can be a whole step from
# code 7 if it has the sign of the missing code 8. Clamping moves such a weight by at most 0.0002 steps.
_MOST = 0.4999


@torch.no_grad()
def split_outlier_channels(
    model: nn.Module, scheme: QuantScheme, share: float, scale_dtype: torch.dtype = torch.float32
) -> int:
    """
    Split the input channels of each `down_proj` with the largest weights in place, before `model` is quantized.

    Args:
        model (`nn.Module`):
            A transformers model in float32 (16 bits round the halves once more), with `gate_proj`, `up_proj` and
            `down_proj`; `intermediate_size` of its configuration grows.
        scheme ([`QuantScheme`]):
            Scheme whose codes remain the same at the same scale.
        share (`float`):
            Share of the channels to split, in (0, 1]; rounded up to whole groups of `scheme`.
        scale_dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Dtype of the scales.

    Returns:
        `int`: number of channels added to each layer.

    Raises:
        ValueError: for another share, a scheme without groups of integer codes, or a model whose MLPs have other
        projections or sizes.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share} is not in (0, 1]. A few hundredths split the channels that matter.")
    grid = scheme.grid
    if scheme.group_size is None or grid is None or grid.type != "int":
        raise ValueError(
            f"Scheme {scheme.name!r} has no groups of integer codes to split. Choose w4a16, w3a16 or w2a16."
        )
    size = model.config.intermediate_size
    mlps = [m for m in model.modules() if all(type(getattr(m, name, None)) is nn.Linear for name in _NAMES)]
    others = {mlp.down_proj.in_features for mlp in mlps} - {size}
    if not mlps or others:
        raise ValueError(
            f"{type(model).__name__} has {len(mlps)} MLPs of gate_proj, up_proj and down_proj, with {sorted(others) or 'no'} channels beside "
            f"intermediate_size={size}; all need as many. Mixtures and models that are quantized already are not split."
        )
    group = scheme.group_size_for(size)
    count = group * math.ceil(share * size / group)
    for mlp in mlps:
        _split(mlp, scheme, count, group, scale_dtype)
    model.config.intermediate_size = size + count
    return count


_NAMES = ("gate_proj", "up_proj", "down_proj")


def _split(mlp: nn.Module, scheme: QuantScheme, count: int, group: int, scale_dtype: torch.dtype) -> None:
    down = mlp.down_proj.weight
    channels = down.abs().amax(0).topk(count).indices
    low_bit = LowBitTensor.from_hp(down.detach(), scheme, scale_dtype)
    step = low_bit.scale.float().repeat_interleave(group, 1)[:, channels]
    codes = (low_bit.dequantize(torch.float32)[:, channels] / step).round()
    rest = ((down[:, channels] - codes * step) / step / 2).clamp(-_MOST, _MOST)
    lower = (codes / 2).floor()
    halves = [((part + rest) * step).to(down.dtype) for part in (lower, codes - lower)]
    mlp.down_proj.weight = nn.Parameter(torch.cat([down.index_copy(1, channels, halves[0]), halves[1]], 1))
    mlp.down_proj.in_features += count
    for layer in (mlp.gate_proj, mlp.up_proj):
        layer.out_features += count
        for name, values in [*layer.named_parameters()]:
            setattr(layer, name, nn.Parameter(torch.cat([values, values[channels]])))
