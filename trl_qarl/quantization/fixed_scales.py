"""
Scales that a quantized checkpoint gives, and that training keeps.

GPTQ, AutoRound and quantization-aware training choose scales by rules of their own, which no master gives back. A
model that starts from such a checkpoint therefore keeps the scales as they are:

    w = s q  (masters at the start),  q = round(clamp(w / s, qmin, qmax)),  s fixed

The first forward has the checkpoint's codes and scales, and an update changes a code only where it moves a master by
more than half a step. A master beyond the range keeps the outermost code.

The scales belong to the model until [`~trl_qarl.quantization.swap.prepare_model`] quantizes it. A grid of fewer bits
takes a multiple of the scales of the container's finest grid, which are the ones that are kept.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from .formats.base import dtype_of_scales
from .names import base_model
from .schemes import SCHEMES, QuantScheme
from .weight import QuantizedWeight, num_steps


_ATTRIBUTE = "_trl_qarl_fixed_scales"


class FixedScale(NamedTuple):
    """The scales `(N, K / group_size)` or `(N, 1)` of a weight on the finest grid of `container`, by its name."""

    container: str
    group_size: int | None
    scale: torch.Tensor


def fixed_scales(model: nn.Module) -> dict[str, FixedScale]:
    """Return the fixed scales of a model's weights, by the names of linear layers and of parameters of experts."""
    return vars(base_model(model)).get(_ATTRIBUTE, {})


def fix_scales(model: nn.Module, scales: Mapping[str, FixedScale]) -> None:
    """Have `prepare_model` quantize `model` with these scales."""
    vars(base_model(model))[_ATTRIBUTE] = dict(scales)


def scales_fingerprint(scales: Mapping[str, FixedScale]) -> str:
    """Return 16 hexadecimal digits that differ for other scales or names."""
    digest = hashlib.sha256()
    for name, fixed in scales.items():
        digest.update(f"{name}{fixed.container}{tuple(fixed.scale.shape)}".encode())
        digest.update(fixed.scale.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def held_scale(weight: QuantizedWeight) -> FixedScale:
    """Return the scales of a frozen weight. `ValueError` is raised for NVFP4, whose scales are relative to a number
    that is chosen for masters."""
    container = weight.scheme.container
    if container.has_global_scale:
        raise ValueError(
            f"Masters cannot start from a checkpoint in {weight.scheme.name!r}. Start from the high-precision checkpoint, or train an "
            "adapter on it."
        )
    scale, step = weight.low_bit_weight().scale, num_steps(weight.scheme)
    return FixedScale(container.name, weight.group_size, scale if step == 1 else scale / step)


def fixed_schemes(
    schemes: Mapping[str, QuantScheme], scales: Mapping[str, FixedScale], dtype: torch.dtype
) -> dict[str, QuantScheme]:
    """Return the `schemes` of layers with the group size of their fixed scales. `ValueError` is raised for a layer
    with codes in another container, or with scales that an engine in `dtype` cannot hold."""
    found = dict(schemes)
    for weight, (container, group_size, scale) in scales.items():
        name = weight if weight in schemes else weight.rpartition(".")[0]
        if name not in schemes:
            continue
        scheme = schemes[name]
        if container != scheme.container.name:
            groups = "" if group_size is None else f" in groups of {group_size}"
            raise ValueError(
                f"The checkpoint holds {name!r} as {container!r}{groups}, and scheme {scheme.name!r} is {scheme.container.name!r}. Use "
                f"one of {[n for n, other in SCHEMES.items() if other.container.name == container]}, or start from the high-precision checkpoint."
            )
        held = dtype_of_scales(scheme, dtype)
        if not torch.equal(scale.to(held).float(), scale.float()):
            raise ValueError(
                f"The checkpoint has scales in {scale.dtype}, which {held} does not hold ({weight!r}): training would not start "
                "from its weights. Train in the dtype of the checkpoint (`bf16`, `fp16`), or in float32 with both false."
            )
        found[name] = scheme if group_size is None else replace(scheme, group_size=group_size)
    return found


def weight_name(layer: str, leaf: str) -> str:
    """Return the name of a weight: that of a linear layer, or of a parameter of experts."""
    return layer if leaf == "weight" else f"{layer}.{leaf}"
