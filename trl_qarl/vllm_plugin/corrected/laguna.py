"""Laguna."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.models import laguna


LagunaForCausalLM = laguna.LagunaForCausalLM


def _with_bias_of_router(load: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate Laguna's loader, which leaves out the bias of the router, a parameter of `routed_experts` in vLLM."""

    @wraps(load)
    def load_weights(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name.endswith("experts.e_score_correction_bias"):
                    experts = model.get_submodule(name.rpartition(".")[0])
                    experts.routed_experts.e_score_correction_bias.data.copy_(tensor)
                else:
                    yield name, tensor

        return load(model, others())

    return load_weights


laguna.LagunaModel.load_weights = _with_bias_of_router(laguna.LagunaModel.load_weights)
