"""[`PatchBook`]: a copy of the tensors that were sent last, from which changes are made, or to which they are
applied."""

from collections.abc import Container, Iterable, Iterator, Mapping

import numpy as np
import torch

from .delta import apply_delta, base_digest, elements, is_delta, pack_delta


__all__ = ["PatchBook"]


class PatchBook:
    """
    Tensors in checkpoint format and host memory, as both sides have them: the learner and each worker of an engine, or
    a folder and whoever reads it. It is as large as they are, plus one layer while changes are applied.

    Args:
        is_kept (`bool`, *optional*, defaults to `True`):
            Whether tensors that are taken are kept, or only after the first [`~PatchBook.confirm`].

    Attributes:
        tensors (`dict[str, torch.Tensor]`):
            The copy, by name. On a rank of tensor parallelism it has all of each: changes come before sharding, as
            tensors do.
        fingerprints (`Mapping[str, str]`):
            Fingerprints that the other side has confirmed, to which changes are made.
    """

    def __init__(self, is_kept: bool = True):
        self.is_kept = is_kept
        self.tensors: dict[str, torch.Tensor] = {}
        self.fingerprints: Mapping[str, str] = {}
        # Views of the same memory.
        self._elements: dict[str, np.ndarray] = {}

    def confirm(self, fingerprints: Mapping[str, str]) -> str:
        """Drop what `fingerprints` does not name, and make changes to the rest. Return their digest if a copy of all
        of it is here, else the empty string."""
        self.is_kept, self.fingerprints = True, dict(fingerprints)
        for name in self.tensors.keys() - fingerprints.keys():
            # Of another plan.
            del self.tensors[name], self._elements[name]
        return base_digest(fingerprints) if fingerprints.keys() <= self.tensors.keys() else ""

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether the copy has a tensor of that name, shape and dtype."""
        held = self.tensors.get(name)
        return held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype)

    @torch.no_grad()
    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor, into the memory of the one before if that fits."""
        if self.holds(name, tensor):
            self.tensors[name].copy_(tensor)
            return
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.tensors[name], self._elements[name] = copy, elements(copy)

    def make(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor | None, list[str]]:
        """
        Return a block of the changes that turn the copy into `tensors`, contiguous and on the CPU, and the names of
        those that are shorter sent whole or are not in the copy. No block where nothing is left for it. The copy stays
        as it is.
        """
        known = [name for name, tensor in tensors.items() if self.holds(name, tensor)]
        block, whole = pack_delta([(n, self.fingerprints[n], self._elements[n], elements(tensors[n])) for n in known])
        # A block that was read from a file could not be written to.
        data = torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else None
        return data, [name for name in tensors if name not in known or name in whole]

    def take(
        self, tensors: Iterable[tuple[str, torch.Tensor]], confirmed: Mapping[str, str], arrived: Container[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """
        Yield received tensors, or those that blocks of changes make, under their names in a checkpoint, and keep them.

        Args:
            tensors (`Iterable[tuple[str, torch.Tensor]]`):
                What was received: tensors, and blocks of [`trl_qarl.wire.delta`].
            confirmed (`Mapping[str, str]`):
                Fingerprints of what the copy holds.
            arrived (`Container[str]`, *optional*):
                Names that have come already, and may not be changed again.

        Raises:
            RuntimeError: for a block that is damaged, was applied already or is for other tensors than those here.
        """
        for name, tensor in tensors:
            if not is_delta(name):
                if self.is_kept:
                    self.keep(name, tensor)
                yield name, tensor
                continue
            open_to = {name: value for name, value in confirmed.items() if name not in arrived}
            try:
                changed = apply_delta(tensor.cpu().numpy().tobytes(), self._elements, open_to)
            except ValueError as error:
                raise RuntimeError(f"{name}: {error}") from error
            yield from ((changed_name, self.tensors[changed_name]) for changed_name in changed)
