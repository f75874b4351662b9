"""
Optimizer that combines Muon (https://kellerjordan.github.io/posts/muon/) for the hidden matrices with AdamW for all
other parameters. The update of a matrix is scaled to AdamW's root mean square
(https://huggingface.co/papers/2502.16982), so both parts share a learning rate.

Only whole matrices are orthogonalized. With FSDP2 the momentum stays sharded, each update is gathered, and every
process computes the whole update and keeps its own rows. An update computed from one shard would be off by 2 %. If
masters and momentum are in host memory, gradient and momentum of one matrix at a time cross to the accelerator, which
computes the update.

A matrix whose gradient is all zeros stays as it is, with its momentum, as one without a gradient does: normalized, the
momentum of earlier gradients would move it as far as a gradient does, for hundreds of updates.
"""

from collections.abc import Sequence
from itertools import compress

import torch
import torch.distributed as dist
from torch import nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torchao.optim.subclass_8bit import OptimState8bit
from typing_extensions import override

from ..quantization.inventory import Inventory
from ..quantization.storage import storage_of, whole
from .eight_bits import AdamWIn8Bits, new_state, parts_of


class _MuonOfWhole(torch.optim.Muon):
    """`torch.optim.Muon` that also takes sharded matrices and matrices in host memory, with the same updates bit for
    bit, and leaves out matrices whose gradient is zero. With `in_8_bits` it rounds the momentum after each update."""

    def __init__(self, params, *, in_8_bits: bool, **options):
        self._in_8_bits = in_8_bits
        super().__init__(params, **options)

    @override
    def _init_group(self, group, params_with_grad, grads, muon_momentum_bufs):
        for p in group["params"] if self._in_8_bits else ():
            if p.grad is not None and "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = new_state(p)
        has_complex = super()._init_group(group, params_with_grad, grads, muon_momentum_bufs)
        are_moved = _have_values(grads)
        for tensors in (params_with_grad, grads, muon_momentum_bufs):
            tensors[:] = compress(tensors, are_moved)
        return has_complex

    @override
    @torch.no_grad()
    def step(self, closure=None):
        if not self._in_8_bits and all(storage_of(p).is_whole for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        for group in self.param_groups:
            params, grads, momenta = [], [], []
            self._init_group(group, params, grads, momenta)
            lr = float(group["lr"])
            for param, grad, momentum in zip(params, grads, momenta, strict=True):
                storage = storage_of(param)
                held, rows = storage.local(param), storage.rows(param)
                grad, momentum = storage_of(grad).local(grad), storage_of(momentum).local(momentum)
                update = _advance(momentum, grad.to(storage.device(param), torch.float32), group)
                # As the iteration begins.
                update = whole(storage.like(param, update), torch.bfloat16)
                update = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                held.mul_(1 - lr * group["weight_decay"])
                rate = _adjust_lr(lr, group["adjust_lr_fn"], storage.shape(param))
                held.add_(update.narrow(0, rows.start, len(rows)).to(held.device), alpha=-rate)
        return None


def _advance(kept: torch.Tensor, grad: torch.Tensor, group: dict) -> torch.Tensor:
    """Move the `kept` momentum, in float32 or in 8 bits, towards `grad` (float32), on the device of `grad`. Return the
    tensor that Muon orthogonalizes: the new momentum before it is rounded, or with Nesterov's rule its mean with
    `grad`."""
    momentum = kept.to(grad.device)
    moved = momentum.dequantize() if isinstance(momentum, OptimState8bit) else momentum
    moved.lerp_(grad, 1 - group["momentum"])
    if isinstance(momentum, OptimState8bit):
        for start, length in parts_of(moved):
            momentum.narrow(0, start, length).copy_(moved.narrow(0, start, length))
    if momentum is not kept:
        kept.copy_(momentum)
    return grad.lerp(moved, group["momentum"]) if group["nesterov"] else moved


def _have_values(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether any element is not zero. Every process has to call if they are sharded."""
    if not tensors:
        return []
    flags = torch.stack([storage_of(tensor).local(tensor).any() for tensor in tensors])
    if not all(storage_of(tensor).is_whole for tensor in tensors):
        flags = flags.to(torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return flags.bool().tolist()


class MuonAdamW(torch.optim.Optimizer):
    """
    `torch.optim.Muon` and `torch.optim.AdamW` over the trainable parameters of `model`, stepping together with one
    learning rate and one list of `param_groups`.

    Muon gets the weights of linear layers, unless they are the output head or shared with an embedding, all with
    `weight_decay`. AdamW gets the rest, with weight decay where the name is in `decay_parameters`. The two factors of
    an adapter belong to the rest: only their product is a matrix of the network.

    With `in_8_bits` momentum and moments of AdamW are kept in 8 bits ([`trl_qarl.optimizers.eight_bits`]).
    """

    def __init__(
        self,
        model: nn.Module,
        decay_parameters: set[str],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        in_8_bits: bool = False,
    ):
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        linears = [linear for layer in Inventory.of(model).walk() for linear in layer.linears.values()]
        matrices = {id(m.weight) for m in linears if m is not head} - embeddings
        is_rare = lambda p: id(p) in embeddings or p.ndim > 2  # noqa: E731
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        muon_params = [p for _, p in trainable if id(p) in matrices]
        rest = [(name, p) for name, p in trainable if id(p) not in matrices]
        groups = [
            {"params": [p for name, p in rest if name in decay_parameters], "weight_decay": weight_decay},
            {"params": [p for name, p in rest if name not in decay_parameters], "weight_decay": 0.0},
        ]
        if in_8_bits:
            groups = [
                group | {"params": [p for p in group["params"] if is_rare(p) == rare], "keeps_squares": rare}
                for group in groups
                for rare in (False, True)
            ]
        groups, parts = [group for group in groups if group["params"]], {}
        if muon_params:
            options = {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
            parts["muon"] = _MuonOfWhole(muon_params, in_8_bits=in_8_bits, **options)
        if groups:
            make, options = (AdamWIn8Bits, {}) if in_8_bits else (torch.optim.AdamW, {"fused": True})
            parts["adamw"] = make(groups, lr=lr, betas=betas, eps=eps, **options)
        self.parts = parts
        # The parts' own group dictionaries, so that a scheduler's changes reach them.
        groups = [group for part in parts.values() for group in part.param_groups]
        super().__init__(groups, {})
        self.param_groups = groups

    @property
    def state(self):
        return {p: state for part in self.parts.values() for p, state in part.state.items()}

    @state.setter
    def state(self, value):
        # The base class assigns an empty dictionary; each part holds its own.
        pass

    @override
    @torch.no_grad()
    def step(self, closure=None):
        for part in self.parts.values():
            part.step()

    @override
    def state_dict(self):
        if not all(storage_of(p).is_whole for group in self.param_groups for p in group["params"]):
            # The form that torch's distributed checkpoints need: one state, one list of groups.
            return super().state_dict()
        return {name: part.state_dict() for name, part in self.parts.items()}

    @override
    def load_state_dict(self, state_dict):
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in state_dict.get("param_groups", ())] == sizes:
            groups, state, state_dict = iter(state_dict["param_groups"]), state_dict["state"], {}
            for name, part in self.parts.items():
                own = [group for _, group in zip(part.param_groups, groups, strict=False)]
                keys = [key for group in own for key in group["params"] if key in state]
                state_dict[name] = {"state": {key: state[key] for key in keys}, "param_groups": own}
        if state_dict.keys() != self.parts.keys():
            raise ValueError(
                f"The checkpoint's optimizer has the parts {sorted(state_dict)}, this run's {sorted(self.parts)}: the "
                "checkpoint was made with another `optim`. Resume with the same `optim`."
            )
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups[:] = [group for part in self.parts.values() for group in part.param_groups]
