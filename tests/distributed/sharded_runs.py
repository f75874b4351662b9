"""
Helpers for claims about several processes: FSDP2 on a CPU, trainings with and without it, comparisons of two
trainings.

accelerate gives FSDP to GPUs alone: on a CPU it runs DDP without a word. [`launched`] has it shard with gloo, and
[`train`] checks that parameters are sharded.
"""

import hashlib
import json
import os
import weakref
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from testing_utils import launch_environment, make_trainer
from testing_utils.pictures import KINDS, make_picture_problems, spread
from testing_utils.trainings import Masters, Spoils, bands
from trl_qarl.adapters.tensors import iter_adapter_tensors
from trl_qarl.checkpoint import marker
from trl_qarl.checkpoint.export import read_header
from trl_qarl.checkpoint.layout import iter_checkpoint_layers
from trl_qarl.quantization.storage import is_sharded, whole
from trl_qarl.quantization.swap import quantized_layers
from trl_qarl.quantization.tensors import LowBitTensor
from trl_qarl.sync import canary
from trl_qarl.sync.publisher import Publisher
from trl_qarl.wire.protocol import PublishError


LORA = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def same(ours, theirs):
    return torch.equal(bits(ours.qdata), bits(theirs.qdata)) and torch.equal(bits(ours.scale), bits(theirs.scale))


@contextmanager
def pinning():
    """Plays pinned memory, which needs a GPU: a copy that is remembered."""
    pinned = set()

    def pin(tensor, device=None):
        block = (copy := tensor.clone()).untyped_storage()
        pinned.add(block._cdata)
        weakref.finalize(block, pinned.discard, block._cdata)
        return copy

    is_pinned = lambda tensor, device=None: tensor.untyped_storage()._cdata in pinned  # noqa: E731
    with patch.object(torch.Tensor, "pin_memory", pin), patch.object(torch.Tensor, "is_pinned", is_pinned):
        yield


