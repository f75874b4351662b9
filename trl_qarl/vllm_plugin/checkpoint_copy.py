"""A worker's copy of the published tensors, in checkpoint format and host memory, to which changes can be applied."""

from collections.abc import Container, Iterable, Iterator, Mapping

import numpy as np
import torch

from ..wire.delta import apply_delta, base_digest, elements, is_delta


__all__ = ["CheckpointCopy"]


class CheckpointCopy:
    """
    The tensors of the last publication. It is as large as they are, plus one layer while changes are applied, and nothing until a
    trainer asks for it. With tensor parallelism every rank has all of it: changes come before sharding, as tensors do.

    Args:
        device (`torch.device`):
            Where tensors are loaded to.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._is_kept = False
        self._tensors: dict[str, torch.Tensor] = {}
        # A view of the same memory.
        self._elements: dict[str, np.ndarray] = {}

    def keep(self, published: Mapping[str, str]) -> str:
        """
        Keep what is loaded from now on, and of what is here already what `published` names.

        Args:
            published (`Mapping[str, str]`):
                Fingerprints of the last publication that was complete; none where the engine has lost it.

        Returns:
            The digest of `published` if a copy of all of it is here, else the empty string.
        """
        self._is_kept = True
        for name in self._tensors.keys() - published.keys():
            # The copy is of a trainer with another plan.
            del self._tensors[name], self._elements[name]
        return base_digest(published) if published.keys() <= self._tensors.keys() else ""

    def take(
        self, tensors: Iterable[tuple[str, torch.Tensor]], published: Mapping[str, str], arrived: Container[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """
        Yield tensors under their names in a checkpoint, those that only changes have come for too.

        Args:
            tensors (`Iterable[tuple[str, torch.Tensor]]`):
                What was received: tensors, and blocks of [`trl_qarl.wire.delta`].
            published (`Mapping[str, str]`):
                Fingerprints of what the copy holds.
            arrived (`Container[str]`):
                Names that this publication has brought already.

        Raises:
            RuntimeError: for a block that is damaged, was applied already or is for other tensors than those here.
        """
        for name, tensor in tensors:
            if not is_delta(name):
                yield name, self._store(name, tensor)
                continue
            confirmed = {name: value for name, value in published.items() if name not in arrived}
            try:
                changed = apply_delta(tensor.cpu().numpy().tobytes(), self._elements, confirmed)
            except ValueError as error:
                raise RuntimeError(f"{name}: {error}") from error
            for changed_name in changed:
                yield changed_name, self._tensors[changed_name].to(self._device)

    def _store(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_kept:
            return tensor
        old = self._tensors.get(name)
        if old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
            old.copy_(tensor)
        else:
            copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            self._tensors[name], self._elements[name] = copy, elements(copy)
        return tensor
