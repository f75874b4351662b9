"""
A few steps of QaRL under DDP, for each of some sets of options. Each rank writes the digest of what it trained and the
logged rows; with an option `resume`, the name of a checkpoint, also those of a new trainer that went on from there;
with the argument `fail`, what came of the failures in `fail_ddp.py`. Run by test_ddp.py.

The ranks are forked from one process that has imported everything, which takes longer than what they do.
"""

import atexit
import gc
import hashlib
import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import suppress

import torch
from accelerate import PartialState
from datasets import Dataset

from testing_utils import fixed_completions, make_trainer
from trl_qarl.rollout.server_process import free_port


def make(model, folder, options):
    peft_config = None
    # A process that waits for the other one says so, before the test has waited too long. The server's start takes
    # less.
    options = {"per_device_train_batch_size": 2, "ddp_timeout": 900} | options
    if lora := options.pop("lora", None):
        from peft import LoraConfig

        peft_config = LoraConfig(**lora)
    if options.pop("fixed_completions", False):
        options["rollout_func"] = fixed_completions
    prompts = Dataset.from_dict({"prompt": [f"{i} +" for i in range(options.pop("num_prompts", 16))]})
    return make_trainer(model, folder, train_dataset=prompts, peft_config=peft_config, **options)


def trained_weights(trainer):
    return [p for p in trainer.accelerator.unwrap_model(trainer.model).parameters() if p.requires_grad]


def digest_of(trainer):
    digest = hashlib.sha256()
    for parameter in trained_weights(trainer):
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def run(model, folder, options):
    checkpoint = options.pop("resume", None)
    trainer = make(model, folder, options)
    before = [parameter.detach().clone() for parameter in trained_weights(trainer)]
    trainer.train()
    moved = [not torch.equal(*pair) for pair in zip(before, trained_weights(trainer), strict=True)]
    written = {"digest": digest_of(trainer), "moved": moved, "rows": trainer.state.log_history}
    if state := trainer._objective.state():
        written["window"] = [update.tolist() for update in state["window"]]
    torch.save(trained_weights(trainer), f"{folder}/weights.pt")
    if "hub_model_id" in options:
        trainer.push_to_hub()
    if checkpoint is not None:
        resumed = make(model, f"{folder}/resumed", options)
        written["digest_before_resuming"] = digest_of(resumed)
        resumed.train(resume_from_checkpoint=f"{folder}/{checkpoint}")
        written |= {"resumed_digest": digest_of(resumed), "resumed_rows": resumed.state.log_history}
    return written


def run_all(model, output_dir, runs, *failures):
    written = {name: run(model, f"{output_dir}/{name}", options) for name, options in json.loads(runs).items()}
    if failures:
        import fail_ddp

        written["failed"] = fail_ddp.run_all(model, output_dir)
    with open(f"{output_dir}/rank{PartialState().process_index}.json", "w") as file:
        json.dump(written, file)


def fork_rank(rank, count, port, function, *arguments):
    """A process that calls `function`, with what `torchrun` would tell it, as one of `count`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    # As an interpreter that ends.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_ranks(count, function, *arguments):
    """Call `function` in each of `count` processes, which all end as soon as one fails."""
    for name in ("trl_qarl.qarl_trainer", "peft"):
        with suppress(ImportError):
            importlib.import_module(name)
    # A collection in a rank must not walk, and copy, what is shared.
    gc.freeze()
    port = str(free_port())
    ranks = {fork_rank(rank, count, port, function, *arguments) for rank in range(count)}
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            # The other one would wait for it.
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    fork_ranks(2, run_all, *sys.argv[1:])
