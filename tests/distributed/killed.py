"""A training with sharded masters of which one process is killed twice, and that goes on. Run by shards.py."""

import datetime
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from forked import fork_rank
from transformers import TrainerCallback

from trl_qarl.checkpoint import marker
from trl_qarl.engines.server_process import free_port
from trl_qarl.quantization.storage import whole
from trl_qarl.trainer.saves import SavesRuns


SECONDS = 90
"""After which a process that waits for a killed one would have to end; it does as soon as the connection closes."""


class DiesInUpdate(TrainerCallback):
    def __init__(self, num_done):
        self.num_done = num_done

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.num_done:
            os.kill(os.getpid(), signal.SIGKILL)


def dies_in_checkpoint(trainer, folder, ahead):
    if folder.name == "checkpoint-2":
        os.kill(os.getpid(), signal.SIGKILL)
    return save_batch(trainer, folder, ahead)


save_batch = SavesRuns._save_batch


def train_until(train, folder, name, ends, options, expected):
    """Train, of two processes in one, until the second dies, or to the end; what was trained must be what is
    `expected` then."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=SECONDS))
    dies = ends if dist.get_rank() else None
    in_checkpoint = patch.object(SavesRuns, "_save_batch", dies_in_checkpoint)
    callbacks = [DiesInUpdate(2)] if dies == "update" else None
    with in_checkpoint if dies == "checkpoint" else nullcontext():
        for trainer in train(folder, name, resume=ends != "checkpoint", callbacks=callbacks, **options):
            found = [whole(p).detach() for p in trainer.model.parameters()]
            assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def the_last_checkpoint_survives_a_killed_process(folder, train, trained, options):
    """
    Killed within its second checkpoint, then within its third update; the other process ends by itself, and a third
    run ends with the masters of `trained`, the name of the same run without interruption.
    """
    expected, name, complete = torch.load(f"{folder}/{trained}-end.pt"), f"{trained}-killed", []
    options |= {"save_strategy": "steps", "save_steps": 1}
    for ends in ("checkpoint", "update", None):
        port = str(free_port())
        pids = [
            fork_rank(rank, 2, port, train_until, train, folder, name, ends, options, expected) for rank in range(2)
        ]
        codes, seconds = wait(pids)
        assert codes == ([0, 0] if ends is None else [1, -signal.SIGKILL]), (ends, codes, seconds)
        checkpoints = sorted(Path(folder, name).glob("checkpoint-*"))
        complete.append([path.name[-1] for path in checkpoints if marker.is_complete(path)])
    assert complete == [["1"], ["1", "2"], ["1", "2", "3", "4"]]


def wait(pids):
    """Exit codes of processes, of which none may outlive the first by [`SECONDS`], and how long it took."""
    codes, ended = {}, None
    while len(codes) < len(pids):
        time.sleep(0.2)
        for pid in set(pids) - codes.keys():
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
                ended = ended or time.monotonic()
            elif ended is not None and time.monotonic() - ended > SECONDS:
                os.kill(pid, signal.SIGKILL)
    return [codes[pid] for pid in pids], time.monotonic() - ended
