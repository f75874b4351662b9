"""
DeepSpeed on two processes without a GPU, for shards.py. accelerate leaves it out on a CPU: [`launched`] does not let it, and
[`assert_sharded`] checks that it is there.
"""

import inspect
import os
import sys
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from testing_utils import launch_environment
from trl_qarl.quantization.partitioned import shape_of


def without_cpu(init):
    def init_without_cpu(self, *args, **kwargs):
        given = inspect.signature(init).bind(self, *args, **kwargs).arguments
        given["cpu"] = False
        more = given.pop("kwargs", {})
        init(**given, **more)

    return init_without_cpu


def cutting_all(init):
    def init_cutting_all(self):
        init(self)
        # Of so small a model, ZeRO-3 would keep all parameters whole.
        self.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    return init_cutting_all


@contextmanager
def launched(stage, bf16):
    """Environment as `accelerate launch` makes it of the shipped configuration for a stage."""
    import deepspeed

    shipped = launch_environment(f"deepspeed_zero{stage}.yaml")
    environment = {name: value for name, value in shipped.items() if name.startswith("ACCELERATE_")}
    environment |= {"ACCELERATE_TORCH_DEVICE": "cpu"} | ({} if bf16 else {"ACCELERATE_MIXED_PRECISION": "no"})
    AcceleratorState._reset_state(True)
    try:
        with (
            patch.dict(os.environ, environment),
            patch.object(
                PartialState, "_prepare_backend", lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
            ),
            # There is no DeepSpeed for a CPU that is asked for.
            patch.object(PartialState, "__init__", without_cpu(PartialState.__init__)),
            patch.object(AcceleratorState, "__init__", without_cpu(AcceleratorState.__init__)),
            patch.object(DeepSpeedPlugin, "__post_init__", cutting_all(DeepSpeedPlugin.__post_init__)),
            # ZeRO-3 leaves another operation there.
            patch.object(F, "linear", F.linear),
            # Compiles for minutes.
            patch.object(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None),
        ):
            assert deepspeed.accelerator.get_accelerator().device_name() == "cpu"
            yield
    finally:
        AcceleratorState._reset_state(True)
        # What would cut the next model too.
        unset_hf_deepspeed_config()


def passed_on(value):
    return value.view_as(value) if isinstance(value, torch.Tensor) and value.requires_grad else value


class AddsUpAsDeepSpeed(TrainerCallback):
    """
    Has DDP add up the gradients of an activation in the order of ZeRO-3, whose hooks pass on what goes into a module and comes out of
    it: those that come from within a module first, then those from beside it, such as a residual.
    """

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for module in model.modules():
            module.register_forward_pre_hook(lambda module, inputs: tuple(map(passed_on, inputs)))
            module.register_forward_hook(lambda module, inputs, output: passed_on(output))


def assert_sharded(trainer, stage):
    engine, masters = trainer.model_wrapped, list(trainer.model.parameters())
    assert type(engine).__name__ == "DeepSpeedEngine" and engine.zero_optimization_stage() == stage
    assert all(p.dtype is torch.float32 for p in masters)
    num_processes, num_weights = dist.get_world_size(), sum(shape_of(p).numel() for p in masters)
    if stage == 3:
        assert all(p.numel() == 0 and p.ds_tensor.numel() == -(-p.ds_numel // num_processes) for p in masters)
        held = sum(p.numel() for p in engine.optimizer.fp32_partitioned_groups_flat)
    else:
        held = sum(p.numel() for p in engine.optimizer.single_partition_of_fp32_groups)
    # Aligned, each group of parameters.
    assert held < num_weights / num_processes + 100
