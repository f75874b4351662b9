"""
Two changes to the processes of a training, made before it starts: GPUs are replaced by gloo on a CPU, where accelerate
would drop FSDP and DeepSpeed in silence, and the trained policy's own greedy tokens are written to a file.
"""

import datetime
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch


PROMPTS = ("1 + 1 =", "7 * 3 =", "words and words", "#")
NUM_TOKENS = 8
# A stack that nobody holds is closed at once.
UNTIL_THE_END = ExitStack()


def without_gpus(launch: str) -> None:
    """Have accelerate run this process of `launch`, the name of a shipped configuration, on a CPU as on GPUs."""
    import torch.distributed as dist
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffloadPolicy

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    if launch.startswith("deepspeed"):
        sys.path.append(str(Path(__file__).parents[1] / "distributed"))
        import zero

        UNTIL_THE_END.enter_context(zero.on_cpu())
    else:
        # With DDP accelerate would name the GPU of each process.
        kind = DistributedType.MULTI_CPU if launch == "ddp" else DistributedType.MULTI_GPU
        patch.object(PartialState, "_prepare_backend", lambda self, *args, **kwargs: ("gloo", kind)).start()
        # Pinning needs a GPU.
        patch.object(CPUOffloadPolicy.__init__, "__defaults__", (False,)).start()


def write_tokens(path: str) -> None:
    """Have trainers write to `path` which tokens their policy prefers at the end of a training, and how the model was
    divided among processes."""
    from trl_qarl import QaRLTrainer
    from trl_qarl.quantization.storage import is_sharded

    train = QaRLTrainer.train

    def train_and_complete(trainer, *args, **kwargs):
        output = train(trainer, *args, **kwargs)
        found = [complete(trainer, prompt) for prompt in PROMPTS]
        if trainer.is_world_process_zero():
            described = {"wrapped": type(trainer.model_wrapped).__name__, "shards": is_sharded(trainer.model)}
            Path(path).write_text(json.dumps(described | {"answers": found}))
        return output

    QaRLTrainer.train = train_and_complete


def complete(trainer, prompt):
    """Greedy tokens of the policy, with the distance of each from the second best; every process has to call."""
    import torch

    from trl_qarl.quantization.swap import quantized_forward

    prompt_ids = trainer._tokenizer(prompt)["input_ids"]
    tokens, margins, model = [], [], trainer.model
    model.eval()
    for _ in range(NUM_TOKENS):
        ids = torch.tensor([prompt_ids + tokens], device=trainer.accelerator.device)
        with torch.no_grad(), quantized_forward(model), trainer.accelerator.autocast():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1]
        best = logits.float().topk(2)
        tokens.append(best.indices[0].item())
        margins.append((best.values[0] - best.values[1]).item())
    return {"prompt": prompt_ids, "tokens": tokens, "margins": margins}


def prepare() -> None:
    """Change this process, which trains, as its variables say."""
    if "RANK" in os.environ and "JOURNEY_LAUNCH" in os.environ:
        without_gpus(os.environ["JOURNEY_LAUNCH"])
    if "JOURNEY_TOKENS" in os.environ:
        write_tokens(os.environ["JOURNEY_TOKENS"])
