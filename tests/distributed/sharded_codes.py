"""Computations of layers and models with sharded masters, without a trainer. Run by shards.py."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from sharded_runs import assert_sharded, bits, launched, make_model, published, same, weights_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW4bit, AdamW8bit
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit

from trl_qarl.bitwise.attach import keep_no_products
from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.quantization.storage import whole, writes_to
from trl_qarl.quantization.swap import prepare_model, quantized_layers, share_global_scales
from trl_qarl.sharding.fsdp2 import shard_low_bit, shard_when_prepared


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


def gradients_of(model, micro_batches, count):
    """Gradients of the mean of `count` losses from `micro_batches`, added up one after the other, and these losses."""
    losses = [model(input_ids=ids, labels=ids).loss for ids in micro_batches]
    for loss in losses:
        (loss / count).backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    return gradients, [loss.item() for loss in losses]


# torchao's optimizers compile their step for most of a minute, which is not what is tested.
@torch.compiler.set_stance("force_eager")
def training_equals_one_process(folder):  # nightly
    """
    Losses, gradients, masters, codes and what is published after three steps, bit for bit, without clipping, whose
    norm is added up in another order. Of several micro-batches one process adds up those of each process first, as two
    do.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    cases = [
        {"arch": "qwen2"},
        {"arch": "gemma", "scheme": "fp8", "accumulation": 4, "reshard_after_forward": False},
        {"arch": "qwen2", "scheme": "w4a8", "activation_checkpointing": True},
        {"arch": "qwen2", "scheme": "w8a8", "reentrant": True, "cpu_ram_efficient_loading": True},
        {"arch": "qwen2", "scheme": "w8a16", "reentrant": False, "optimizer": partial(torch.optim.AdamW, fused=True)},
        {"arch": "qwen3_moe", "scheme": "fp8", "reentrant": False},
        {"arch": "qwen2", "optimizer": partial(torch.optim.AdamW, foreach=True)},
        {"arch": "qwen2", "optimizer": AdamW8bit},
        {"arch": "qwen2", "optimizer": AdamW4bit},
    ]
    for case in cases:
        case = dict(case)
        arch, scheme, accumulation = case.pop("arch"), case.pop("scheme", "w4a16"), case.pop("accumulation", 1)
        reentrant, make_optimizer = case.pop("reentrant", None), case.pop("optimizer", torch.optim.AdamW)
        model, reference = make_model(folder, arch), make_model(folder, arch)
        for each in (model, reference):
            prepare_model(each, scheme, scale_dtype=torch.bfloat16)
            each.train()
            if reentrant is not None:
                each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with launched(**case):
            accelerator = Accelerator(gradient_accumulation_steps=accumulation)
            shard_when_prepared(accelerator, keep_no_products)
            optimizers = [make_optimizer(each.parameters(), lr=1e-3) for each in (model, reference)]
            model, optimizer = accelerator.prepare(model, optimizers[0])
            assert_sharded(model)
            batches = torch.randint(
                3, 260, (3, accumulation, world, 2, 12), generator=torch.Generator().manual_seed(1)
            )
            for step in batches:
                losses = []
                for micro_batch in step:
                    with accelerator.accumulate(model):
                        losses.append(model(input_ids=micro_batch[rank], labels=micro_batch[rank]).loss)
                        accelerator.backward(losses[-1])
                processes, count = step.transpose(0, 1), world * accumulation
                parts = [gradients_of(reference, micro_batches, count) for micro_batches in processes]
                in_a_row, _ = gradients_of(reference, processes.flatten(0, 1), count)
                assert [loss.item() for loss in losses] == parts[rank][1], case
                named = zip(model.named_parameters(), reference.parameters(), strict=True)
                for index, ((name, ours), theirs) in enumerate(named):
                    theirs.grad = sum(gradients[index] for gradients, _ in parts)
                    assert torch.equal(whole(ours.grad), theirs.grad), (name, case)
                    # Added up in another order; of two there is no other.
                    tolerance = 0.0 if accumulation == 1 else 2**-20 * theirs.grad.abs().max().item()
                    assert (in_a_row[index] - theirs.grad).abs().max() <= tolerance, (name, case)
                for each in (optimizer, optimizers[1]):
                    each.step()
                    each.zero_grad()
            kinds = set()
            for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert torch.equal(whole(ours.detach()), theirs), (name, case)
                state, expected = optimizer.optimizer.state[ours]["exp_avg"], optimizers[1].state[theirs]["exp_avg"]
                assert isinstance(state, DTensor) and type(state.to_local()) is type(expected), (name, case)
                assert len(state.to_local()) == len(ours.to_local()), (name, case)
                kinds.add(type(expected))
            for weight, expected in zip(weights_of(model), weights_of(reference), strict=True):
                assert same(weight.whole_low_bit(), expected.low_bit_weight()), (weight.name, case)
            low_bit_states = {AdamW8bit: {OptimState8bit}, AdamW4bit: {OptimState4bit}}
            assert kinds >= low_bit_states.get(make_optimizer, set()), (kinds, case)
            assert published(model, torch.bfloat16) == published(reference, torch.bfloat16), case


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
