"""
Does the engine compute with what was published? Score the same tokens with it and with a fresh engine that loads the export.

The fingerprints of [`trl_qarl.rollout.audit`] compare weights before vLLM repacks them for its kernels; this compares what
comes out at the other end. It starts a second engine and is meant for a new vLLM version, model or kernel, not for every step.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..export import export_checkpoint
from .plugin import FILE_BACKEND
from .serve import WORKER_EXTENSION


if TYPE_CHECKING:
    from .generation import QaRLVLLMGeneration


__all__ = ["deep_audit", "prompt_log_probs"]


def deep_audit(generation: "QaRLVLLMGeneration", sequences: list[list[int]]) -> float:
    """
    Largest difference, in nats, between the log-probs of `sequences` in the engine and in one that loads the export; infinite
    where either is not a number.

    Args:
        generation ([`QaRLVLLMGeneration`]):
            A generation backend whose engine has been published to.
        sequences (`list[list[int]]`):
            Token ids, at least two per sequence.

    Raises:
        ValueError: for a sequence that has no token to score.
    """
    if not sequences or min(map(len, sequences)) < 2:
        raise ValueError("Each sequence needs at least two tokens: the first has no log-prob.")
    generation.sync_weights()
    live = _of_tokens(prompt_log_probs(generation, sequences), sequences)
    fresh = _score_export(generation, sequences)
    differences = [abs(a - b) for row, other in zip(live, fresh, strict=True) for a, b in zip(row, other, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def prompt_log_probs(
    generation: "QaRLVLLMGeneration", sequences: list[list[int]], num_top: int = 0
) -> list[list[dict[int, float]]]:
    """
    What the engine expects at each position of `sequences` from the second token on: `{token id: log-prob}` of the token that
    stands there and of the `num_top` likeliest ones, at temperature 1.
    """
    if generation.mode != "server":
        return _prompt_log_probs(generation.llm, sequences, num_top)
    client = generation.vllm_client
    body = {"model": client.model, "prompt": sequences, "max_tokens": 1, "prompt_logprobs": num_top}
    choices = client._post(f"{client.base_url}/v1/completions", json=body)["choices"]
    return [
        [{int(token): value["logprob"] for token, value in entry.items()} for entry in choice["prompt_logprobs"][1:]]
        for choice in choices
    ]


def _prompt_log_probs(llm, sequences: list[list[int]], num_top: int = 0) -> list[list[dict[int, float]]]:
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, prompt_logprobs=num_top)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in sequences], parameters, use_tqdm=False)
    return [
        [{token: value.logprob for token, value in entry.items()} for entry in output.prompt_logprobs[1:]]
        for output in outputs
    ]


def _of_tokens(scores: list[list[dict[int, float]]], sequences: list[list[int]]) -> list[list[float]]:
    return [
        [entry[token] for entry, token in zip(row, ids[1:], strict=True)]
        for row, ids in zip(scores, sequences, strict=True)
    ]


def _score_export(generation: "QaRLVLLMGeneration", sequences: list[list[int]]) -> list[list[float]]:
    # In a process of its own: two engines in one process share a process group, which ends with the first of them.
    with tempfile.TemporaryDirectory() as folder:
        export_checkpoint(generation.model, folder, generation.processing_class, generation.dtype)
        task = {
            "sequences": sequences,
            "on_cpu": generation.accelerator.device.type == "cpu",
            "dtype": str(generation.dtype).removeprefix("torch."),
            "gpu_memory_utilization": generation.gpu_memory_utilization,
        }
        (Path(folder) / "task.json").write_text(json.dumps(task))
        alone = {name: value for name, value in os.environ.items() if name not in _RENDEZVOUS}
        result = subprocess.run(
            [sys.executable, "-m", __name__, folder], env=alone, capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise RuntimeError(f"The engine that loads the export failed:\n{result.stderr[-3000:]}")
        return json.loads((Path(folder) / "scores.json").read_text())


_RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _main(folder: str) -> None:
    """What the process of the second engine does: score `task.json` with the checkpoint beside it."""
    from .generation import in_process_engine

    task = json.loads((Path(folder) / "task.json").read_text())
    llm = in_process_engine(
        on_cpu=task["on_cpu"],
        model=folder,
        dtype=task["dtype"],
        # Chooses the same kernels; the weights are those on disk.
        weight_transfer_config={"backend": FILE_BACKEND},
        worker_extension_cls=WORKER_EXTENSION,
        distributed_executor_backend="uni",
        max_model_len=max(map(len, task["sequences"])) + 1,
        max_num_seqs=len(task["sequences"]),
        gpu_memory_utilization=task["gpu_memory_utilization"],
    )
    scores = _of_tokens(_prompt_log_probs(llm, task["sequences"]), task["sequences"])
    (Path(folder) / "scores.json").write_text(json.dumps(scores))


if __name__ == "__main__":
    _main(sys.argv[1])
