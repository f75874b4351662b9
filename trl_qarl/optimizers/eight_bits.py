"""
Optimizer state in 8 bits (https://huggingface.co/papers/2110.02861), held and rounded by torchao's
[`~torchao.optim.subclass_8bit.OptimState8bit`]: a code of 8 bits for each value, and a scale for each block.

A block lies within a row of its parameter. So the state has the same bits however many processes share the rows, and
a checkpoint can be resumed by another number of them. torchao's own optimizers count blocks through each shard.

The mean of squared gradients stays in float32 for parameters of which parts get no gradient in some updates:
embeddings and stacked experts. In 8 bits it is 0 where gradients are 2,500 times smaller than the largest of their
block, and without a gradient AdamW would then divide the mean by its `eps`.
"""

import math
from collections.abc import Iterator

import torch
from torchao.optim import AdamW8bit
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit
from typing_extensions import override

from ..quantization.storage import storage_of


_BLOCK, _SMALLEST_BLOCK = 256, 32
_SMALLEST = 4096
_IN_A_STEP = 2**22


def block_of(shape: torch.Size, num_elements: int) -> int | None:
    """Return the block size of a state of this shape, of a parameter with `num_elements` in all processes; `None` for
    a state in float32."""
    block = math.gcd(shape[-1], _BLOCK) if len(shape) > 1 else 1
    return block if num_elements >= _SMALLEST and block >= _SMALLEST_BLOCK else None


def new_state(parameter: torch.Tensor, signed: bool = True) -> torch.Tensor:
    """
    Return zeros as the state of `parameter`, this process' part if it is sharded: in 8 bits, or in float32 if it has
    fewer than 4,096 elements, no rows, or rows that blocks of at least 32 do not divide.
    """
    storage = storage_of(parameter)
    held = storage.local(parameter)
    block = block_of(held.shape, storage.shape(parameter).numel())
    # torchao divides by the number of blocks, and a process may have none.
    if block and held.numel():
        state = OptimState8bit.zeros(held.shape, signed, block, held.device, torch.float32)
    else:
        state = torch.zeros(held.shape, device=held.device)
    return storage.like(parameter, state)


def parts_of(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield start and length of parts of the first dimension, with about four million elements each: torchao rounds
    through several temporary tensors of 64-bit integers."""
    length = max(1, _IN_A_STEP // max(tensor[:1].numel(), 1))
    for start in range(0, len(tensor), length):
        yield start, min(length, len(tensor) - start)


class AdamWIn8Bits(AdamW8bit):
    """torchao's `AdamW8bit` with blocks within rows ([`new_state`]), which steps through a parameter in parts
    ([`parts_of`]) and compiles nothing. A group with `keeps_squares` has means of squared gradients in float32."""

    @override
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # torchao has a tensor here, for compiled steps.
        group["lr"] = float(group["lr"])
        group.setdefault("keeps_squares", False)

    @override
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), weight_decay, eps = group["betas"], group["weight_decay"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = new_state(p)
                    state["exp_avg_sq"] = torch.zeros_like(p) if group["keeps_squares"] else new_state(p, signed=False)
                state["step"] += 1
                tensors = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
                weight, grad, *moments = (storage_of(tensor).local(tensor) for tensor in tensors)
                for start, length in parts_of(weight):
                    parts = (tensor.narrow(0, start, length) for tensor in (weight, grad, *moments))
                    held, gradient, mean, square = parts
                    rates = float(group["lr"]), beta1, beta2, weight_decay, eps
                    single_param_adam(held, gradient, state["step"], mean, square, None, *rates, True, False)
        return None
