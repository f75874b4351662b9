"""
Measures the reason for refusing an FP8 key-value cache: `python benchmarks/fp8_cache.py` prints the mismatch of vLLM
with and without such a cache, in nats per sampled token of unquantized SmolLM2-135M-Instruct in bfloat16.
"""

import os


os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

import torch
from vllm import LLM

from bench.alignment import _learner_logps, _mismatch, _sample
from bench.engines import load_learner
from bench.vllm import _model_path


def main() -> None:
    path, dtype = _model_path(None), torch.bfloat16
    for cache in ("fp8", "auto"):
        engine = LLM(
            path,
            dtype="bfloat16",
            kv_cache_dtype=cache,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=16,
            distributed_executor_backend="uni",
        )
        samples = _sample(engine, path, 1000, 128)
        logps = _learner_logps(load_learner(path, "bf16", dtype), samples, dtype)
        print(cache, _mismatch(logps, [logp for *_, row in samples for logp in row]), flush=True)
        # Deleted now, because a later deletion would end the process groups of the next engine.
        del engine


if __name__ == "__main__":
    main()
