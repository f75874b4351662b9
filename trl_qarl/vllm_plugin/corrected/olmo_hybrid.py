"""OLMo Hybrid."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn
from vllm.model_executor.models.olmo_hybrid import OlmoHybridForCausalLM  # noqa: F401


def _with_parts(make_loader: Callable[..., Callable[..., None]]) -> Callable[..., Any]:
    """Decorate what makes the loader of a convolution whose parts have these `sizes` in a checkpoint, to find which
    part a tensor is (https://github.com/vllm-project/vllm/pull/55858), or that it is the whole."""

    @wraps(make_loader)
    def make(sizes: list[int], *ranks: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        load = make_loader(sizes, *ranks)

        # vLLM's reload sets the argument of this name.
        def load_parts(param: torch.Tensor, tensor: torch.Tensor) -> None:
            part = getattr(tensor, "shard_id", None)
            for number, rows in enumerate(tensor.split(sizes)) if part is None else [(part, tensor)]:
                load(param, rows, number)

        return load_parts

    return make


olmo_gdn_linear_attn._make_fused_conv1d_weight_loader = _with_parts(
    olmo_gdn_linear_attn._make_fused_conv1d_weight_loader
)
