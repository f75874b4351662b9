"""
A few steps of QaRL under DDP, for each of some sets of options. Each rank writes the digest of what it trained and the logged rows;
with an option `resume`, the name of a checkpoint, also those of a new trainer that went on from there; with the argument `fail`,
what came of the failures in `fail_ddp.py`. Run by test_ddp.py.
"""

import hashlib
import json
import sys

import torch
from accelerate import PartialState
from datasets import Dataset

from testing_utils import fixed_completions, make_trainer


def make(model, folder, options):
    peft_config = None
    # A process that waits for the other one says so, before the test has waited too long. The server's start takes less.
    options = {"per_device_train_batch_size": 2, "ddp_timeout": 900} | options
    if lora := options.pop("lora", None):
        from peft import LoraConfig

        peft_config = LoraConfig(**lora)
    if options.pop("fixed_completions", False):
        options["rollout_func"] = fixed_completions
    prompts = Dataset.from_dict({"prompt": [f"{i} +" for i in range(16)]})
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
    torch.save(trained_weights(trainer), f"{folder}/weights.pt")
    if "hub_model_id" in options:
        trainer.push_to_hub()
    if checkpoint is not None:
        resumed = make(model, f"{folder}/resumed", options)
        written["digest_before_resuming"] = digest_of(resumed)
        resumed.train(resume_from_checkpoint=f"{folder}/{checkpoint}")
        written |= {"resumed_digest": digest_of(resumed), "resumed_rows": resumed.state.log_history}
    return written


if __name__ == "__main__":
    model, output_dir, runs, *failures = sys.argv[1:]
    written = {name: run(model, f"{output_dir}/{name}", options) for name, options in json.loads(runs).items()}
    if failures:
        import fail_ddp

        written["failed"] = fail_ddp.run_all(model, output_dir)
    with open(f"{output_dir}/rank{PartialState().process_index}.json", "w") as file:
        json.dump(written, file)
