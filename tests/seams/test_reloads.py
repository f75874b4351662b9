"""
Weights published to the layouts of vLLM's kernels for GPUs, without a GPU: what a CUDA graph would read at the
addresses that it has captured is what an engine holds that loads the export.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from rehearsal import reloads


pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def rehearse():
    """[`reloads.rehearse`] in a process that takes this machine for one with a GPU, and that no other test shares."""
    with pytest.MonkeyPatch.context() as patch:
        # The worker is in that process, and dummy weights are all that is loaded from a network.
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), reloads.start)
        yield lambda *args, **kwargs: pool.submit(reloads.rehearse, *args, **kwargs).result(timeout=120)
        # Without the end of an interpreter that holds all of vLLM, which takes seconds.
        pool.submit(os._exit, 0)
        pool.shutdown()


MARLIN, MACHETE = "MarlinLinearKernel", "MacheteLinearKernel"
INT8, FP8 = "CutlassInt8ScaledMMLinearKernel", "CutlassFP8ScaledMMLinearKernel"

# Qwen2 has biases, and so does Qwen2-MoE; Qwen3 has norms of queries and keys. Where a capability is left out, the
# choice is the same.
CASES = [
    # Marlin pads what 64 does not divide, and a bias with it.
    ("qwen2", "w4a16", (8, 0), {"hidden_size": 160, "num_attention_heads": 4, "head_dim": 40}, MARLIN),
    ("qwen2", "nvfp4a16", (8, 9), {}, "MarlinNvFp4LinearKernel"),
    ("qwen3", "w8a8", (8, 0), {}, INT8),
    ("qwen2", "fp8", (8, 9), {}, FP8),
    ("llama", "w4a8", (9, 0), {}, "CutlassW4A8LinearKernel"),
    ("qwen3_moe", "fp8", (9, 0), {}, "TritonOrCutlassExperts"),
    # Over NCCL, with a queue in its place.
    ("qwen3", "w4a16", (9, 0), {"nccl": True}, MACHETE),
]
# Kernels and paths of the same kind.
OTHERS = [
    ("qwen2_moe", "w4a16", (8, 0), {}, "MarlinExperts"),
    ("qwen2", "w4a16", (8, 0), {}, MARLIN),
    ("qwen2", "w8a16", (8, 9), {}, MARLIN),
    ("qwen2", "w4a16", (9, 0), {}, MACHETE),
    ("qwen2", "mxfp4a16", (8, 0), {}, "MarlinMxFp4LinearKernel"),
    # Marlin pads hidden and intermediate sizes of gpt-oss.
    ("gpt_oss", "mxfp4a16", (8, 0), {}, "MarlinExperts"),
    ("llama", "w4a16", (8, 0), {"tie_word_embeddings": True}, MARLIN),
    ("qwen3_moe", "w8a8", (9, 0), {}, "TritonExperts"),
    ("qwen3_moe", "bf16", (8, 0), {}, "TritonExperts"),
]


def parameters(cases, *marks):
    return [
        pytest.param(*case, id="-".join([arch, scheme, "{}.{}".format(*number), *options]), marks=marks)
        for case in cases
        for arch, scheme, number, options, _ in [case]
    ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("arch", "scheme", "capability", "options", "kernel"),
    [*parameters(CASES), *parameters(OTHERS, pytest.mark.nightly)],
)
def test_graphs_read_the_published_weights(rehearse, arch, scheme, capability, options, kernel):
    found = rehearse(arch, scheme, capability, **options)
    assert kernel in found["kernels"], found["kernels"]
    # Twice everything, then one decoder layer of two.
    assert found["sent"][0] >= found["sent"][1] > 1.5 * found["sent"][3] > 0
    assert found["unnamed"] == 0 and found["num_tensors"] > 25
    problems = ("different", "one_sided", "numbers", "moved", "stale")
    assert {name: found[name] for name in problems} == dict.fromkeys(problems, [])
