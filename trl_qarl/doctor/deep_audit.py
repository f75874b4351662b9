"""
Compares an engine with a fresh one that loads the export, by the log-probs of the same tokens: fingerprints compare
weights before vLLM repacks them. Meant for a new vLLM version, model or kernel, not for every step.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..adapters.tensors import lora_arguments
from ..checkpoint.export import export_checkpoint
from ..hub import ADAPTER_FOLDER


def log_probs_of_tokens(scores: list[list[dict[int, float]]], sequences: list[list[int]]) -> list[list[float]]:
    """Return the log-probs of the tokens of `sequences` from the `scores` of an
    [`~trl_qarl.rollout.engine.Engine`]."""
    return [
        [entry[token] for entry, token in zip(row, ids[1:], strict=True)]
        for row, ids in zip(scores, sequences, strict=True)
    ]


def deep_audit(generation, sequences: list[list[int]]) -> float:
    """
    Publish to the engine of `generation`, and return the largest difference, in nats, between its log-probs of
    `sequences` of token ids and those of an engine that loads the export; infinite if one is NaN. A sequence without a
    token to score raises `ValueError`.
    """
    if not sequences or min(map(len, sequences)) < 2:
        raise ValueError("Each sequence needs at least two tokens: the first has no log-prob.")
    generation.sync_weights()
    live = log_probs_of_tokens(generation.engine.log_probs(sequences), sequences)
    # In a separate process: engines of one process share a process group, which ends with the first of them.
    with tempfile.TemporaryDirectory() as folder:
        export_checkpoint(generation.model, folder, generation.processing_class, generation.dtype)
        task = {
            "sequences": sequences,
            "gpu_memory_utilization": generation.gpu_memory_utilization,
            "lora": lora_arguments(generation.model),
        }
        (Path(folder) / "task.json").write_text(json.dumps(task))
        alone = {name: value for name, value in os.environ.items() if name not in _RENDEZVOUS}
        result = subprocess.run(
            [sys.executable, "-m", __name__, folder], env=alone, capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise RuntimeError(f"The engine that loads the export failed:\n{result.stderr[-3000:]}")
        fresh = json.loads((Path(folder) / "scores.json").read_text())
    differences = [abs(a - b) for row, other in zip(live, fresh, strict=True) for a, b in zip(row, other, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


_RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _main(folder: str) -> None:
    """Run as the process of the second engine: score `task.json` with the checkpoint next to it."""
    from ..rollout.in_process import InProcessEngine, load_engine

    task = json.loads((Path(folder) / "task.json").read_text())
    llm = load_engine(
        folder,
        max_model_len=max(map(len, task["sequences"])) + 1,
        max_num_seqs=len(task["sequences"]),
        gpu_memory_utilization=task["gpu_memory_utilization"],
        **task["lora"],
    )
    request = None
    if task["lora"]:
        from vllm.lora.request import LoRARequest

        # vLLM reads the adapter in PEFT's format, independent of a publication.
        request = LoRARequest("policy", 1, str(Path(folder) / ADAPTER_FOLDER))
    scores = InProcessEngine(llm).log_probs(task["sequences"], lora_request=request)
    (Path(folder) / "scores.json").write_text(json.dumps(log_probs_of_tokens(scores, task["sequences"])))


if __name__ == "__main__":
    _main(sys.argv[1])
