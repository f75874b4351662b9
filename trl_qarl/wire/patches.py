"""[`PatchBook`]: a copy of the tensors of the last weight sync, from which a learner makes changes and to which an
engine applies them."""

from collections.abc import Container, Iterable, Iterator, Mapping

import numpy as np
import torch

from .delta import apply_delta, base_digest, elements, is_delta, pack_delta


class PatchBook:
    """
    Tensors in checkpoint format and host memory, shared by learner and engine workers, or by a folder and its readers.
    Without `is_kept` received tensors are kept only after the first [`~PatchBook.confirm`].

    `tensors` is the copy, by name; a rank of tensor parallelism has whole tensors, as changes are applied before
    sharding. `fingerprints` are those that the other side has confirmed, the base of changes.
    """

    def __init__(self, is_kept: bool = True):
        self.is_kept = is_kept
        self.tensors: dict[str, torch.Tensor] = {}
        self.fingerprints: Mapping[str, str] = {}
        # Views of the same memory.
        self._elements: dict[str, np.ndarray] = {}

    def confirm(self, fingerprints: Mapping[str, str]) -> str:
        """Make `fingerprints` the base of changes, and drop tensors without one. Return their digest if the copy has
        all of them, else the empty string."""
        self.is_kept, self.fingerprints = True, dict(fingerprints)
        for name in self.tensors.keys() - fingerprints.keys():
            # Tensors of another scheme, which are no longer published.
            del self.tensors[name], self._elements[name]
        return base_digest(fingerprints) if fingerprints.keys() <= self.tensors.keys() else ""

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether the copy has a tensor with this name, shape and dtype."""
        held = self.tensors.get(name)
        return held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype)

    @torch.no_grad()
    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor, into the memory of the former one if it fits."""
        if self.holds(name, tensor):
            self.tensors[name].copy_(tensor)
            return
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.tensors[name], self._elements[name] = copy, elements(copy)

    def make(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor | None, list[str]]:
        """Return a block of the changes from the copy to `tensors`, contiguous and on the CPU, and the names of
        tensors that are smaller sent whole or are not in the copy. The block is `None` without any changes."""
        known = [name for name, tensor in tensors.items() if self.holds(name, tensor)]
        block, whole = pack_delta([(n, self.fingerprints[n], self._elements[n], elements(tensors[n])) for n in known])
        # `frombuffer` warns about memory that cannot be written to.
        data = torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else None
        return data, [name for name in tensors if name not in known or name in whole]

    def take(
        self, tensors: Iterable[tuple[str, torch.Tensor]], confirmed: Mapping[str, str], arrived: Container[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """
        Yield received tensors, and those made from blocks of [`trl_qarl.wire.delta`], with their names in a
        checkpoint, and keep them. `confirmed` are the fingerprints of the copy; tensors that have `arrived` already
        must not be changed again. `RuntimeError` is raised for a block that is damaged, was applied already or is for
        other tensors than the copy's.
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
