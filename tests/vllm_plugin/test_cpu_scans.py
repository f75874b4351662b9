"""Recurrences of an engine on a CPU, compared with transformers'; families in the zoo have engines."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import torch_recurrent_gated_delta_rule


pytest.importorskip("vllm")

from vllm.platforms import current_platform

from testing_utils import make_tiny_model, start_engines_quickly
from testing_utils.engines import publish_to_engine
from trl_qarl.quantization.swap import prepare_model
from trl_qarl.vllm_plugin.cpu_scans import apply_delta_rule, scan_selectively, step_selectively


pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM has kernels on GPUs")]

LENGTHS, SLOTS = (4, 11, 5, 6), torch.tensor([5, 1, 4, 2])
SEQUENCES = [*torch.arange(sum(LENGTHS)).split(LENGTHS)]


def chunks():
    """The tokens of three chunks of all sequences, and where those of each begin; the last chunks have one."""
    for begin, end in ((0, 2), (2, -1), (-1, None)):
        rows = [tokens[begin:end] for tokens in SEQUENCES]
        yield torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0)


def test_chunks_of_mamba_1_compute_as_transformers_on_the_whole():
    torch.manual_seed(0)
    u, delta, z, B, C = (torch.randn(size, sum(LENGTHS)) for size in (12, 12, 12, 4, 4))
    A, D, bias, outputs = -torch.rand(12, 4), torch.randn(12), torch.randn(12), torch.empty_like(u)
    # What earlier requests have left.
    states = torch.full((6, 12, 4), torch.nan)
    for number, (rows, starts) in enumerate(chunks()):
        x, dt, b, c, gate = (each[:, rows] for each in (u, delta, B, C, z))
        if number < 2:
            places = {"cache_indices": SLOTS, "query_start_loc": starts}
            has_state = torch.full((4,), number > 0)
            out = scan_selectively(x, states, dt, A, b, c, D, gate, bias, has_initial_state=has_state, **places)
        else:
            places = dict.fromkeys(["state_batch_indices", "dst_state_batch_indices"], SLOTS[:, None])
            out = torch.empty_like(x)
            step_selectively(states, x.T, dt.T, A, b.T, c.T, D, bias, z=gate.T, out=out.T, **places)
        outputs[:, rows] = out
    for rows in SEQUENCES:
        x, dt, b, c, gate = (each[None, :, rows] for each in (u, delta, B, C, z))
        expected = mamba_selective_scan(x, dt, A, b, c, D, gate, bias, delta_softplus=True)[0]
        torch.testing.assert_close(outputs[:, rows], expected)


def test_the_delta_rule_in_chunks_computes_as_transformers():
    torch.manual_seed(0)
    # Two heads of values for each of keys.
    q, k, v = (torch.randn(1, sum(LENGTHS), heads, size) for heads, size in ((3, 8), (3, 8), (6, 4)))
    g, beta = -torch.rand(1, sum(LENGTHS), 6), 2 * torch.rand(1, sum(LENGTHS), 6)
    states, outputs = torch.zeros(6, 6, 4, 8), torch.empty_like(v)
    for number, (rows, starts) in enumerate(chunks()):
        tokens = [each[:, rows] for each in (q, k, v, g, beta)]
        if number < 2:
            outputs[:, rows], states[SLOTS] = apply_delta_rule(
                *tokens, initial_state=states[SLOTS], output_final_state=True, cu_seqlens=starts
            )
        else:
            outputs[:, rows], _ = apply_delta_rule(
                *tokens, initial_state=states, cu_seqlens=starts, ssm_state_indices=SLOTS
            )
    for rows, slot in zip(SEQUENCES, SLOTS, strict=True):
        tokens = [each[:, rows].repeat_interleave(6 // each.shape[2], 2) for each in (q, k, v)]
        options = {"g": g[:, rows], "beta": beta[:, rows], "initial_state": None, "output_final_state": True}
        expected, state = torch_recurrent_gated_delta_rule(*tokens, use_qk_l2norm_in_kernel=True, **options)
        torch.testing.assert_close(outputs[:, rows], expected)
        torch.testing.assert_close(states[slot], state[0].mT)


@pytest.mark.slow
def test_states_of_mamba_1_survive_chunks_and_preemption(tmp_path, monkeypatch):
    from vllm import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    start_engines_quickly(monkeypatch)
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
    path = make_tiny_model(tmp_path, "jamba", initializer_range=0.3, mamba_dt_rank=8, **layers)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    # One of a layer's matrices is in high precision.
    prepare_model(model, "w4a16", exclude_modules="re:.*in_proj", scale_dtype=torch.float32)
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 160, "long_prefill_token_threshold": 130}
    publisher = publish_to_engine(model, path, torch.float32, num_gpu_blocks_override=9, **sizes)
    publisher.publish("0")
    preempted, preempt = [], Scheduler._preempt_request

    def note(*args, **kwargs):
        preempted.append(args)
        preempt(*args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", note)
    prompts = [torch.randint(4, 260, (length,)).tolist() for length in (3, 100, 1, 23, 120, 7, 140)]
    # Its first block of tokens is cached, with the state at its end.
    prompts.append(prompts[-1])
    sampling = SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True)
    answers = publisher.engine.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    assert preempted and answers[-1].num_cached_tokens
    for prompt, answer in zip(prompts, answers, strict=True):
        [output] = answer.outputs
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.no_grad():
            logps = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        theirs = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
        expected = logps.gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(theirs), expected, rtol=0, atol=5e-4)
