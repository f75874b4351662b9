"""Bytes of the tensors that are alive at once, whatever makes them."""

import weakref
from collections import defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_qarl.quantization.tensors import LowBitTensor


class LiveBytes(TorchDispatchMode):
    """Adds up the bytes of tensors that are alive after each operation, and keeps the largest sum in each phase."""

    def __init__(self):
        super().__init__()
        self.storages, self.phase, self.peaks = {}, "", defaultdict(int)

    def add(self, tensor):
        if isinstance(tensor, LowBitTensor):
            for part in tensor.parts():
                self.add(part)
            return
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage._cdata not in self.storages:
            # FSDP2 frees what it has gathered by giving the storage another size.
            self.storages[storage._cdata] = weakref.ref(storage)
            weakref.finalize(storage, self.storages.pop, storage._cdata)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        self.peaks[self.phase] = max(self.peaks[self.phase], self.alive())
        return output

    def alive(self):
        return sum(storage.nbytes() for held in [*self.storages.values()] if (storage := held()) is not None)


def give_completions(prompts, trainer):
    """A `rollout_func` of 60 random tokens to each prompt."""
    ids = torch.randint(4, 260, (len(prompts), 60), generator=torch.Generator().manual_seed(0)).tolist()
    logps = [[-5.5] * 60] * len(prompts)
    return {"prompt_ids": [[5, 6, 7, 8]] * len(prompts), "completion_ids": ids, "logprobs": logps}
