"""A few steps of QaRL under DDP; each rank writes the digest of its masters and the logged rows. Run by test_ddp.py."""

import hashlib
import json
import sys

from accelerate import PartialState
from datasets import Dataset

from trl_qarl import QaRLConfig, QaRLTrainer


def spread(completions, **kwargs):
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


model, output_dir, options = sys.argv[1:]
trainer = QaRLTrainer(
    model,
    spread,
    QaRLConfig(
        output_dir,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        max_steps=4,
        per_device_train_batch_size=2,
        num_generations=4,
        steps_per_generation=2,
        max_completion_length=8,
        learning_rate=1e-3,
        save_strategy="no",
        disable_tqdm=True,
        **json.loads(options),
    ),
    Dataset.from_dict({"prompt": [f"{i} +" for i in range(16)]}),
)
trainer.train()
digest = hashlib.sha256()
for parameter in trainer.accelerator.unwrap_model(trainer.model).parameters():
    digest.update(parameter.detach().numpy().tobytes())
rank = PartialState().process_index
with open(f"{output_dir}/rank{rank}.json", "w") as file:
    json.dump({"digest": digest.hexdigest(), "rows": trainer.state.log_history}, file)
