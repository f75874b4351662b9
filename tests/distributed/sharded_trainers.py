"""Trainings with sharded masters: weights, metrics, publications and refusals. Run by shards.py."""

import hashlib
import json
import math
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from sharded_runs import (
    COLOCATED,
    LORA,
    Engine,
    assert_follows,
    assert_publishes,
    assert_skips_updates,
    assert_trained_the_same,
    bits,
    content,
    launched,
    published,
    same,
    train,
    weights_of,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from testing_utils import make_problems, make_tiny_model, make_trainer, spread
from testing_utils.live_bytes import LiveBytes, give_completions
from testing_utils.trainings import bands
from trl_qarl.adapters.tensors import iter_adapter_tensors
from trl_qarl.bitwise.attach import has_engine_numerics
from trl_qarl.bitwise.cpu import has_engine_kernels
from trl_qarl.bitwise.exact import describe_difference
from trl_qarl.bitwise.modules import operation_of
from trl_qarl.checkpoint.layout import iter_checkpoint_layers
from trl_qarl.doctor.memory import MemorySettings, on_gpu, parts_of_memory
from trl_qarl.engines.client import ServerLost
from trl_qarl.engines.server import ServerEngine
from trl_qarl.optimizers.gradients import round_gradients
from trl_qarl.quantization.formats import int4_packed
from trl_qarl.quantization.plan import get_plan
from trl_qarl.quantization.storage import is_sharded, num_elements, refresh, storage_of, whole
from trl_qarl.quantization.swap import quantized_layers
from trl_qarl.quantization.tensors import LowBitTensor
from trl_qarl.rollout import generation
from trl_qarl.rollout.generation import QaRLVLLMGeneration
from trl_qarl.sharding.fsdp2 import _fsdp_parameters
from trl_qarl.sync.channels import FileChannel
from trl_qarl.sync.publisher import Publisher
from trl_qarl.trainer import qarl_trainer
from trl_qarl.trainer.policy import Policy
from trl_qarl.trainer.qarl_config import QaRLConfig


def a_trainer_trains_what_it_trains_with_whole_masters(folder):
    """With all telemetry and a reference; export and publication are those of one process, byte for byte."""
    options = {"per_device_train_batch_size": 4, "beta": 0.1, "optim": "muon"}
    [ddp] = train(folder, "ddp", **options)
    for trainer in train(folder, "fsdp", launch={}, **options):
        rows = assert_trained_the_same(trainer, ddp)
        names = {"quant/code_flip_rate", "quant/update_to_step", "quant/sqnr", "mismatch/abs_logp_mean"}
        assert names <= {n for row in rows for n in row}
        assert any(row.get("quant/code_flip_rate") for row in rows) and max(row.get("kl", 0) for row in rows) > 0
        assert_publishes(trainer, ddp)
        assert is_sharded(trainer.ref_model) and trainer.ref_model is not trainer.model
        trainer.ref_model.reshard()
        weights, expected = (weights_of(each.ref_model) for each in (trainer, ddp))
        assert len(weights) == 14
        assert all(map(same, (w.whole_low_bit() for w in weights), (w.low_bit_weight() for w in expected)))
        assert_only_the_sender_holds_a_gathered_layer(trainer, published(ddp.model, torch.bfloat16))


def a_class_of_its_own_is_saved_with_its_code(folder):
    options = {"arch": "own/qwen2", "trust_remote_code": True, "max_steps": 1}
    [ddp] = train(folder, "own-ddp", **options)
    for trainer in train(folder, "own-fsdp", launch={}, **options):
        assert_trained_the_same(trainer, ddp)
        trainer.save_model(saved := f"{folder}/own-fsdp/saved")
        dist.barrier()
        code = Path(folder, "own/qwen2/modeling_own.py").read_bytes()
        for written in (saved, trainer.export_dir):
            assert Path(written, "modeling_own.py").read_bytes() == code
            assert json.loads(Path(written, "config.json").read_text())["auto_map"] == {
                "AutoConfig": "configuration_own.OwnConfig",
                "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
            }


def a_mixture_trains_what_it_trains_with_whole_masters(folder):
    """One process holds three of five experts, whose layers are computed again in backward."""
    options = {"arch": "qwen3_moe", "max_steps": 2, "gradient_checkpointing": True}
    [ddp] = train(folder, "mixture-ddp", **options)
    for trainer in train(folder, "mixture", launch={}, **options):
        assert_trained_the_same(trainer, ddp)
        experts = trainer.model.model.layers[0].mlp.experts
        assert len(experts.gate_up_proj) == 5 and len(experts.gate_up_proj.to_local()) == (3, 2)[dist.get_rank()]


def masters_on_the_host_train_what_they_train_on_the_device(folder):
    """On a CPU both are the same memory; the order of moves is tested on fake tensors of a GPU."""
    options = {"max_steps": 2, "bf16": False, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3}
    # A tied head, and gradients that are added up.
    options |= bands(0.9) | {"arch": "gemma", "scheme": "fp8", "optim": "muon_8bit", "gradient_accumulation_steps": 2}
    [ddp] = train(folder, "offload-ddp", **options)
    for trainer in train(folder, "offload", launch={"offload_params": True}, **options):
        assert_trained_the_same(trainer, ddp)
        assert trainer.accelerator.state.fsdp_plugin.cpu_offload.pin_memory
        codes = [part for weight in weights_of(trainer.model) for part in weight.low_bit_weight().parts()]
        assert all(tensor.is_pinned() for tensor in (*codes, *(p.to_local() for p in trainer.model.parameters())))
        assert_publishes(trainer, ddp)
        trainer.save_model(f"{folder}/offload/saved")
        dist.barrier()
        saved, expected = (
            Path(folder, of, "model.safetensors") for of in ("offload/saved", "offload-ddp/checkpoint-2")
        )
        assert content(saved) == content(expected)
        masters = [whole(p.detach()) for p in trainer.model.parameters()]
        assert all(row["step/skipped"] == 0 for row in trainer.state.log_history if "step/skipped" in row)
    resume = f"{folder}/offload/checkpoint-1"
    for trainer in train(folder, "offload-resumed", resume=resume, launch={"offload_params": True}, **options):
        assert all(torch.equal(whole(p.detach()), q) for p, q in zip(trainer.model.parameters(), masters, strict=True))


def updates_without_a_gradient_are_skipped_by_all(folder):
    assert_skips_updates(folder, "skips-ddp", optim="adamw_torch")
    assert_skips_updates(folder, "skips-fsdp", {}, optim="muon_8bit")


def an_adapter_trains_what_it_trains_beside_a_whole_base(folder):
    """An adapter next to the base, whose codes are sharded, and one inside it, where the masters are sharded."""
    launch = {}
    for mode in ("adapter", "merged"):
        options = {"lora": LORA, "lora_mode": mode, "optim": "adamw_torch", "learning_rate": 1e-2, "beta": 0.1}
        options |= {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
        [ddp] = train(folder, f"{mode}-ddp", **options)
        for trainer in train(folder, mode, launch=launch, **options):
            rows = assert_trained_the_same(trainer, ddp)
            rates = [row["quant/code_flip_rate"] for row in rows if "quant/code_flip_rate" in row]
            assert max(rates) > 0 if mode == "merged" else not rates
            assert max(row["kl"] for row in rows if "kl" in row) > 0
            publisher = Publisher(trainer.model, trainer.policy.dtype, Engine())
            publisher.join() if dist.get_rank() else publisher.publish("1")
            expected = {n: t for n, t in iter_adapter_tensors(ddp.model, trainer.policy.dtype) if dist.get_rank() == 0}
            sent = publisher.engine.tensors
            assert (len(expected) > 0) == (mode == "adapter" and dist.get_rank() == 0)
            assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())
            [weight, *_] = weights_of(trainer.model)
            assert weight.is_frozen == (mode == "adapter") == (weight.parameter.dtype is torch.uint8)
        masters = [whole(p.detach()) for p in trainer.model.parameters()]
        checkpoint = f"{folder}/{mode}/checkpoint-1"
        for trainer in train(folder, f"{mode}-resumed", resume=checkpoint, launch=launch, **options):
            for (name, ours), theirs in zip(trainer.model.named_parameters(), masters, strict=True):
                assert torch.equal(whole(ours.detach()), theirs), name


def global_scales_are_those_of_the_process_that_loads(folder):
    for name, options in (("masters", {}), ("frozen", {"lora": LORA, "learning_rate": 1e-2})):
        options = {"scheme": "nvfp4a16", "optim": "adamw_torch", "max_steps": 2} | options
        [ddp] = train(folder, f"{name}-global-ddp", **options)
        for trainer in train(folder, f"{name}-global", launch={}, **options):
            assert_trained_the_same(trainer, ddp)
            assert trainer.policy.record() == ddp.policy.record() and trainer.policy.record()["global_scales"]


def a_process_that_loads_no_weights_takes_no_memory_for_them(folder):
    if not dist.get_rank():
        make_tiny_model(f"{folder}/large", "qwen2", vocab_size=2**18)
    dist.barrier()
    with launched():
        policy = Policy(QaRLConfig(f"{folder}/no-memory"))
        before = psutil.Process().memory_info().rss
        model = policy.load(f"{folder}/large/qwen2", dtype=torch.float32)
        grown = psutil.Process().memory_info().rss - before
    if dist.get_rank():
        size = sum(parameter.nbytes for parameter in model.parameters())
        assert grown < size / 4, (grown, size)


def precisions_in_turn_train_what_they_train_with_whole_masters(folder):  # nightly
    """Later gathers, publications and forwards use the bits that are set."""
    precisions = [2, 4]
    options = {"arch": "qwen3_moe", "precisions": precisions, "steps_per_generation": 1, "max_steps": 2}
    [ddp] = train(folder, "precisions-ddp", **options)
    for trainer in train(folder, "precisions", launch={"reshard_after_forward": False}, **options):
        rows = assert_trained_the_same(trainer, ddp)
        assert [row["quant/bits"] for row in rows if "quant/bits" in row] == [2.0, 4.0]
        [layer, *_] = quantized_layers(trainer.model).values()
        for precision in (*precisions, 3, None):
            for each in (trainer, ddp):
                each.set_precision(precision)
            with torch.no_grad():
                ours, theirs = (each.model(input_ids=torch.arange(3, 9).view(1, -1)).logits for each in (trainer, ddp))
            assert torch.equal(ours, theirs), precision
            # Gathered still, as FSDP2 keeps it for the next forward.
            assert layer.weight.scheme == layer.scheme and isinstance(layer.weight, LowBitTensor), precision
        for precision in (precisions[0], None):
            for each in (trainer, ddp):
                each.set_precision(precision)
            assert_publishes(trainer, ddp)


def engine_numerics_train_what_they_train_with_whole_masters(folder):
    """Rollout and learner agree bit for bit, also where weights are written to without a step of the optimizer."""
    [ddp] = train(folder, "engine-ddp", **ENGINE)
    for trainer in train(folder, "engine", launch={}, **ENGINE):
        assert_agrees(trainer, ddp)
        differing = {"old_per_token_logps": torch.zeros(1, 1), "sampling_per_token_logps": torch.ones(1, 1)}
        differing["completion_ids"] = torch.full((1, 1), 7)
        said = describe_difference(differing, torch.ones(1, 1), trainer.model, score=pytest.fail)
        assert said.endswith("log-probs 0.000000 and 1.000000")
        logits = []
        for factor in (1, -2):
            with torch.no_grad():
                for each in (trainer, ddp):
                    refresh(each.model)
                    each.model.get_output_embeddings().weight.mul_(factor)
                    logits.append(each.model(input_ids=torch.arange(3, 9).view(1, -1)).logits)
        assert torch.equal(logits[0], logits[1]) and torch.equal(logits[2], logits[3])
        assert not torch.equal(logits[0], logits[2])


def engine_numerics_beside_an_adapter_or_a_reference(folder):  # nightly
    """FSDP2 gathers the head of a model with an adapter where it is called alone, and has sharded a reference before
    operations are put in."""
    adapter = {"lora": LORA, "optim": "adamw_torch", "learning_rate": 1e-2}
    for name, options in (
        ("adapter", adapter),
        ("merged", adapter | {"lora_mode": "merged"}),
        ("reference", {"beta": 0.1}),
    ):
        [ddp] = train(folder, f"engine-{name}-ddp", **ENGINE | options)
        launch = {}
        for trainer in train(folder, f"engine-{name}", launch=launch, **ENGINE | options):
            rows = assert_agrees(trainer, ddp)
            if name == "reference":
                assert is_sharded(trainer.ref_model) and has_engine_numerics(trainer.ref_model)
                operations = filter(None, map(operation_of, trainer.ref_model.modules()))
                assert not any(operation.keeps_products for operation in operations)
                assert max(row["kl"] for row in rows if "kl" in row) > 0


ENGINE = {"numerics": "engine", "bf16": True, "max_steps": 2}


def assert_agrees(trainer, ddp):
    """Compare weights with those of `ddp`, and log-probs of rollout and learner."""
    rows = assert_trained_the_same(trainer, ddp)
    assert trainer.numerics == ddp.numerics == "engine" and max(row.get("loss", 0) for row in rows) != 0
    assert {row["mismatch/abs_logp_max"] for row in rows if "mismatch/abs_logp_max" in row} == {0.0}
    return rows


SERVED = {"use_vllm": True, "vllm_mode": "server", "vllm_max_model_length": 128}
SERVED |= {"max_completion_length": 4}


@contextmanager
def playing(failures=()):
    """Trainers whose server is an object that fails so, and draws by all that it was sent."""
    from testing_utils.played_server import Server

    transport, failures = Engine(), [*failures]

    class Generation(QaRLVLLMGeneration):
        def _connect(self):
            self.vllm_client = Server(self.model)
            self.vllm_client.failures = {"generate": failures}
            self.vllm_client.weight_version = lambda: transport.weight_version
            self.engine = ServerEngine(self.vllm_client, FileChannel(self.vllm_client))
            self.publisher = Publisher(self.model, self.dtype, transport, self.processing_class)
            self.publisher.check_engine = dict
            self.vllm_client.generate = self._completions

        def _publish(self):
            self.vllm_client.version = "sent"
            super()._publish()
            sent = sorted((name, bits(tensor).numpy().tobytes()) for name, tensor in transport.tensors.items())
            self.vllm_client.held = hashlib.sha256(repr(sent).encode()).hexdigest()

    with patch.object(qarl_trainer, "QaRLVLLMGeneration", Generation), patch.object(generation, "BACKOFF_SECONDS", 0):
        yield


AHEAD = SERVED | {"rollout_ahead": 1, "steps_per_generation": 2, "learning_rate": 1e-2, "save_strategy": "steps"}


def assert_draws_ahead(folder, name, launch, callbacks=(None, None), max_steps=6, **options):
    """
    Compare a training whose batches are drawn ahead with one of DDP, whatever is lost, and resumed.

    `launch` makes what [`train`] takes, and `callbacks` are those of the launch and of DDP. Returns the last trainer
    of the launch that was not interrupted.
    """
    # In the middle of the last batch but one.
    options, saved_at = AHEAD | options | {"max_steps": max_steps, "save_steps": max_steps - 3}, max_steps - 3
    ours, theirs = callbacks
    with playing():
        [ddp] = train(folder, f"ahead-{name}-ddp", callbacks=theirs, **options)
    with playing():
        for trainer in train(folder, f"ahead-{name}", launch=launch(), callbacks=ours, **options):
            rows = assert_trained_the_same(trainer, ddp)
            masters = [whole(p).detach() for p in trainer.model.parameters()]
            part = f"_{dist.get_rank()}" if is_sharded(trainer.model) else ""
    begun = [row for row in rows if "rollout/age_updates" in row]
    assert [row["rollout/age_updates"] for row in begun] == [0, *[2] * (len(begun) - 1)] and len(begun) > 1
    assert min(row["staleness/abs_logp_mean"] for row in begun[1:]) > 0
    checkpoint = f"{folder}/ahead-{name}/checkpoint-{saved_at}"
    assert Path(checkpoint, f"rollout_version{part}.pt").is_file()
    lost = [None, ServerLost("no server answers")]
    for kind, failures, resume in (("lost", lost, None), ("resumed", (), checkpoint)):
        given = {"resume": resume, "launch": launch(), "callbacks": ours}
        with playing(failures):
            for again in train(folder, f"ahead-{name}-{kind}", **given, **options):
                for (parameter, found), expected in zip(again.model.named_parameters(), masters, strict=True):
                    assert torch.equal(whole(found).detach(), expected), (name, kind, parameter)
    return trainer


def batches_drawn_ahead_train_what_they_train_with_whole_masters(folder):  # nightly
    """Each process keeps its part of the weights that draw them. A batch that was lost, and one that was pending in a
    checkpoint, are of these."""
    if find_spec("vllm") is None:
        return
    adapter = {"lora": LORA, "optim": "adamw_torch", "max_steps": 4}
    launch = dict
    assert_draws_ahead(folder, "masters", launch)
    assert_draws_ahead(folder, "adapter", launch, **adapter, lora_mode="adapter")
    merged = assert_draws_ahead(folder, "merged", launch, **adapter, lora_mode="merged")
    assert max(row.get("quant/code_flip_rate", 0) for row in merged.state.log_history) > 0


def replicas_of_shards_train_what_they_train_with_whole_masters(folder):  # nightly
    """Two replicas of two shards each (HSDP). Gradients of two of four processes, whose sum does not depend on its
    order."""

    def reward(completions, **kwargs):
        return spread(completions) if dist.get_rank() % 2 == 0 else [1.0] * len(completions)

    options = {"per_device_train_batch_size": 4, "reward": reward, "save_strategy": "steps", "save_steps": 2}
    for optim in ("muon", "adamw_torch"):
        options |= {"optim": optim, "learning_rate": 1e-3}
        launch = {"replicas": 2}
        [ddp] = train(folder, f"replicas-{optim}-ddp", **options)
        for trainer in train(folder, f"replicas-{optim}", launch=launch, **options):
            assert_trained_the_same(trainer, ddp)
            assert_publishes(trainer, ddp)
            assert_only_the_sender_holds_a_gathered_layer(trainer, published(ddp.model, torch.bfloat16))
            masters = [whole(p.detach()) for p in trainer.model.parameters()]
        resume = f"{folder}/replicas-{optim}/checkpoint-2"
        for trainer in train(folder, f"replicas-{optim}-resumed", resume=resume, launch=launch, **options):
            for ours, theirs in zip(trainer.model.parameters(), masters, strict=True):
                assert torch.equal(whole(ours.detach()), theirs), optim
            round_gradients(trainer.accelerator, trainer.model)
            parameters = [*trainer.model.parameters()]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter, dtype=parameter.grad_dtype)
            norm = trainer.accelerator.clip_grad_norm_(parameters, 1e9).item()
            assert norm == pytest.approx(num_elements(parameters) ** 0.5, rel=1e-6)


