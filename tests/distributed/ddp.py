"""Trainings with DDP: weights of both processes, metrics, checkpoints and pushes. Run by shards.py."""

import json
import math
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharded_runs import LORA, train

from testing_utils import fixed_completions, logged, make_problems, relative_error, save_at
from testing_utils.trainings import Masters
from testing_utils.warm import FOLDER, Warm


OPTIONS = {"max_grad_norm": 1.0}
ADAPTER = {"lora": LORA, "hub_model_id": "someone/adapter"}
# Low-bit codes that follow the adapter have to move.
MERGED = {"lora": LORA, "lora_mode": "merged", "learning_rate": 1e-2, "optim": "adamw_torch"}
RUNS = {
    # Of the three updates after the checkpoint, the first has completions that were saved in it.
    "masters": ({}, 1),
    # Two epochs of two generation batches: resumed within the first batch of the second epoch.
    "epochs": ({"rows": make_problems(4), "max_steps": 8}, 5),
    "adapter": (ADAPTER, 1),
    "merged": (MERGED | {"hub_model_id": "someone/merged"}, 1),
}


def both(value):
    """What each process has."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def trained(trainer):
    return [p.detach() for p in trainer.accelerator.unwrap_model(trainer.model).parameters() if p.requires_grad]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def processes_train_the_same_weights_and_go_on_from_a_checkpoint(folder):
    for name, (options, step) in RUNS.items():
        options, seen = OPTIONS | options, Masters()
        [whole] = train(folder, f"ddp-{name}", callbacks=[seen, save_at(step)], **options)
        assert_same(*both(trained(whole)))
        if "lora" in options:
            pairs = zip(whole.model.parameters(), seen.at[0], strict=True)
            assert [torch.equal(p, before) for p, before in pairs if p.requires_grad] == [False] * (2 * 2 * 7)
            rates = logged(whole, "quant/code_flip_rate")
            assert max(rates) > 0 if name == "merged" else not rates
            whole.push_to_hub()
        checkpoint = f"{folder}/ddp-{name}/checkpoint-{step}"
        [resumed] = train(folder, f"ddp-{name}-resumed", resume=checkpoint, **options)
        assert_same(trained(resumed), trained(whole))
        assert logged(resumed, "reward") == logged(whole, "reward")
        assert len(logged(whole, "reward")) == (4 if name == "epochs" else 2)
        if name == "masters":
            assert_logs_global_metrics(whole, Path(folder, "ddp-masters"))


def assert_logs_global_metrics(trainer, folder):
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 4
    for row in rows:
        assert math.isfinite(row["loss"]) and 0 <= row["quant/code_flip_rate"] <= 1
    assert rows[0]["tbpo/ratio/min"] <= rows[0]["tbpo/ratio/mean"] <= rows[0]["tbpo/ratio/max"]
    assert math.isfinite(rows[0]["mismatch/abs_logp_mean"])
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics if "loss" in row] == [1, 2, 3, 4]


# One update per batch: which of its sequences come first is chosen in each process.
ENGINE = OPTIONS | {"numerics": "engine", "bf16": True, "steps_per_generation": 1, "max_steps": 2}
ENGINE |= {"optim": "sgd", "learning_rate": 0.1, "rollout_func": fixed_completions}
COMPARED = ("loss", "reward", "entropy", "grad_norm", "tbpo/ratio/mean", "mismatch/abs_logp_max")


def two_processes_train_with_engine_numerics(folder):
    [trainer] = train(folder, "ddp-engine", **ENGINE)
    assert_same(*both(trained(trainer)))
    if dist.get_rank() == 0:
        torch.save((trained(trainer), [logged(trainer, name) for name in COMPARED]), f"{folder}/ddp-engine.pt")


def one_process_trains_with_engine_numerics_what_two_did(folder):
    seen = Masters()
    [one] = train(folder, "ddp-engine-alone", callbacks=[seen], per_device_train_batch_size=4, **ENGINE)
    weights, metrics = torch.load(f"{folder}/ddp-engine.pt")
    for name, values in zip(COMPARED, metrics, strict=True):
        assert values == pytest.approx(logged(one, name), rel=1e-2, abs=1e-6), name
    assert logged(one, "mismatch/abs_logp_max") == [0.0, 0.0]
    for start, alone, together in zip(seen.at[0], trained(one), weights, strict=True):
        # Backward rounds to bfloat16, and sums over other rows.
        assert relative_error(together - start, (alone - start).double()) < 2**-6


SERVER = OPTIONS | {"scheme": "w8a16", "use_vllm": True, "vllm_max_model_length": 128}


def two_processes_share_one_server(folder):
    """The first one starts it."""
    if find_spec("vllm") is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        server = Warm(os.environ[FOLDER]).serve(patch)
        server["vllm_server_port"], _ = both(server["vllm_server_port"])
        [trainer] = train(folder, "ddp-server", **SERVER, **server)
    assert_same(*both(trained(trainer)))
    assert logged(trainer, "rollout/weight_version") == [0, 2]
    assert max(logged(trainer, "mismatch/abs_logp_max")) < 1e-5
