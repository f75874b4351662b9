"""Computations of layers and models with sharded masters, without a trainer. Run by shards.py."""

import pytest
import torch
import torch.distributed as dist
from sharded_runs import bits, same
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.quantization.storage import whole, writes_to
from trl_qarl.quantization.swap import quantized_layers, share_global_scales
from trl_qarl.sharding.fsdp2 import shard_low_bit


class Heads(nn.Module):
    """Linear layers of which some leave nothing to the second of two processes, some unequal parts."""

    rows = (128, 67, 2, 1, 33, 16)

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(256, rows, bias=i % 2 == 0) for i, rows in enumerate(self.rows))

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], -1)


def make_heads(scheme, has_fixed_scales=False):
    torch.manual_seed(0)
    model = Heads()
    with torch.no_grad():
        for head in model.heads:
            head.weight[-1, :128] = 0
    for name, head in model.heads.named_children():
        setattr(model.heads, name, QuantizedLinear.from_linear(head, scheme, torch.bfloat16))
    # As `prepare_model` does, while the masters are whole.
    share_global_scales(quantized_layers(model))
    for head in model.heads if has_fixed_scales else ():
        weight = head.quantized_weights["weight"]
        weight.fixed_scale = 1.25 * weight.low_bit_weight().scale
        weight.forget()
    return model


def codes_are_those_of_one_process(folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    cases = [(scheme, {}) for scheme in SCHEMES.values() if scheme.is_quantized]
    fixed = [(SCHEMES["w4a16"], {"reshard_after_forward": True}), (SCHEMES["w8a8"], {"reshard_after_forward": True})]
    cases += [(SCHEMES["w4a8"], {"reshard_after_forward": False}), (SCHEMES["w4a16"], {"mp_policy": mixed})]
    cases += [(SCHEMES["w4a16"], {"offload_policy": CPUOffloadPolicy(pin_memory=False)})]
    for scheme, options in cases + fixed:
        model, reference = (make_heads(scheme, (scheme, options) in fixed) for _ in range(2))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)), **({"reshard_after_forward": True} | options))
        policy = options.get("mp_policy", MixedPrecisionPolicy())
        assert shard_low_bit(model) == len(Heads.rows)
        assert isinstance(model, FSDPModule) and all(isinstance(p, DTensor) for p in model.parameters())
        seen = {}
        for index, head in enumerate(model.heads):
            head.register_forward_pre_hook(
                lambda layer, args, i=index, seen=seen: seen.update({i: [t.clone() for t in layer.weight.parts()]})
            )
        batches = torch.randn(world, 6, 256)
        model(batches[rank]).float().square().mean().backward()
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=policy.param_dtype is not None):
                output = reference(batch)
            (output.float().square().mean() / world).backward()
        for index, (head, expected) in enumerate(zip(model.heads, reference.heads, strict=True)):
            low_bit = expected.low_bit_weight()
            assert torch.equal(bits(seen[index][0]), bits(low_bit.qdata)), (scheme.name, index)
            assert torch.equal(bits(seen[index][1]), bits(low_bit.scale)), (scheme.name, index)
            assert same(head.quantized_weights["weight"].whole_low_bit(), low_bit), (scheme.name, index)
            gradient = whole(head.weight.grad)
            assert gradient.dtype is torch.float32
            if policy.param_dtype is None:
                assert torch.equal(gradient, expected.weight.grad), (scheme.name, index)
            else:
                assert (gradient - expected.weight.grad).norm() < 2**-6 * expected.weight.grad.norm()
            # Nothing that was made of codes outlives them.
            [parameter] = [
                p
                for g in model._get_fsdp_state()._fsdp_param_groups
                for p in g.fsdp_params
                if p.sharded_param is head.weight
            ]
            gathered = parameter._unsharded_param
            held = [*gathered.parts(), *gathered._kept.values()]
            assert sum(t.untyped_storage().nbytes() for t in held) == 0 and len(held) == len(low_bit.parts())


def one_process_gathers_codes_and_scales(folder):
    """With one process FSDP2 takes the first tensor that it is given, and codes have scales."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("others", "alone"))["alone"]
    for scheme in SCHEMES.values():
        if not scheme.is_quantized:
            continue
        model, reference = make_heads(scheme), make_heads(scheme)
        fully_shard(model, mesh=mesh)
        assert shard_low_bit(model) == len(Heads.rows) and all(isinstance(p, DTensor) for p in model.parameters())
        for each in (model, reference):
            each(torch.ones(6, 256)).square().mean().backward()
        for head, expected in zip(model.heads, reference.heads, strict=True):
            assert torch.equal(whole(head.weight.grad), expected.weight.grad), scheme.name
            assert same(head.quantized_weights["weight"].whole_low_bit(), expected.low_bit_weight())


def writes_are_seen_without_a_step(folder):
    """FSDP2 gathers without raising a storage's version, and counts writes to a whole and a part apart."""
    model = make_heads(SCHEMES["w4a16"])
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=True)
    shard_low_bit(model)
    head, x = model.heads[0], torch.ones(4, 256)

    def write_to_all():
        head.weight.mul_(-1)

    def write_to_part():
        head.weight.to_local().mul_(-1)

    def load():
        state = {name: -whole(tensor) for name, tensor in model.state_dict().items()}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))

    def load_parts():
        model.load_state_dict({name: tensor * -1 for name, tensor in model.state_dict().items()})

    for write in (write_to_all, write_to_part, load, load_parts):
        before, parameters = model(x).detach(), [writes_to(p) for p in model.parameters()]
        assert torch.equal(model(x), before)
        low_bit = head.low_bit_weight()
        assert head.low_bit_weight() is low_bit
        with torch.no_grad():
            write()
        assert [writes_to(p) for p in model.parameters()] != parameters, write.__name__
        assert head.low_bit_weight() is not low_bit, write.__name__
        assert not torch.equal(model(x), before), write.__name__
        expected = head.quantized_weights["weight"].quantize(whole(head.weight.detach()))
        assert same(head.quantized_weights["weight"].whole_low_bit(), expected), write.__name__
    head.weight._local_tensor = head.weight.to_local().detach().clone()
    with pytest.raises(RuntimeError, match="Call `shard_low_bit"):
        head.low_bit_weight()