def _plain_tensors(tree):
    return [tensor for tensor in tree_leaves(tree) if type(tensor) is torch.Tensor and not tensor.is_meta]


class _Largest(TorchDispatchMode):
    """Keeps the bytes of the largest tensor that an operation makes, other than a view."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in _plain_tensors((args, kwargs))}
        found = [
            tensor.nbytes for tensor in _plain_tensors(output) if tensor.untyped_storage().data_ptr() not in given
        ]
        self.num_bytes = max([self.num_bytes, *found])
        return output


def assert_only_the_sender_holds_a_gathered_layer(trainer, expected):
    largest = max(map(len, expected.values()))
    for to_main, is_whole in ((False, True), (True, dist.get_rank() == 0)):
        # Codes of own rows are made once, from float32.
        iterate = partial(iter_checkpoint_layers, trainer.model, torch.bfloat16, stacks_experts=True, to_main=to_main)
        names = [[name for name, _ in layer] for layer in iterate()]
        with _Largest() as seen:
            layers = list(iterate())
        assert (seen.num_bytes >= largest) == is_whole, (to_main, seen.num_bytes, largest)
        assert [[name for name, _ in layer] for layer in layers] == names and {*chain(*names)} == expected.keys()
        for name, tensor in chain.from_iterable(layers):
            assert tensor.is_meta != is_whole, name
            assert not is_whole or bits(tensor).numpy().tobytes() == expected[name], name


class _Phases(TrainerCallback):
    """Calls the phase of `live` "layers" while these are differentiated."""

    def __init__(self, live):
        self.live = live

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.model.norm.register_full_backward_pre_hook(lambda *args: setattr(self.live, "phase", "layers"))
        model.register_forward_pre_hook(lambda *args: setattr(self.live, "phase", "head"))
        for parameter in model.parameters():
            self.live.add(parameter.detach())


def the_peak_of_fsdp2_is_what_was_calculated(folder):  # nightly
    """Most of the model is its vocabulary: gradients are sharded, but whole while micro-batches are added up."""
    words, hidden = 8192, 128
    if dist.get_rank() == 0:
        make_tiny_model(f"{folder}/words", "qwen2", hidden_size=hidden, intermediate_size=256, vocab_size=words)
    dist.barrier()
    with torch.device("meta"):
        shapes = partial(AutoModelForCausalLM.from_config, AutoConfig.from_pretrained(f"{folder}/words/qwen2"))
    for steps in (1, 2):
        live = LiveBytes()
        int4_packed._table.cache_clear()
        options = {"bf16": True, "num_generations": 2, "rollout_func": give_completions}
        options |= {"gradient_accumulation_steps": steps, "max_steps": 2}
        with live:
            [trainer] = train(f"{folder}/words", f"peak-{steps}", launch={}, callbacks=[_Phases(live)], **options)
        with torch.device("meta"):
            run = MemorySettings(2, trainer.args.optim, num_tokens=2 * 64, accumulates=steps > 1)
            parts = parts_of_memory(shapes(), get_plan(trainer.args.scheme), [run])[0]["fsdp2"]
        # Nothing is published. gloo reduces a copy, and codes are unpacked with a table.
        calculated = on_gpu(parts) - parts["logits"] - parts["weight sync"] + 4 * words * hidden + 2**20
        assert calculated == pytest.approx(live.peaks["layers"], rel=0.1), steps


class _OnDevice(LiveBytes):
    """Leaves out what is in host memory where there is a GPU: masters, gradients, optimizer state and codes."""

    host = ()

    def alive(self):
        found = {}
        for model, optimizer in self.host:
            # In a forward the model itself has gathered parameters.
            masters = [each.sharded_param for each in _fsdp_parameters(model)]
            tensors = [tensor for p in masters for tensor in (p, p.grad) if tensor is not None]
            tensors += [value for values in optimizer.state.values() for value in values.values()]
            tensors = [storage_of(tensor).local(tensor) for tensor in tensors]
            kept = [low_bit for weight in weights_of(model) for low_bit, _ in weight._kept.values()]
            tensors += [part for low_bit in kept for part in low_bit.parts()]
            found |= {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return super().alive() - sum(size for key, size in found.items() if key in self.storages)


class _WatchesDevice(_Phases):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        super().on_train_begin(args, state, control, model=model)
        self.live.host = [(model, optimizer.optimizer)]

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        # AdamW steps on the host.
        self.live.phase = "step"


def the_peak_with_masters_on_the_host_is_what_was_calculated(folder):  # nightly
    """Of a model that is mostly vocabulary, and of one that is mostly layers."""
    world, hidden = dist.get_world_size(), 128
    for words, inner, count in ((8192, 256, 2), (512, 1024, 8)):
        place = f"{folder}/host-{words}"
        if dist.get_rank() == 0:
            make_tiny_model(place, "qwen2", hidden_size=hidden, intermediate_size=inner, vocab_size=words)
        dist.barrier()
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"{place}/qwen2"))
        # The prompt that all completions share is computed once.
        live, run = _OnDevice(), MemorySettings(world, "adamw_torch", num_tokens=4 + 60 * count)
        int4_packed._table.cache_clear()
        options = {"bf16": True, "num_generations": count, "rollout_func": give_completions, "max_steps": 2}
        options |= {"per_device_train_batch_size": count, "callbacks": [_WatchesDevice(live)]}
        with live:
            [trainer] = train(place, "peak-host", launch={"offload_params": True}, **options)
        with torch.device("meta"):
            parts = parts_of_memory(shapes, get_plan(trainer.args.scheme), [run])[0]["fsdp2_offload"]
        # Nothing is published. gloo reduces a copy, and codes are unpacked with tables.
        calculated = on_gpu(parts) - parts["logits"] - parts["weight sync"]
        calculated += 4 * words * hidden * (world > 1) + 3 * 2**19
        print(f"{calculated / live.peaks['layers']:.3f} of the peak", words, world, dict(live.peaks))
        assert calculated == pytest.approx(live.peaks["layers"], rel=0.1), (words, parts)
        state = [*trainer.optimizer.optimizer.state.values()]
        measured = {
            "host masters": sum(p.to_local().nbytes for p in trainer.model.parameters()),
            "host optimizer": sum(v.to_local().nbytes for values in state for v in values.values() if v.ndim),
        }
        for name, size in measured.items():
            assert world * size == pytest.approx(parts[name], rel=1e-3), name
        codes = [part for weight in weights_of(trainer.model) for part in weight.low_bit_weight().parts()]
        shards = [p.to_local() for p in trainer.model.parameters()]
        # Gradients are as large as masters. torch pins powers of two.
        blocks = sum(2 ** math.ceil(math.log2(tensor.nbytes)) for tensor in (*shards, *shards, *codes))
        names = ("host masters", "host gradients", "host low-bit weights", "host rounding")
        assert world * blocks == sum(parts[name] for name in names)


def torchao_steps_as_with_whole_masters(folder):  # nightly
    """Layers are computed again in backward by accelerate's option. torch compiles no step in 4 bits on shards."""
    eager = partial(torch.compiler.set_stance, "force_eager")
    for optim, kind in (("adamw_torch_4bit", OptimState4bit), ("adamw_torch_8bit", OptimState8bit)):
        options = {"optim": optim, "max_steps": 2, "learning_rate": 1e-2, "gradient_checkpointing": False}
        # With compiling switched off torchao refuses to step at all, and it compiles for most of a minute.
        with patch.object(torch._dynamo.config, "disable", False):
            with eager():
                [ddp] = train(folder, f"{optim}-ddp", **options)
            with nullcontext() if kind is OptimState4bit else eager():
                for trainer in train(folder, optim, launch={"activation_checkpointing": True}, **options):
                    assert_trained_the_same(trainer, ddp)
                    states = trainer.optimizer.optimizer.state.values()
                    assert kind in {type(state["exp_avg"].to_local()) for state in states}


