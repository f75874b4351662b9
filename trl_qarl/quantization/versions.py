"""
Weights of an earlier update, kept to be restored for a forward or a weight sync.

For quantized layers a version keeps the codes and scales without a copy, because an update of the master makes new
ones. For trained parameters in high precision it keeps a copy. Masters are not kept, so a version can compute and be
published, but not trained.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from .inventory import Inventory
from .storage import refresh, storage_of
from .tensors import LowBitTensor


class KeptVersion(NamedTuple):
    """The trained weights of a model as sent to an engine: `low_bit` forms of quantized weights by name, and every
    other trained parameter in its own dtype. If they are sharded, these are the parts of this process."""

    low_bit: dict[str, LowBitTensor]
    others: dict[str, torch.Tensor]

    def state(self) -> dict[str, Any]:
        """Return the version as plain tensors, for a file."""
        return {"low_bit": {name: kept.parts() for name, kept in self.low_bit.items()}, "others": self.others}

    @classmethod
    def of_state(cls, state: dict[str, Any], model: nn.Module) -> "KeptVersion":
        """Return the inverse of [`~KeptVersion.state`]; `model` has the same layers."""
        refresh(model)
        weights = dict(Inventory.of(model).weights())
        low_bit = {}
        for name, parts in state["low_bit"].items():
            like = weights[name].low_bit_weight()
            low_bit[name] = LowBitTensor.from_parts(parts, like.scheme, like.orig_dtype, like.gathered_shape)
        return cls(low_bit, state["others"])


def kept_version(model: nn.Module) -> KeptVersion:
    """Return the current version of `model`, which is prepared by [`prepare_model`] or unquantized."""
    # A gathered weight is not a part of this process.
    refresh(model)
    weights = dict(Inventory.of(model).weights())
    masters = {id(weight.parameter) for weight in weights.values()}
    # A detached weight has the same parts without the cache of larger operands.
    low_bit = {name: weight.low_bit_weight().detach() for name, weight in weights.items() if weight.is_trained}
    others = {
        name: storage_of(parameter).local(parameter).detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in masters
    }
    return KeptVersion(low_bit, others)


@contextmanager
def at_version(model: nn.Module, kept: KeptVersion) -> Iterator[None]:
    """While open, `model` computes and publishes with the weights of `kept`, bit for bit. The masters of quantized
    layers stay, and no code counts as changed."""
    refresh(model)
    parameters, weights = dict(model.named_parameters()), dict(Inventory.of(model).weights())
    with ExitStack() as stack:
        # Last on leaving: drop weights that were gathered of this version.
        stack.callback(refresh, model)
        for name, value in kept.others.items():
            stack.enter_context(storage_of(parameters[name]).holding(parameters[name], value))
        # After the others, because an adapter may be part of a quantized weight.
        for name, low_bit in kept.low_bit.items():
            stack.enter_context(weights[name].holding(low_bit.detach()))
        yield
