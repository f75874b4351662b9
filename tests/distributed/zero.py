"""
DeepSpeed on two processes without a GPU. Run by shards.py. accelerate leaves it out on a CPU: [`launched`] does not
let it, and [`assert_sharded`] checks that it is there.
"""

import inspect
import os
import sys
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from unittest.mock import patch

import killed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from sharded_runs import (
    COLOCATED,
    LORA,
    assert_follows,
    assert_keeps_the_last_finite,
    assert_publishes,
    assert_skips_updates,
    assert_trained_the_same,
    same,
    train,
    weights_of,
)
from sharded_trainers import assert_draws_ahead
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from testing_utils import launch_environment
from trl_qarl.bitwise.cpu import has_engine_kernels
from trl_qarl.quantization.storage import num_elements, whole, writes_to


def without_cpu(init):
    def init_without_cpu(self, *args, **kwargs):
        given = inspect.signature(init).bind(self, *args, **kwargs).arguments
        given["cpu"] = False
        more = given.pop("kwargs", {})
        init(**given, **more)

    return init_without_cpu


def cutting(init, threshold):
    def init_cutting(self):
        init(self)
        # Of so small a model, ZeRO-3 would keep all parameters whole.
        self.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold

    return init_cutting


OFFLOADED = {
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
}


@contextmanager
def on_cpu(threshold=0):
    """Have accelerate and DeepSpeed run on a CPU as on GPUs, and leave nothing behind. ZeRO-3 keeps parameters of so
    many elements whole."""
    import deepspeed

    AcceleratorState._reset_state(True)
    try:
        with (
            patch.object(
                PartialState, "_prepare_backend", lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
            ),
            # There is no DeepSpeed for a CPU that is asked for.
            patch.object(PartialState, "__init__", without_cpu(PartialState.__init__)),
            patch.object(AcceleratorState, "__init__", without_cpu(AcceleratorState.__init__)),
            patch.object(DeepSpeedPlugin, "__post_init__", cutting(DeepSpeedPlugin.__post_init__, threshold)),
            # ZeRO-3 leaves another operation there.
            patch.object(F, "linear", F.linear),
            # Compiles for minutes.
            patch.object(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None),
        ):
            assert deepspeed.accelerator.get_accelerator().device_name() == "cpu"
            yield
    finally:
        AcceleratorState._reset_state(True)
        # By which the next model would be cut too.
        unset_hf_deepspeed_config()


@contextmanager
def launched(stage, bf16, threshold=0, **more):
    """Environment as `accelerate launch` makes it of the shipped configuration for a stage, and `more`."""
    shipped = launch_environment(f"deepspeed_zero{stage}.yaml")
    environment = {name: value for name, value in shipped.items() if name.startswith("ACCELERATE_")}
    environment |= {"ACCELERATE_TORCH_DEVICE": "cpu"} | ({} if bf16 else {"ACCELERATE_MIXED_PRECISION": "no"})
    with patch.dict(os.environ, environment | more), on_cpu(threshold):
        yield


def passed_on(value):
    return value.view_as(value) if isinstance(value, torch.Tensor) and value.requires_grad else value


