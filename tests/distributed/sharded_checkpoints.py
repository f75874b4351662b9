"""Runs with sharded masters that end, or are ended, and go on. Run by shards.py."""

import json
from pathlib import Path

import killed
import pytest
import torch
import torch.distributed as dist
from sharded_runs import assert_keeps_the_last_finite, train

from testing_utils.trainings import Masters
from trl_qarl.quantization.storage import whole


def a_run_goes_on_from_its_checkpoint(folder):
    """On as many processes, from a checkpoint of whole masters and from one of shards."""
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        launch = {"state_dict_type": kind, "cpu_ram_efficient_loading": True}
        optim = {"FULL_STATE_DICT": "adamw_torch_fused", "SHARDED_STATE_DICT": "muon_8bit"}[kind]
        saving = {"save_strategy": "steps", "save_steps": 2, "launch": launch, "bf16": True, "optim": optim}
        saving["gradient_dtype"] = "float32" if kind == "FULL_STATE_DICT" else "bfloat16"
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
    with pytest.raises(ValueError, match="was trained with"):
        next(train(folder, f"{kind}-other", scheme="fp8", resume=checkpoint, max_steps=1, launch=launch))


def weights_that_are_not_finite_are_no_checkpoint(folder):
    launch = {"state_dict_type": "SHARDED_STATE_DICT"}
    assert_keeps_the_last_finite(folder, "sharded-nan", launch=launch, optim="adamw_torch")


def one_process_goes_on_from_a_checkpoint_of_two(folder):  # nightly
    for kind, optim in (("FULL_STATE_DICT", "adamw_torch_fused"), ("SHARDED_STATE_DICT", "muon_8bit")):
        seen, before = Masters(), torch.load(f"{folder}/{kind}.pt")
        options = {"launch": {"state_dict_type": kind}, "bf16": True, "optim": optim, "max_steps": 3}
        options |= {"save_strategy": "steps", "save_steps": 3}
        for trainer in train(
            folder, f"{kind}-alone", resume=f"{folder}/{kind}/checkpoint-2", callbacks=[seen], **options
        ):
            assert all(map(torch.equal, seen.at[2], before)) and len(before) == len(seen.at[2])
            assert trainer.state.global_step == 3 and not all(map(torch.equal, seen.at[3], before))
            torch.save(seen.at[3], f"{folder}/{kind}-alone.pt")


def two_processes_go_on_from_a_checkpoint_of_one(folder):  # nightly
    kind, seen = "SHARDED_STATE_DICT", Masters()
    options = {"launch": {"state_dict_type": kind}, "bf16": True, "optim": "muon_8bit"}
    resume = f"{folder}/{kind}-alone/checkpoint-3"
    for trainer in train(folder, f"{kind}-two", resume=resume, callbacks=[seen], **options):
        before = torch.load(f"{folder}/{kind}-alone.pt")
        assert all(map(torch.equal, seen.at[3], before)) and len(before) == len(seen.at[3])
        # With a learning rate of 0, as the schedule of the one ended there.
        assert trainer.state.global_step == 4


def a_killed_process_leaves_a_checkpoint(folder):  # nightly
    options = {"launch": {"state_dict_type": "SHARDED_STATE_DICT"}, "bf16": True, "optim": "muon_8bit"}
    options["gradient_dtype"] = "bfloat16"
    killed.the_last_checkpoint_survives_a_killed_process(folder, train, "SHARDED_STATE_DICT", options)
