"""How far engine and learner are apart on CUDA, and what stands in the way of 0. It has never run: `pytest -m gpu -s`."""

import math
from argparse import Namespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_model
from trl_qarl import prepare_model
from trl_qarl.bench.alignment import measure_alignment, summarize_alignment
from trl_qarl.numerics.attach import check_engine_numerics
from trl_qarl.rollout.engines import make_engine
from trl_qarl.rollout.publisher import Publisher
from trl_qarl.rollout.scoring import engine_log_probs
from trl_qarl.rollout.transports import DirectTransport


pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICE = "cuda"


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
def test_fast_numerics_stay_close_on_cuda_and_engine_numerics_are_refused(tmp_path, scheme):
    path = make_tiny_model(tmp_path, "qwen3")
    rows = measure_alignment(path, [scheme], Namespace(dtypes=["bfloat16"], rollout="colocate", tokens=3000))
    (row,) = summarize_alignment(rows)
    print(row)
    assert row["tokens"] >= 3000
    # Log-probs of a random model of 260 tokens lie near -5.5, where bfloat16 rounds a logit's difference by up to 0.016.
    assert row["fast: mean"] < 0.03
    assert "engine: mean" not in row
    model = AutoModelForCausalLM.from_pretrained(path).to(DEVICE)
    with pytest.raises(ValueError, match="they exist for CPUs; the model is on cuda"):
        check_engine_numerics(model)


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
def test_what_a_batch_invariant_engine_repeats_bit_for_bit(tmp_path, monkeypatch, scheme):
    """The engine's share of 0: whether its decoding and its prefill give a token one log-prob, whatever comes with it."""
    from vllm import SamplingParams

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, "qwen3"), dtype=torch.float32).to(DEVICE)
    prepare_model(model, scheme, scale_dtype=torch.bfloat16)
    llm = make_engine(
        model,
        torch.bfloat16,
        on_cpu=DEVICE == "cpu",
        distributed_executor_backend="uni",
        max_model_len=256,
        max_num_seqs=16,
        gpu_memory_utilization=0.2,
    )
    Publisher(model, torch.bfloat16, DirectTransport(llm)).publish("0")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 260, (n,), generator=generator).tolist() for n in (1, 7, 40, 90)]
    parameters = SamplingParams(max_tokens=64, logprobs=0, ignore_eos=True)
    outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters)]
    differences = []
    for prompt, output in zip(prompts, outputs, strict=True):
        # One sequence at a time: another batch than that of decoding.
        [scores] = engine_log_probs(llm, [prompt + list(output.token_ids)])
        for token, entry, score in zip(output.token_ids, output.logprobs, scores[len(prompt) - 1 :], strict=True):
            differences.append(abs(entry[token].logprob - score[token]))
    assert len(differences) == 256 and all(map(math.isfinite, differences))
    print(f"{scheme}: {differences.count(0.0)} of 256 log-probs equal, largest difference {max(differences):.3g}")
    if scheme == "w4a16":
        pytest.skip(f"vLLM 0.31 has no batch-invariant INT4 product; largest difference {max(differences):.3g}")
    assert max(differences) == 0.0
