"""MiniCPM3."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.models import minicpm3

from ...replacing import replaced


MiniCPM3ForCausalLM = minicpm3.MiniCPM3ForCausalLM


def _with_name(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate what makes MiniCPM3's attention, and gives `q_a_proj` no name, by which a checkpoint may leave it in
    high precision."""

    @wraps(init)
    def __init__(self: Any, *args: Any, prefix: str, **kwargs: Any) -> None:
        make = minicpm3.ReplicatedLinear

        def make_linear(*sizes: int, prefix: str = f"{prefix}.q_a_proj", **options: Any) -> torch.nn.Module:
            return make(*sizes, prefix=prefix, **options)

        with replaced(minicpm3, ReplicatedLinear=make_linear):
            init(self, *args, prefix=prefix, **kwargs)

    return __init__


minicpm3.MiniCPM3Attention.__init__ = _with_name(minicpm3.MiniCPM3Attention.__init__)
