"""
DeepSpeed on two processes without a GPU. Run by shards.py. accelerate leaves it out on a CPU: [`launched`] does not let it, and
[`assert_sharded`] checks that it is there.
"""

import inspect
import os
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from sharded_runs import assert_publishes, assert_trained_the_same, train

from testing_utils import launch_environment


def without_cpu(init):
    def init_without_cpu(self, *args, **kwargs):
        given = inspect.signature(init).bind(self, *args, **kwargs).arguments
        given["cpu"] = False
        more = given.pop("kwargs", {})
        init(**given, **more)

    return init_without_cpu


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
            # Compiles for minutes.
            patch.object(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None),
        ):
            assert deepspeed.accelerator.get_accelerator().device_name() == "cpu"
            yield
    finally:
        AcceleratorState._reset_state(True)


def assert_sharded(trainer, stage):
    engine, masters = trainer.model_wrapped, list(trainer.model.parameters())
    assert type(engine).__name__ == "DeepSpeedEngine" and engine.zero_optimization_stage() == stage
    assert all(p.dtype is torch.float32 for p in masters)
    held = sum(p.numel() for p in engine.optimizer.single_partition_of_fp32_groups)
    # Aligned, each group of parameters.
    assert held < sum(p.numel() for p in masters) / dist.get_world_size() + 100


def zero_trains_what_it_trains_with_whole_state(folder):
    if find_spec("deepspeed") is None:
        return
    # ZeRO-2 reduces the gradients of each micro-batch, and so adds them up in another order.
    for stage, options in ((1, {"bf16": False, "gradient_accumulation_steps": 2}), (2, {"bf16": True})):
        options |= {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2, "mismatch_probe_steps": 0}
        [ddp] = train(folder, f"zero{stage}-ddp", **options)
        for trainer in train(folder, f"zero{stage}", launch=launched(stage, options["bf16"]), **options):
            assert_sharded(trainer, stage)
            rows = assert_trained_the_same(trainer, ddp)
            assert any(row.get("quant/update_to_step") for row in rows)
            assert_publishes(trainer, ddp)
        masters = [p.detach().clone() for p in ddp.model.parameters()]
        resume = f"{folder}/zero{stage}/checkpoint-2"
        launch = launched(stage, options["bf16"])
        for trainer in train(folder, f"zero{stage}-resumed", resume=resume, launch=launch, **options):
            assert all(map(torch.equal, trainer.model.parameters(), masters))
