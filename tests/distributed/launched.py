"""A training as `accelerate launch` starts it, with gloo on a CPU, sharded. Run by test_launched.py."""

import datetime
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from sharded_runs import assert_sharded, train
from torch.nn.parallel import DistributedDataParallel


folder, name = sys.argv[1:]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
options = {"bf16": True, "max_steps": 1, "max_completion_length": 4}
if name.startswith("deepspeed"):
    import zero

    on_cpu = zero.on_cpu()
    options["optim"] = "adamw_torch"
else:
    # With DDP accelerate would name the GPU of each process.
    kind = DistributedType.MULTI_CPU if name == "ddp" else DistributedType.MULTI_GPU
    on_cpu = patch.object(PartialState, "_prepare_backend", lambda self, *args, **kwargs: ("gloo", kind))
with on_cpu:
    for trainer in train(folder, name, **options):
        if name == "ddp":
            assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        elif name.startswith("deepspeed"):
            zero.assert_sharded(trainer, int(name[-1]))
        else:
            assert_sharded(trainer.model)
        found = {"machine": int(os.environ["GROUP_RANK"])}
        found["loss"] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        Path(f"{folder}/{name}{dist.get_rank()}.json").write_text(json.dumps(found))
