"""Changes of a layer since the engine last confirmed it, so that nothing else has to be sent."""

from collections.abc import Mapping

import torch

from ..quantization.names import layer_of
from ..wire.delta import DELTA_PREFIX, base_digest, elements, pack_delta
from ..wire.protocol import is_adapter_tensor
from .transports import Tensors, Transport


__all__ = ["Deltas"]


class Deltas:
    """
    Turns layers into blocks of changes ([`trl_qarl.wire.delta`]). It keeps a copy of what was published last, in host memory,
    and so does each worker of the engine.

    Everything is sent where the engine does not hold exactly what the learner knows to be confirmed: the first time, after
    anything that failed, and to an engine that was started again.

    Args:
        transport ([`Transport`]):
            The way to the engine.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._copy: dict[str, torch.Tensor] = {}
        self._confirmed: Mapping[str, str] = {}

    def begin(self, published: Mapping[str, str]) -> dict[str, str]:
        """
        Ask the engine for the fingerprints that it holds, and return `published` if they are equal, otherwise nothing.

        Args:
            published (`Mapping[str, str]`):
                Fingerprints of the last publication, which the engine has confirmed; empty for an unknown state.
        """
        held = self._transport.keep_copy()
        self._confirmed = dict(published) if published and held == base_digest(published) else {}
        self._copy = {name: tensor for name, tensor in self._copy.items() if name in self._confirmed}
        return dict(self._confirmed)

    @torch.no_grad()
    def pack(self, layer: Tensors) -> Tensors:
        """Return what to send for a layer: a block of changes, and the tensors that are shorter than their changes."""
        changes, kept = [], []
        for name, tensor in layer:
            old, new = self._copy.get(name), tensor.cpu().contiguous()
            if old is not None and (old.shape, old.dtype) == (new.shape, new.dtype):
                changes.append((name, self._confirmed[name], elements(old), elements(new)))
            else:
                kept.append(name)
                self._copy[name] = new.clone()
        block, left_out = pack_delta(changes)
        for _, _, old, new in changes:
            old[:] = new
        kept += left_out
        packed = [(name, tensor) for name, tensor in layer if name in kept]
        if block:
            # A block that was read from a file could not be written to.
            data = torch.frombuffer(bytearray(block), dtype=torch.uint8)
            first = layer[0][0]
            packed.append((DELTA_PREFIX + ("adapter" if is_adapter_tensor(first) else layer_of(first)), data))
        return packed
