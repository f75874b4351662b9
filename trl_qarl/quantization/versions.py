"""
Weights of an earlier update, kept and put back for a forward or a weight sync.

Of a quantized layer the codes and scales are kept, which a new master leaves alone, so they cost no copy; of what is
trained in high precision (embeddings, norms, biases, adapters) a copy. Masters are not kept: a version computes and is
published, it is not trained.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from .inventory import Inventory
from .tensors import LowBitTensor


__all__ = ["KeptVersion", "at_version", "kept_version"]


class KeptVersion(NamedTuple):
    """The trained weights of a model as an engine is sent them: each quantized weight that is trained, by its name,
    and every other trained parameter in its own dtype."""

    low_bit: dict[str, LowBitTensor]
    others: dict[str, torch.Tensor]

    def state(self) -> dict[str, Any]:
        """Return plain tensors, for a file."""
        return {"low_bit": {name: kept.parts() for name, kept in self.low_bit.items()}, "others": self.others}

    @classmethod
    def of_state(cls, state: dict[str, Any], model: nn.Module) -> "KeptVersion":
        """Return what [`~KeptVersion.state`] was made of; `model` has the same layers."""
        weights = dict(Inventory.of(model).weights())
        low_bit = {name: _low_bit(weights[name].low_bit_weight(), parts) for name, parts in state["low_bit"].items()}
        return cls(low_bit, state["others"])


def kept_version(model: nn.Module) -> KeptVersion:
    """Keep the weights that `model`, prepared by [`prepare_model`] or unquantized, has now."""
    weights = dict(Inventory.of(model).weights())
    masters = {id(weight.parameter) for weight in weights.values()}
    low_bit = {name: _low_bit(weight.low_bit_weight()) for name, weight in weights.items() if weight.is_trained}
    others = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in masters
    }
    return KeptVersion(low_bit, others)


@contextmanager
def at_version(model: nn.Module, kept: KeptVersion) -> Iterator[None]:
    """
    While open, `model` computes and publishes what it did when `kept` was made, bit for bit. The masters of quantized
    layers stay, and no code counts as changed.
    """
    parameters, weights = dict(model.named_parameters()), dict(Inventory.of(model).weights())
    current = {name: parameters[name].data for name in kept.others}
    with ExitStack() as stack:
        try:
            for name, value in kept.others.items():
                # Not copied into the tensor: what is kept of its value is kept for its storage, and must find that
                # again.
                parameters[name].data = value
            # After these, as an adapter may be part of what is quantized.
            for name, low_bit in kept.low_bit.items():
                stack.enter_context(weights[name].holding(_low_bit(low_bit)))
            yield
        finally:
            for name, value in current.items():
                parameters[name].data = value


def _low_bit(like: LowBitTensor, parts: Any = None) -> LowBitTensor:
    """Return a weight of `parts`, its own unless they are given, without what products have made of the codes, which
    is larger."""
    parts = like.parts() if parts is None else parts
    return LowBitTensor.of_parts(parts, like.scheme, like.orig_dtype, like.gathered_shape)
