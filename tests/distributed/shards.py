"""
What two processes with sharded masters compute, claim by claim. Each rank writes which of them hold; run by test_shards.py.

accelerate gives FSDP to GPUs alone: on a CPU it runs DDP without a word. [`launched`] has it shard with gloo, and every claim here
checks that parameters are sharded.
"""

import datetime
import json
import os
import sys
import time
import traceback
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import killed
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from train_ddp import fork_ranks
from transformers import AutoModelForCausalLM, TrainerCallback

from testing_utils import launch_environment, make_trainer
from trl_qarl import qarl_trainer
from trl_qarl.adapters.engine import iter_adapter_tensors
from trl_qarl.checkpoint.export import _content
from trl_qarl.checkpoint.layout import iter_checkpoint_tensors
from trl_qarl.checks.launch import shard_when_prepared
from trl_qarl.quantization.global_scales import share_global_scales
from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.quantization.sharded import is_sharded, shard_low_bit, whole, whole_low_bit, writes_to
from trl_qarl.quantization.swap import prepare_model, quantized_layers
from trl_qarl.quantization.tensors import LowBitTensor
from trl_qarl.rollout import generation
from trl_qarl.rollout.client import ServerLost
from trl_qarl.rollout.generation import QaRLVLLMGeneration
from trl_qarl.rollout.publisher import Publisher
from trl_qarl.rollout.transports import FileTransport
from trl_qarl.wire.protocol import PublishError


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def same(ours, theirs):
    return torch.equal(bits(ours.qdata), bits(theirs.qdata)) and torch.equal(bits(ours.scale), bits(theirs.scale))


class Heads(nn.Module):
    """Linear layers of which some leave nothing to the second of two processes, some unequal parts."""

    rows = (128, 67, 2, 1, 33, 16)

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(256, rows, bias=i % 2 == 0) for i, rows in enumerate(self.rows))

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], -1)


def make_heads(scheme):
    torch.manual_seed(0)
    model = Heads()
    with torch.no_grad():
        for head in model.heads:
            head.weight[-1, :128] = 0
    for name, head in model.heads.named_children():
        setattr(model.heads, name, QuantizedLinear.from_linear(head, scheme, torch.bfloat16))
    # As `prepare_model` does, while the masters are whole.
    share_global_scales(quantized_layers(model))
    return model


def codes_are_those_of_one_process(folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    cases = [(scheme, {}) for scheme in SCHEMES.values() if scheme.is_quantized]
    cases += [(SCHEMES["w4a8"], {"reshard_after_forward": False}), (SCHEMES["w4a16"], {"mp_policy": mixed})]
    cases += [(SCHEMES["w4a16"], {"offload_policy": CPUOffloadPolicy(pin_memory=False)})]
    for scheme, options in cases:
        model, reference = make_heads(scheme), make_heads(scheme)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)), **({"reshard_after_forward": True} | options))
        policy = options.get("mp_policy", MixedPrecisionPolicy())
        assert shard_low_bit(model) == len(Heads.rows)
        assert isinstance(model, FSDPModule) and all(isinstance(p, DTensor) for p in model.parameters())
        seen = {}
        for index, head in enumerate(model.heads):
            head.register_forward_pre_hook(
                lambda layer, args, i=index, seen=seen: seen.update({i: [t.clone() for t in layer.weight.held()]})
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
            if low_bit.zero_point is not None:
                assert torch.equal(seen[index][2], low_bit.zero_point), index
            assert same(whole_low_bit(head.quantized_weights["weight"]), low_bit), (scheme.name, index)
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
            held = parameter._unsharded_param.held()
            assert sum(t.untyped_storage().nbytes() for t in held) == 0 and len(held) == len(low_bit.parts())


@contextmanager
def launched(**options):
    """Environment as `accelerate launch` makes it of the shipped configuration for FSDP2, but for these options."""
    shipped = launch_environment("fsdp2.yaml")
    environment = {name: value for name, value in shipped.items() if name.startswith(("FSDP_", "ACCELERATE_USE_"))}
    environment["ACCELERATE_TORCH_DEVICE"] = "cpu"
    environment |= {f"FSDP_{k.upper()}": v if isinstance(v, str) else str(v).lower() for k, v in options.items()}
    AcceleratorState._reset_state(True)
    backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)  # noqa: E731
    try:
        with patch.dict(os.environ, environment), patch.object(PartialState, "_prepare_backend", backend):
            yield
    finally:
        AcceleratorState._reset_state(True)


