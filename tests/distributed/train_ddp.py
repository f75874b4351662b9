"""A few steps of QaRL under DDP; each rank writes the digest of what it trained and the logged rows. Run by test_ddp.py."""

import hashlib
import json
import sys

import torch
from accelerate import PartialState
from datasets import Dataset

from testing_utils import make_trainer


model, output_dir, options = sys.argv[1:]
prompts = Dataset.from_dict({"prompt": [f"{i} +" for i in range(16)]})
options = {"per_device_train_batch_size": 2} | json.loads(options)
peft_config = None
if lora := options.pop("lora", None):
    from peft import LoraConfig

    peft_config = LoraConfig(**lora)
trainer = make_trainer(model, output_dir, train_dataset=prompts, peft_config=peft_config, **options)
trained = [p for p in trainer.accelerator.unwrap_model(trainer.model).parameters() if p.requires_grad]
before = [parameter.detach().clone() for parameter in trained]
trainer.train()
digest = hashlib.sha256()
for parameter in trained:
    digest.update(parameter.detach().numpy().tobytes())
if "hub_model_id" in options:
    trainer.push_to_hub()
rank = PartialState().process_index
with open(f"{output_dir}/rank{rank}.json", "w") as file:
    moved = [not torch.equal(*pair) for pair in zip(before, trained, strict=True)]
    json.dump({"digest": digest.hexdigest(), "moved": moved, "rows": trainer.state.log_history}, file)
