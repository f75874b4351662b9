"""
Weights of an earlier update, kept and put back for a forward or a weight sync.

Of a quantized layer the codes and scales are kept, which a new master leaves alone, so they cost no copy; of what is
trained in high precision a copy. Masters are not kept: a version computes and is published, it is not trained.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from .inventory import Inventory
from .storage import refresh, storage_of
from .tensors import LowBitTensor


__all__ = ["KeptVersion", "at_version", "kept_version"]


class KeptVersion(NamedTuple):
    """The trained weights of a model as an engine is sent them, of a sharded one the parts that this process holds:
    each quantized weight that is trained, by its name, and every other trained parameter in its own dtype."""

    low_bit: dict[str, LowBitTensor]
    others: dict[str, torch.Tensor]

    def state(self) -> dict[str, Any]:
        """Return plain tensors, for a file."""
        return {"low_bit": {name: kept.parts() for name, kept in self.low_bit.items()}, "others": self.others}

    @classmethod
    def of_state(cls, state: dict[str, Any], model: nn.Module) -> "KeptVersion":
        """Return what [`~KeptVersion.state`] was made of; `model` has the same layers."""
        refresh(model)
        weights = dict(Inventory.of(model).weights())
        low_bit = {name: _low_bit(weights[name].low_bit_weight(), parts) for name, parts in state["low_bit"].items()}
        return cls(low_bit, state["others"])


def kept_version(model: nn.Module) -> KeptVersion:
    """Keep the weights that `model`, prepared by [`prepare_model`] or unquantized, has now."""
    # What is gathered of a sharded model is not a part of this process.
    refresh(model)
    weights = dict(Inventory.of(model).weights())
    masters = {id(weight.parameter) for weight in weights.values()}
    low_bit = {name: _low_bit(weight.low_bit_weight()) for name, weight in weights.items() if weight.is_trained}
    others = {
        name: storage_of(parameter).local(parameter).detach().clone()
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
    refresh(model)
    parameters, weights = dict(model.named_parameters()), dict(Inventory.of(model).weights())
    with ExitStack() as stack:
        # When the others are as they were, what was gathered of this version goes.
        stack.callback(refresh, model)
        for name, value in kept.others.items():
            stack.enter_context(storage_of(parameters[name]).holding(parameters[name], value))
        # After these, as an adapter may be part of what is quantized.
        for name, low_bit in kept.low_bit.items():
            stack.enter_context(weights[name].holding(_low_bit(low_bit)))
        yield


def _low_bit(like: LowBitTensor, parts: Any = None) -> LowBitTensor:
    """Return a weight of its own or other `parts`, without what products have made of its codes, which is larger."""
    parts = like.parts() if parts is None else parts
    return LowBitTensor.of_parts(parts, like.scheme, like.orig_dtype, like.gathered_shape)