def assert_sharded(model):
    assert isinstance(model, FSDPModule)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert all(len(p.to_local()) <= -(-len(p) // dist.get_world_size()) for p in model.parameters())


class Masters(TrainerCallback):
    """Keeps the masters of every step."""

    def __init__(self):
        self.at = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.at[state.global_step] = [whole(p.detach()).clone() for p in model.parameters()]

    on_step_end = on_train_begin


def make_model(folder, arch="qwen2", **overrides):
    with patch.dict(os.environ, {"ACCELERATE_USE_FSDP": "false"}):
        return AutoModelForCausalLM.from_pretrained(f"{folder}/{arch}", dtype=torch.float32, **overrides)


def weights_of(model):
    return [weight for layer in quantized_layers(model).values() for weight in layer.quantized_weights.values()]


def training_equals_one_process(folder):
    """Gradients, masters and codes after three steps, bit for bit, without clipping, whose norm is added up in another order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cases = [
        {"arch": "qwen2"},
        {"arch": "gemma", "scheme": "fp8", "accumulation": 2, "reshard_after_forward": False},
        {"arch": "qwen2", "scheme": "w4a8", "activation_checkpointing": True},
        {"arch": "qwen2", "scheme": "w8a8", "reentrant": True, "cpu_ram_efficient_loading": True},
        {"arch": "qwen2", "scheme": "w8a16", "reentrant": False, "fused": True},
        {"arch": "qwen3_moe", "scheme": "fp8", "reentrant": False},
    ]
    for case in cases:
        case = dict(case)
        arch, scheme, accumulation = case.pop("arch"), case.pop("scheme", "w4a16"), case.pop("accumulation", 1)
        reentrant, fused = case.pop("reentrant", None), case.pop("fused", False)
        model, reference = make_model(folder, arch), make_model(folder, arch)
        for each in (model, reference):
            prepare_model(each, scheme, scale_dtype=torch.bfloat16)
            each.train()
            if reentrant is not None:
                each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with launched(**case):
            accelerator = Accelerator(gradient_accumulation_steps=accumulation)
            shard_when_prepared(accelerator)
            optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, fused=fused) for each in (model, reference)]
            model, optimizer = accelerator.prepare(model, optimizers[0])
            assert_sharded(model)
            batches = torch.randint(
                3, 260, (3, accumulation, world, 2, 12), generator=torch.Generator().manual_seed(1)
            )
            for step in batches:
                for micro_batch in step:
                    with accelerator.accumulate(model):
                        loss = model(input_ids=micro_batch[rank], labels=micro_batch[rank]).loss
                        accelerator.backward(loss)
                        # Of the processes first, as gradients are reduced at the last micro-batch.
                for ids in step.transpose(0, 1):
                    for micro_batch in ids:
                        (reference(input_ids=micro_batch, labels=micro_batch).loss / (world * accumulation)).backward()
                for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                    gradient, expected = whole(ours.grad), theirs.grad
                    # Sums over micro-batches and processes are in another order.
                    tolerance = 0.0 if accumulation == 1 else 2**-20 * expected.abs().max().item()
                    assert (gradient - expected).abs().max() <= tolerance, (name, case)
                    if accumulation > 1:
                        theirs.grad = gradient
                for each in (optimizer, optimizers[1]):
                    each.step()
                    each.zero_grad()
            for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert torch.equal(whole(ours.detach()), theirs), (name, case)
            for weight, expected in zip(weights_of(model), weights_of(reference), strict=True):
                assert same(whole_low_bit(weight), expected.low_bit_weight()), (weight.name, case)


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
            assert same(whole_low_bit(head.quantized_weights["weight"]), expected.low_bit_weight())


def writes_are_seen_without_a_step(folder):
    """FSDP2 gathers into the same storage without raising its version, and counts writes to a whole and to a part apart."""
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
        assert same(whole_low_bit(head.quantized_weights["weight"]), expected), write.__name__
    head.weight._local_tensor = head.weight.to_local().detach().clone()
    with pytest.raises(RuntimeError, match="Call `shard_low_bit"):
        head.low_bit_weight()


class Engine(FileTransport):
    """A transport that keeps what is sent, and may fail after the first chunk."""

    def __init__(self, fails=False):
        self.fails, self.tensors = fails, {}

    def begin(self):
        return []

    def send(self, tensors):
        self.tensors |= {name: tensor.clone() for name, tensor in tensors}
        if self.fails:
            raise PublishError("the engine is gone")

    def finish(self, fingerprints, weight_version):
        self.fingerprints, self.weight_version = fingerprints, weight_version

    def score(self, token_ids):
        return [-5.5] * (len(token_ids) - 1)

    def clear_cache(self):
        pass


def files_of(folder):
    """Of safetensors all bytes but the order of names in the header, which is another in each process."""
    return {path.name: _content(path) for path in Path(folder).rglob("*") if path.suffix in (".json", ".safetensors")}


def train(folder, name, *, arch="qwen2", resume=None, launch=None, callbacks=None, **options):
    """A training of four updates, with FSDP2 where `launch` has options for it, or within another `launch`."""
    given = {
        "per_device_train_batch_size": 2,
        # The norm of all gradients is added up in another order.
        "max_grad_norm": 0.0,
        "mismatch_probe_steps": 1,
        "eval_strategy": "no",
        "bf16": False,
    } | options
    lora = given.pop("lora", None)
    peft_config = None if lora is None else LoraConfig(**lora)
    prompts = Dataset.from_dict({"prompt": [f"{i} +" for i in range(16)]})
    is_fsdp = isinstance(launch, dict)
    with launched(**launch) if is_fsdp else launch or nullcontext():
        trainer = make_trainer(
            f"{folder}/{arch}",
            f"{folder}/{name}",
            train_dataset=prompts,
            callbacks=callbacks,
            peft_config=peft_config,
            **given,
        )
        trainer.train(resume_from_checkpoint=resume)
        if is_fsdp:
            assert_sharded(trainer.model)
        yield trainer


def assert_trained_the_same(trainer, ddp):
    """Metrics, masters and export of two trainers; returns the rows of the log."""
    assert not is_sharded(ddp.model)
    rows = ddp.state.log_history
    for ours, theirs in zip(trainer.state.log_history, rows, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if "seconds" in name or name in ("train_runtime", "step_time", "total_flos") or "per_second" in name:
                continue
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-7, nan_ok=True), name
    for (name, ours), theirs in zip(trainer.model.named_parameters(), ddp.model.parameters(), strict=True):
        # Of a frozen low-bit weight, bytes are sharded.
        assert isinstance(theirs, LowBitTensor) or torch.equal(whole(ours), theirs), name
    for ours, theirs in zip(weights_of(trainer.model), weights_of(ddp.model), strict=True):
        assert same(whole_low_bit(ours), theirs.low_bit_weight())
    export = trainer.export_model(None if is_sharded(trainer.model) else f"{trainer.export_dir}{dist.get_rank()}")
    dist.barrier()
    expected = files_of(ddp.export_model(f"{export}-alone{dist.get_rank()}"))
    found = files_of(export)
    assert found.keys() == expected.keys() and "model.safetensors" in found
    assert [name for name in found if found[name] != expected[name]] == []
    sent = dict(iter_adapter_tensors(trainer.model, trainer.policy.dtype))
    expected = dict(iter_adapter_tensors(ddp.model, trainer.policy.dtype))
    assert sent.keys() == expected.keys() and all(torch.equal(sent[name], expected[name]) for name in sent)
    return rows


def assert_publishes(trainer, ddp):
    """What one process has, and again after a failure; every process takes part where masters are sharded."""
    tokenizer = trainer.processing_class
    expected = dict(iter_checkpoint_tensors(ddp.model, trainer.policy.dtype))
    if dist.get_rank():
        follower = Publisher(trainer.model, trainer.policy.dtype, None, tokenizer)
        for _ in range(2 if is_sharded(trainer.model) else 0):
            follower.join()
    else:
        engine = Engine()
        Publisher(trainer.model, trainer.policy.dtype, engine, tokenizer).publish("1")
        assert engine.tensors.keys() == expected.keys() == engine.fingerprints.keys()
        assert all(torch.equal(bits(engine.tensors[name]), bits(tensor)) for name, tensor in expected.items())
        with pytest.raises(PublishError, match="gone"):
            Publisher(trainer.model, trainer.policy.dtype, Engine(fails=True), tokenizer).publish("2")


def a_mixture_trains_what_it_trains_with_whole_masters(folder):
    """Of five experts one process holds three."""
    options = {"arch": "qwen3_moe", "max_steps": 2, "mismatch_probe_steps": 0}
    [ddp] = train(folder, "mixture-ddp", **options)
    for trainer in train(folder, "mixture", launch={}, **options):
        assert_trained_the_same(trainer, ddp)
        experts = trainer.model.model.layers[0].mlp.experts
        assert len(experts.gate_up_proj) == 5 and len(experts.gate_up_proj.to_local()) == (3, 2)[dist.get_rank()]


LORA = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def an_adapter_trains_what_it_trains_beside_a_whole_base(folder):
    """Beside the base, of which codes are sharded, and inside it, where masters are."""
    launch = {"cpu_ram_efficient_loading": False}
    for mode in ("adapter", "merged"):
        options = {"lora": LORA, "lora_mode": mode, "optim": "adamw_torch", "learning_rate": 1e-2, "beta": 0.1}
        options |= {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "mismatch_probe_steps": 0}
        [ddp] = train(folder, f"{mode}-ddp", **options)
        for trainer in train(folder, mode, launch=launch, **options):
            rows = assert_trained_the_same(trainer, ddp)
            rates = [row["quant/code_flip_rate"] for row in rows if "quant/code_flip_rate" in row]
            assert max(rates) > 0 if mode == "merged" else not rates
            assert max(row["kl"] for row in rows if "kl" in row) > 0
            publisher = Publisher(trainer.model, trainer.policy.dtype, Engine())
            publisher.join() if dist.get_rank() else publisher.publish("1")
            expected = {n: t for n, t in iter_adapter_tensors(ddp.model, trainer.policy.dtype) if dist.get_rank() == 0}
            sent = publisher.transport.tensors
            assert (len(expected) > 0) == (mode == "adapter" and dist.get_rank() == 0)
            assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())
            [weight, *_] = weights_of(trainer.model)
            assert weight.is_frozen == (mode == "adapter") == (weight.parameter.dtype is torch.uint8)
        masters = [whole(p.detach()) for p in trainer.model.parameters()]
        checkpoint = f"{folder}/{mode}/checkpoint-1"
        for trainer in train(folder, f"{mode}-resumed", resume=checkpoint, launch=launch, **options):
            for (name, ours), theirs in zip(trainer.model.named_parameters(), masters, strict=True):
                assert torch.equal(whole(ours.detach()), theirs), name


def a_trainer_trains_what_it_trains_with_whole_masters(folder):
    """With all telemetry; its export and what it publishes are those of one process, byte for byte."""
    [ddp] = train(folder, "ddp")
    for trainer in train(folder, "fsdp", launch={}):
        rows = assert_trained_the_same(trainer, ddp)
        assert {"quant/code_flip_rate", "quant/update_to_step", "quant/sqnr", "mismatch/abs_logp_mean"} <= {
            n for row in rows for n in row
        }
        assert any(row.get("quant/code_flip_rate") for row in rows) and any("probe" in n for row in rows for n in row)
        assert_publishes(trainer, ddp)


def zero_trains_what_it_trains_with_whole_state(folder):
    if find_spec("deepspeed") is None:
        return
    import zero

    # ZeRO-2 reduces the gradients of each micro-batch, and so adds them up in another order.
    for stage, options in ((1, {"bf16": False, "gradient_accumulation_steps": 2}), (2, {"bf16": True})):
        options |= {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2, "mismatch_probe_steps": 0}
        [ddp] = train(folder, f"zero{stage}-ddp", **options)
        for trainer in train(folder, f"zero{stage}", launch=zero.launched(stage, options["bf16"]), **options):
            zero.assert_sharded(trainer, stage)
            rows = assert_trained_the_same(trainer, ddp)
            assert any(row.get("quant/update_to_step") for row in rows)
            assert_publishes(trainer, ddp)
        masters = [p.detach().clone() for p in ddp.model.parameters()]
        resume = f"{folder}/zero{stage}/checkpoint-2"
        launch = zero.launched(stage, options["bf16"])
        for trainer in train(folder, f"zero{stage}-resumed", resume=resume, launch=launch, **options):
            assert all(map(torch.equal, trainer.model.parameters(), masters))


def a_server_is_filled_and_filled_again(folder):
    """The main process alone talks to it, and a server that is lost while it generates is filled by all processes."""
    if find_spec("vllm") is None:
        return
    import fail_ddp

    transport = Engine()

    class Server(fail_ddp.Engine):
        weight_version = get_weight_version = lambda self: transport.weight_version
        num_published = num_asked = 0

        def generate(self, *args, **kwargs):
            self.num_asked += 1
            if self.num_asked == 2:
                raise ServerLost("no server answers")
            return super().generate(*args, **kwargs)

    class Generation(QaRLVLLMGeneration):
        def _connect(self):
            self.vllm_client = Server(None, None)
            self.publisher = Publisher(self.model, self.dtype, transport, self.processing_class)
            self.publisher.check_engine = dict
            self._keep_trying()

        def _publish(self):
            self.vllm_client.num_published += 1
            return super()._publish()

    options = {"use_vllm": True, "vllm_mode": "server", "vllm_max_model_length": 128, "mismatch_probe_steps": 0}
    options |= {"max_steps": 2, "steps_per_generation": 1, "max_completion_length": 4}
    with patch.object(qarl_trainer, "QaRLVLLMGeneration", Generation), patch.object(generation, "BACKOFF_SECONDS", 0):
        for trainer in train(folder, "server", launch={}, **options):
            versions = [row["rollout/weight_version"] for row in trainer.state.log_history if "reward" in row]
            assert versions == [0, 1]
            if dist.get_rank() == 0:
                # Of the first weights once, of the second twice.
                assert trainer.vllm_generation.vllm_client.num_published == 3
                assert max(row["publish/canary_abs_logp"] for row in trainer.state.log_history if "reward" in row) < 1


def a_reference_is_low_bit_and_sharded_too(folder):
    options = {"beta": 0.1, "max_steps": 3, "eval_strategy": "no"}
    [ddp] = train(folder, "reference-ddp", **options)
    for trainer in train(folder, "reference", launch={"cpu_ram_efficient_loading": False}, **options):
        assert is_sharded(trainer.ref_model) and trainer.ref_model is not trainer.model
        weights = weights_of(trainer.ref_model)
        expected = [weight.low_bit_weight() for weight in weights_of(ddp.ref_model)]
        trainer.ref_model.reshard()
        assert len(weights) == 14, (len(weights), trainer.ref_model)
        assert all(map(same, map(whole_low_bit, weights), expected))
        for name in ("kl", "loss"):
            ours, theirs = ([row[name] for row in t.state.log_history if name in row] for t in (trainer, ddp))
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-9) and len(ours) == 3, name
    assert max(theirs) > 0


def a_run_goes_on_from_its_checkpoint(folder):
    """On as many processes, from a checkpoint of whole masters and from one of shards."""
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        launch = {"state_dict_type": kind, "cpu_ram_efficient_loading": True}
        optim = {"FULL_STATE_DICT": "adamw_torch_fused", "SHARDED_STATE_DICT": "muon"}[kind]
        saving = {"save_strategy": "steps", "save_steps": 2, "launch": launch, "bf16": True, "optim": optim}
        seen = Masters()
        for trainer in train(folder, kind, callbacks=[seen], **saving):
            # accelerate would add up gradients in bfloat16.
            policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
            assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
            masters = [whole(p.detach()) for p in trainer.model.parameters()]
        if dist.get_rank() == 0:
            torch.save(seen.at[2], f"{folder}/{kind}.pt")
            torch.save(masters, f"{folder}/{kind}-end.pt")
        checkpoint = f"{folder}/{kind}/checkpoint-2"
        dist.barrier()
        assert json.loads(Path(checkpoint, "qarl.json").read_text())["scheme"] == "w4a16"
        for trainer in train(folder, f"{kind}-resumed", resume=checkpoint, **saving):
            for ours, theirs in zip(trainer.model.parameters(), masters, strict=True):
                assert torch.equal(whole(ours.detach()), theirs), kind
        for broken in train(folder, f"{kind}-other", scheme="fp8", resume=None, max_steps=1, launch=launch):
            with pytest.raises(ValueError, match="was trained with"):
                broken.train(resume_from_checkpoint=checkpoint)


def one_process_goes_on_from_a_checkpoint_of_two(folder):
    for kind, optim in (("FULL_STATE_DICT", "adamw_torch_fused"), ("SHARDED_STATE_DICT", "muon")):
        seen, before = Masters(), torch.load(f"{folder}/{kind}.pt")
        options = {"launch": {"state_dict_type": kind}, "bf16": True, "optim": optim, "max_steps": 3}
        options |= {"save_strategy": "steps", "save_steps": 3}
        for trainer in train(
            folder, f"{kind}-alone", resume=f"{folder}/{kind}/checkpoint-2", callbacks=[seen], **options
        ):
            assert all(map(torch.equal, seen.at[2], before)) and len(before) == len(seen.at[2])
            assert trainer.state.global_step == 3 and not all(map(torch.equal, seen.at[3], before))
            torch.save(seen.at[3], f"{folder}/{kind}-alone.pt")


def two_processes_go_on_from_a_checkpoint_of_one(folder):
    kind, seen = "SHARDED_STATE_DICT", Masters()
    options = {"launch": {"state_dict_type": kind}, "bf16": True, "optim": "muon"}
    resume = f"{folder}/{kind}-alone/checkpoint-3"
    for trainer in train(folder, f"{kind}-two", resume=resume, callbacks=[seen], **options):
        before = torch.load(f"{folder}/{kind}-alone.pt")
        assert all(map(torch.equal, seen.at[3], before)) and len(before) == len(seen.at[3])
        # With a learning rate of 0, as the schedule of the one ended there.
        assert trainer.state.global_step == 4


def processes_that_disagree_are_told_so(folder):
    scheme = ("w4a16", "fp8")[dist.get_rank()]
    with pytest.raises(ValueError, match="scheme='w4a16' on process 0, 'fp8' on process 1"):
        next(train(folder, "disagree", launch={}, scheme=scheme))
    with pytest.raises(ValueError, match="LoRA with fsdp_cpu_ram_efficient_loading=true"):
        next(train(folder, "lora", launch={"cpu_ram_efficient_loading": True}, lora=LORA))
    launch = {"cpu_ram_efficient_loading": False, "reshard_after_forward": False}
    with pytest.raises(ValueError, match="lora_mode='merged' with fsdp_reshard_after_forward=false"):
        next(train(folder, "merged", launch=launch, lora=LORA, lora_mode="merged"))
    with pytest.raises(ValueError, match="'model.layers.0.mlp' is gathered apart"):
        next(train(folder, "split", launch={"transformer_cls_to_wrap": "Qwen2MLP"}))


CLAIMS = [
    codes_are_those_of_one_process,
    one_process_gathers_codes_and_scales,
    writes_are_seen_without_a_step,
    training_equals_one_process,
    a_trainer_trains_what_it_trains_with_whole_masters,
    a_mixture_trains_what_it_trains_with_whole_masters,
    an_adapter_trains_what_it_trains_beside_a_whole_base,
    a_server_is_filled_and_filled_again,
    a_reference_is_low_bit_and_sharded_too,
    a_run_goes_on_from_its_checkpoint,
    processes_that_disagree_are_told_so,
    zero_trains_what_it_trains_with_whole_state,
]
LAUNCHES = [
    (2, CLAIMS),
    (1, [one_process_goes_on_from_a_checkpoint_of_two]),
    (2, [two_processes_go_on_from_a_checkpoint_of_one]),
]


def a_killed_process_leaves_a_checkpoint(folder):
    options = {"launch": {"state_dict_type": "SHARDED_STATE_DICT"}, "bf16": True, "optim": "muon"}
    killed.the_last_checkpoint_survives_a_killed_process(
        folder, train, options | {"save_strategy": "steps", "save_steps": 1}
    )


def run(path, claims):
    """Check claims as one of the processes of a launch, and write what this rank says of each."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    check(claims, path.parent, dist.get_rank(), path.with_name(f"{path.name}rank{dist.get_rank()}.json"))


def check(claims, folder, rank, path):
    found = {}
    for claim in claims:
        start = time.process_time()
        try:
            claim(folder)
            found[claim.__name__] = "holds"
        except Exception:
            found[claim.__name__] = traceback.format_exc()
        print(claim.__name__, rank, f"{time.process_time() - start:.1f} s", found[claim.__name__], flush=True)
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for index, (count, claims) in enumerate(LAUNCHES):
        asked = [claim for claim in claims if not names or claim.__name__ in names]
        if asked:
            fork_ranks(count, run, folder / f"launch{index}", asked)
    if not names or a_killed_process_leaves_a_checkpoint.__name__ in names:
        check([a_killed_process_leaves_a_checkpoint], folder, 0, folder / "killed.json")