@contextmanager
def launched(replicas=1, **options):
    """Environment as `accelerate launch` makes it of the shipped configuration for FSDP2, but for these options. Each
    of the `replicas` has all shards."""
    shipped = launch_environment("fsdp2.yaml")
    environment = {name: value for name, value in shipped.items() if name.startswith(("FSDP_", "ACCELERATE_USE_"))}
    environment["ACCELERATE_TORCH_DEVICE"] = "cpu"
    environment |= {f"FSDP_{k.upper()}": v if isinstance(v, str) else str(v).lower() for k, v in options.items()}
    if replicas > 1:
        sizes = {"DP_REPLICATE_SIZE": replicas, "DP_SHARD_SIZE": dist.get_world_size() // replicas}
        environment |= {f"PARALLELISM_CONFIG_{name}": str(size) for name, size in sizes.items()}
        environment["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    AcceleratorState._reset_state(True)
    backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)  # noqa: E731
    try:
        with (
            patch.dict(os.environ, environment),
            patch.object(PartialState, "_prepare_backend", backend),
            pinning(),
        ):
            yield
    finally:
        AcceleratorState._reset_state(True)


def assert_sharded(model, replicas=1):
    assert isinstance(model, FSDPModule)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert all(len(p.to_local()) <= -(-len(p) * replicas // dist.get_world_size()) for p in model.parameters())


def make_model(folder, arch="qwen2", loader=AutoModelForCausalLM, **overrides):
    with patch.dict(os.environ, {"ACCELERATE_USE_FSDP": "false"}):
        return loader.from_pretrained(f"{folder}/{arch}", dtype=torch.float32, **overrides)


def published(model, dtype):
    """Bytes of everything that an engine is sent, by name; all processes have to call."""
    layers = iter_checkpoint_layers(model, dtype, stacks_experts=True)
    return {name: bits(tensor).numpy().tobytes() for name, tensor in chain.from_iterable(layers)}


def weights_of(model):
    return [weight for layer in quantized_layers(model).values() for weight in layer.quantized_weights.values()]


# The log-probs of `Engine` are those of no weights.
canary.SMALLEST = canary.LARGEST


class Engine:
    """An engine that keeps what is sent, and may fail after the first chunk."""

    works_meanwhile = in_every_process = False

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

    def score(self, token_ids, pictures=()):
        return [-5.5] * (len(token_ids) - 1)

    def clear_cache(self):
        pass


def files_of(folder):
    """Contents of files; without the order of names in the header of safetensors, which differs between processes, and
    of lists in JSON."""
    return {path.name: content(path) for path in Path(folder).rglob("*") if path.suffix in (".json", ".safetensors")}


def content(path):
    with path.open("rb") as file:
        if path.suffix == ".json":
            described = json.load(file)
            return {name: sorted(v, key=str) if isinstance(v, list) else v for name, v in described.items()}
        return read_header(file)[1], hashlib.file_digest(file, "sha256").digest()


def train(folder, name, *, arch="qwen2", resume=None, launch=None, callbacks=None, rows=None, **options):
    """A training of four updates, with FSDP2 where `launch` has options for it, or within another `launch`."""
    given = {
        "per_device_train_batch_size": 2,
        # The norm of all gradients is added up in another order.
        "max_grad_norm": 0.0,
        "eval_strategy": "no",
        "bf16": False,
    } | options
    lora = given.pop("lora", None)
    peft_config = None if lora is None else LoraConfig(**lora)
    data = {"train_dataset": rows or Dataset.from_dict({"prompt": [f"{i} +" for i in range(16)]})}
    if arch in KINDS:
        data = {"train_dataset": rows or make_picture_problems(16), "reward": spread}
    is_fsdp = isinstance(launch, dict)
    with launched(**launch) if is_fsdp else launch or nullcontext():
        trainer = make_trainer(
            f"{folder}/{arch}", f"{folder}/{name}", callbacks=callbacks, peft_config=peft_config, **data, **given
        )
        trainer.train(resume_from_checkpoint=resume)
        if is_fsdp:
            assert_sharded(trainer.model, launch.get("replicas", 1))
        yield trainer


def assert_skips_updates(folder, name, launch=None, **options):
    """Two updates with a gradient of the last process alone, then two without any, which move nothing."""
    num_calls = 0

    def reward(completions, **kwargs):
        nonlocal num_calls
        num_calls += 1
        has_spread = num_calls == 1 and dist.get_rank() == dist.get_world_size() - 1
        return spread(completions) if has_spread else [1.0] * len(completions)

    seen = Masters()
    options |= bands(0.9) | {"weight_decay": 0.1, "callbacks": [seen], "reward": reward}
    for trainer in train(folder, name, launch=launch, **options):
        skipped = [row["step/skipped"] for row in trainer.state.log_history if "step/skipped" in row]
        moved = [not all(map(torch.equal, seen.at[i], seen.at[i + 1])) for i in range(4)]
        assert (skipped, moved) == ([0, 0, 1, 1], [True, True, False, False]), (name, skipped, moved)
        assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(5e-4), "two of four updates on a line to 0"


def assert_keeps_the_last_finite(folder, name, **options):
    """No process writes weights of which another one has a NaN, and the earlier checkpoint stays."""
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    named = "After update 3 .*up_proj.weight.*checkpoint-3 is not written"
    with pytest.raises(ValueError, match=named):
        spoils = [Spoils(3, of_weight=True)] if dist.get_rank() == dist.get_world_size() - 1 else []
        [*train(folder, name, callbacks=spoils, **saving, **options)]
    dist.barrier()
    assert [path.name for path in Path(folder, name).glob("checkpoint-*")] == ["checkpoint-2"]
    assert marker.is_complete(Path(folder, name, "checkpoint-2"))


def assert_trained_the_same(trainer, ddp):
    """Metrics, masters and export of two trainers; returns the rows of the log."""
    assert not is_sharded(ddp.model)
    rows = ddp.state.log_history
    for ours, theirs in zip(trainer.state.log_history, rows, strict=True):
        # With sharded masters every process computes it, needed or not.
        assert ours.keys() ^ theirs.keys() <= {"publish/canary_rounding"}
        for name in ours.keys() & theirs.keys():
            value = theirs[name]
            if "seconds" in name or name in ("train_runtime", "step_time", "total_flos") or "per_second" in name:
                continue
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-7, nan_ok=True), (name, ours[name], value)
    for (name, ours), theirs in zip(trainer.model.named_parameters(), ddp.model.parameters(), strict=True):
        # Of a frozen low-bit weight, bytes are sharded.
        assert isinstance(theirs, LowBitTensor) or torch.equal(whole(ours), theirs), name
    for ours, theirs in zip(weights_of(trainer.model), weights_of(ddp.model), strict=True):
        assert same(ours.whole_low_bit(), theirs.low_bit_weight())
    export = trainer.export_model()
    expected = ddp.export_model(f"{export}-alone")
    dist.barrier()
    found, expected = files_of(export), files_of(expected)
    assert found.keys() == expected.keys() and "model.safetensors" in found
    differing = [name for name in found if found[name] != expected[name]]
    assert not differing, differing
    sent = dict(iter_adapter_tensors(trainer.model, trainer.policy.dtype))
    expected = dict(iter_adapter_tensors(ddp.model, trainer.policy.dtype))
    assert sent.keys() == expected.keys() and all(torch.equal(sent[name], expected[name]) for name in sent)
    return rows


# A training of two generation batches with an engine in every process.
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128}
COLOCATED |= {"max_steps": 2, "steps_per_generation": 1, "learning_rate": 1e-2}
# vLLM's engine ends the processes' group when it is collected.
ENGINES = []


def assert_follows(trainer, bound):
    """Rollouts of an engine that has the learner's weights; log-probs differ by `bound` at most."""
    rows = [row for row in trainer.state.log_history if "reward" in row]
    assert [row["rollout/weight_version"] for row in rows] == [0, 1] and rows[1]["quant/code_flip_rate"] > 0
    assert max(row["mismatch/abs_logp_max"] for row in rows) <= bound
    ENGINES.append(trainer.vllm_generation.llm)
    assert ENGINES[-1].get_weight_version().startswith("1-")


def fails_at_once(engine):
    raise PublishError("the gate is closed")


def assert_publishes(trainer, ddp):
    """Publish the tensors of one process, also after failures; every process takes part where masters are sharded."""
    tokenizer = trainer.processing_class
    layers = iter_checkpoint_layers(ddp.model, trainer.policy.dtype, stacks_experts=True)
    expected = dict(chain.from_iterable(layers))
    if dist.get_rank():
        follower = Publisher(trainer.model, trainer.policy.dtype, None, tokenizer)
        for _ in range(3 if is_sharded(trainer.model) else 0):
            follower.join()
    else:
        engine = Engine()
        Publisher(trainer.model, trainer.policy.dtype, engine, tokenizer).publish("1")
        assert engine.tensors.keys() == expected.keys() == engine.fingerprints.keys()
        assert all(torch.equal(bits(engine.tensors[name]), bits(tensor)) for name, tensor in expected.items())
        with pytest.raises(PublishError, match="gone"):
            Publisher(trainer.model, trainer.policy.dtype, Engine(fails=True), tokenizer).publish("2")
        with pytest.raises(PublishError, match="closed"), patch.object(Engine, "begin", fails_at_once):
            Publisher(trainer.model, trainer.policy.dtype, Engine(), tokenizer).publish("3")
