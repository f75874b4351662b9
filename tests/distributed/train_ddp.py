"""A few steps of QaRL under DDP; each rank writes the digest of its masters and the logged rows. Run by test_ddp.py."""

import hashlib
import json
import sys

from accelerate import PartialState
from datasets import Dataset

from testing_utils import make_trainer


model, output_dir, options = sys.argv[1:]
prompts = Dataset.from_dict({"prompt": [f"{i} +" for i in range(16)]})
options = {"per_device_train_batch_size": 2} | json.loads(options)
trainer = make_trainer(model, output_dir, train_dataset=prompts, **options)
trainer.train()
digest = hashlib.sha256()
for parameter in trainer.accelerator.unwrap_model(trainer.model).parameters():
    digest.update(parameter.detach().numpy().tobytes())
rank = PartialState().process_index
with open(f"{output_dir}/rank{rank}.json", "w") as file:
    json.dump({"digest": digest.hexdigest(), "rows": trainer.state.log_history}, file)