def processes_that_disagree_are_told_so(folder):
    scheme = ("w4a16", "fp8")[dist.get_rank()]
    with pytest.raises(ValueError, match="scheme='w4a16' on process 0, 'fp8' on process 1"):
        next(train(folder, "disagree", launch={}, scheme=scheme))
    with pytest.raises(ValueError, match=r"precisions=\[4, 3\] on process 0, \[4, 2\] on process 1"):
        next(train(folder, "disagree", launch={}, precisions=[4, (3, 2)[dist.get_rank()]]))
    launch = {"reshard_after_forward": False}
    with pytest.raises(ValueError, match="lora_mode='merged' with fsdp_reshard_after_forward=false"):
        next(train(folder, "merged", launch=launch, lora=LORA, lora_mode="merged"))
    with pytest.raises(ValueError, match="'model.layers.0.mlp' is gathered apart"):
        next(train(folder, "split", launch={"transformer_cls_to_wrap": "Qwen2MLP"}))


def colocated_engines_are_filled_by_every_process(folder):
    """Each with one of its own; and with the learner's arithmetic, log-probs are the engine's."""
    if find_spec("vllm") is None:
        return
    numerics = {"bf16": True, "numerics": "engine"} if has_engine_kernels() else {}
    for trainer in train(folder, "colocated", launch={}, **COLOCATED, **numerics):
        assert_follows(trainer, bound=0.0 if numerics else 1e-5)


def a_sharded_trainer_trains_once(folder):
    with launched():
        trainer = make_trainer(
            f"{folder}/qwen2", f"{folder}/once", eval_dataset=make_problems(), max_steps=1, bf16=False
        )
        with pytest.raises(RuntimeError, match="An evaluation before the training: .* `eval_on_start=True`"):
            trainer.evaluate()
        trainer.train()
        with pytest.raises(RuntimeError, match="A training after another one"):
            trainer.train()
