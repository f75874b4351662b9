"""BLOOM and GPT-NeoX, which join their attention by heads."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.models import bloom


BloomForCausalLM = bloom.BloomForCausalLM


def _without_shapes(reorder: Callable[..., Iterable[tuple[str, torch.Tensor]]]) -> Callable[..., Any]:
    """Decorate a loader's function that reorders the rows of a layer's tensors by heads, to leave alone the two
    numbers of `weight_shape`, which have no rows."""

    @wraps(reorder)
    def reorder_rows(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name.endswith("weight_shape"):
                yield name, tensor
            else:
                yield from reorder(model, [(name, tensor)])

    return reorder_rows


bloom.BloomModel._repack_qkv = _without_shapes(bloom.BloomModel._repack_qkv)
# The activation of BLOOM has a hyperbolic tangent; vLLM takes the error function.
bloom.get_act_fn = lambda name: get_act_fn({"gelu": "gelu_pytorch_tanh"}[name])
# vLLM 0.31 alone has it; later ones run GPT-NeoX by their Transformers backend.
if find_spec("vllm.model_executor.models.gpt_neox"):
    from vllm.model_executor.models.gpt_neox import GPTNeoXForCausalLM, GPTNeoXModel  # noqa: F401

    GPTNeoXModel._repack_qkv = _without_shapes(GPTNeoXModel._repack_qkv)