class MovesFrozen(TrainerCallback):
    """Has frozen weights at addresses as those of a tensor of its own: they are read from a file, and last bits of a
    product depend on them."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.clone()


class AddsUpAsDeepSpeed(TrainerCallback):
    """
    Has DDP add up the gradients of an activation in the order of ZeRO-3, whose hooks pass on what goes into a module
    and comes out of it: those that come from within a module first, then those from beside it, such as a residual.
    """

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for module in model.modules():
            module.register_forward_pre_hook(lambda module, inputs: tuple(map(passed_on, inputs)))
            module.register_forward_hook(lambda module, inputs, output: passed_on(output))


def assert_sharded(trainer, stage):
    engine, masters = trainer.model_wrapped, list(trainer.model.parameters())
    assert type(engine).__name__ == "DeepSpeedEngine" and engine.zero_optimization_stage() == stage
    assert all(p.dtype is torch.float32 for p in masters)
    num_processes, num_weights = dist.get_world_size(), num_elements(masters)
    if stage == 3:
        assert all(p.numel() == 0 and p.ds_tensor.numel() == -(-p.ds_numel // num_processes) for p in masters)
        parts = engine.optimizer.fp32_partitioned_groups_flat
    else:
        parts = engine.optimizer.single_partition_of_fp32_groups
    # Aligned, each group of parameters.
    assert sum(p.numel() for p in parts) < num_weights / num_processes + 100


def assert_offloads(optimizer, stage):
    assert type(optimizer.optimizer) is torch.optim.AdamW
    if stage == 3:
        assert optimizer.offload_optimizer and optimizer.offload_param
    else:
        assert optimizer.cpu_offload


def assert_quantized_once(model):
    """Until the masters are written to, by one process, which DeepSpeed sends to the others' slices."""
    import deepspeed

    [weight, *_] = weights_of(model)
    weight.low_bit_weight()
    parameters = [writes_to(p) for p in model.parameters()]
    with patch.object(weight, "quantize", wraps=weight.quantize) as quantize, torch.no_grad():
        model(input_ids=torch.ones(1, 2, dtype=torch.long))
        weight.low_bit_weight()
        assert not quantize.called and [writes_to(p) for p in model.parameters()] == parameters
        with deepspeed.zero.GatheredParameters([weight.parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                weight.parameter.mul_(-1)
        assert [writes_to(p) for p in model.parameters()] != parameters
        low_bit = weight.low_bit_weight()
        assert quantize.called and same(low_bit, weight.quantize(whole(weight.parameter)))


# With masters gathered for each token, and once more in backward.
SLICES = {"ds3_gather_for_generation": False, "gradient_checkpointing": True, "bf16": True}
TURNS = {"arch": "qwen3_moe", "precisions": [4, 3]}
# ZeRO-2 and 3 reduce the gradients of each micro-batch, and so add them up in another order.
RUNS = {1: {"bf16": False, "gradient_accumulation_steps": 2}, 2: {"bf16": True} | TURNS, 3: SLICES}
RUNS = {stage: {"optim": "adamw_torch"} | options for stage, options in RUNS.items()}


def train_as_with_whole_state(folder, *stages):
    for stage in stages:
        options = {"save_strategy": "steps", "save_steps": 2} | RUNS[stage]
        adds_up = [AddsUpAsDeepSpeed()] if stage == 3 else []
        [ddp] = train(folder, f"zero{stage}-ddp", callbacks=adds_up, **options)
        launch = launched(stage, options["bf16"])
        for trainer in train(folder, f"zero{stage}", launch=launch, **options):
            assert_sharded(trainer, stage)
            rows = assert_trained_the_same(trainer, ddp)
            assert any(row.get("quant/update_to_step") for row in rows)
            assert_publishes(trainer, ddp)
            ended = [whole(p).detach().clone() for p in trainer.model.parameters()]
            if dist.get_rank() == 0:
                torch.save(ended, f"{folder}/zero{stage}-end.pt")
            if stage == 3:
                assert_quantized_once(trainer.model)
        masters = [p.detach().clone() for p in ddp.model.parameters()]
        resume = f"{folder}/zero{stage}/checkpoint-2"
        # What is kept elsewhere comes from the same checkpoint.
        launch = launched(stage, options["bf16"], **OFFLOADED)
        for trainer in train(folder, f"zero{stage}-resumed", resume=resume, launch=launch, **options):
            assert_offloads(trainer.model_wrapped.optimizer, stage)
            assert all(map(torch.equal, map(whole, trainer.model.parameters()), masters))


def zero_trains_what_it_trains_with_whole_state(folder):
    train_as_with_whole_state(folder, 2, 3)


def zero_1_trains_what_it_trains_with_whole_state(folder):  # nightly
    train_as_with_whole_state(folder, 1)


def zero_keeps_the_last_finite_checkpoint(folder):  # nightly
    assert_keeps_the_last_finite(folder, "zero3-nan", launch=launched(3, False), optim="adamw_torch")


def zero_skips_updates_without_a_gradient(folder):  # nightly
    for stage in (1, 2, 3):
        assert_skips_updates(folder, f"zero{stage}-skips", launched(stage, False), optim="adamw_torch")


def zero_trains_an_adapter_a_reference_and_engine_numerics(folder):  # nightly
    """ZeRO-2 with an adapter inside low-bit weights; ZeRO-3 with masters and a reference, in slices too."""
    adapter = {"bf16": True, "lora": LORA, "lora_mode": "merged", "learning_rate": 1e-2}
    for stage, options in ((2, adapter), (2, {"bf16": True, "numerics": "engine"}), (3, {"bf16": True})):
        options = {"beta": 0.1, "max_steps": 2, "optim": "adamw_torch"} | options
        callbacks = [MovesFrozen()] if stage == 2 else [AddsUpAsDeepSpeed()]
        [ddp] = train(folder, f"more-zero{stage}-ddp", callbacks=callbacks, **options)
        launch, moves = launched(stage, options["bf16"]), [MovesFrozen()] if stage == 2 else []
        for trainer in train(folder, f"more-zero{stage}", launch=launch, callbacks=moves, **options):
            assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine" and trainer.numerics == ddp.numerics
            rows = assert_trained_the_same(trainer, ddp)
            assert max(row["kl"] for row in rows if "kl" in row) > 0
            found = {row["mismatch/abs_logp_max"] for row in rows if "mismatch/abs_logp_max" in row}
            # With "fast" they are DDP's, as all metrics are, and how large depends on the processor.
            assert found and (trainer.numerics == "fast" or found == {0.0})
            assert trainer.ref_model is None or type(trainer.ref_model).__name__ == "DeepSpeedEngine"


def zero_resumes_its_own_checkpoints_alone(folder):  # nightly
    """Each process says why."""
    options = {"optim": "adamw_torch", "resume": f"{folder}/zero1/checkpoint-2"}
    if dist.get_world_size() == 1:
        cases = {"by 2 processes with DeepSpeed": launched(1, False)}
    else:
        cases = {"with one process or DDP": None, "with FSDP2": {}, "with ZeRO-3": launched(3, False)}
    for said, launch in cases.items():
        with pytest.raises(ValueError, match=said):
            next(train(folder, "zero-other", launch=launch, **options))


def zero_fills_colocated_engines(folder):  # nightly
    """Each process one of its own; and with the learner's arithmetic, log-probs are the engine's."""
    if find_spec("vllm") is None:
        return
    options = COLOCATED | {"optim": "adamw_torch"}
    for stage, is_exact in ((1, has_engine_kernels()), (3, False)):
        numerics = {"bf16": True, "numerics": "engine"} if is_exact else {}
        launch = launched(stage, is_exact)
        for trainer in train(folder, f"zero{stage}-colocated", launch=launch, **options, **numerics):
            assert_sharded(trainer, stage)
            assert_follows(trainer, bound=0.0 if is_exact else 1e-5)


def zero_trains_batches_drawn_ahead(folder):  # nightly
    """A process keeps whole weights that draw them, and with ZeRO-3 its slices of what is not quantized, of which
    biases and norms are whole between forwards."""
    if find_spec("vllm") is None:
        return
    masters = {"optim": "adamw_torch"}
    assert_draws_ahead(folder, "zero1", partial(launched, 1, False), **masters)
    adapter = {"lora": LORA, "lora_mode": "merged", "max_steps": 4}
    moves = [MovesFrozen()]
    trainer = assert_draws_ahead(folder, "zero2", partial(launched, 2, False), (moves, moves), **masters, **adapter)
    assert max(row.get("quant/code_flip_rate", 0) for row in trainer.state.log_history) > 0
    launch = partial(launched, 3, False, threshold=300)
    trainer = assert_draws_ahead(folder, "zero3", launch, (None, [AddsUpAsDeepSpeed()]), **masters)
    is_whole = {parameter.ds_persist for parameter in trainer.model.parameters()}
    assert is_whole == {False, True}


def zero_leaves_a_checkpoint_when_a_process_is_killed(folder):  # nightly
    for stage, options in RUNS.items():
        options = options | {"launch": launched(stage, options["bf16"])}
        killed.the_last_checkpoint_survives_a_killed_process(folder, train, f"zero{stage}", options)
