from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from trl_qarl.quantization.experts import clamped_swiglu, experts_product, gated
from trl_qarl.quantization.gemm import low_bit_linear
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.tensors import LowBitTensor


EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 6, 2, 64, 32


def make_stacks(name, dtype):
    """Codes of all experts of both matrices, each of them one low-bit tensor; expert 5 is never chosen."""
    torch.manual_seed(0)
    scheme = get_scheme(name)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 8
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / 8
    return [
        LowBitTensor.from_hp(weight.flatten(0, 1), scheme, dtype).row_blocks(EXPERTS) for weight in (gate_up, down)
    ]


def route(num_tokens, topk=TOPK):
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:topk] for _ in range(num_tokens)])
    return ids, torch.rand(num_tokens, topk)


def linear(rows, weight):
    return low_bit_linear(rows, weight, None, row_invariant=True)[0]


experts_product = partial(experts_product, linear=linear, activation=gated(F.silu))


@pytest.mark.parametrize("name", ["w4a16", "w8a16", "w8a8", "fp8"])
def test_a_tokens_bits_depend_on_no_other_token(name):
    stacks = make_stacks(name, torch.bfloat16)
    x, (ids, weights) = torch.randn(150, HIDDEN).bfloat16(), route(150)
    together = experts_product(x, ids, weights, *stacks)
    for token in (0, 7, 149):
        one = slice(token, token + 1)
        assert torch.equal(experts_product(x[one], ids[one], weights[one], *stacks), together[one])
    shuffled = torch.randperm(150)
    assert torch.equal(experts_product(x[shuffled], ids[shuffled], weights[shuffled], *stacks), together[shuffled])


def test_expert_outputs_are_added_in_routing_order():
    # Of two, either order gives the same; after rounding to 16 bits most orders do.
    gate_up, down = make_stacks("w4a16", torch.float32)
    x, (ids, weights) = torch.randn(40, HIDDEN), route(40, topk=4)
    y = experts_product(x, ids, weights, gate_up, down)

    for token in range(40):
        total = None
        for expert, weight in zip(ids[token], weights[token], strict=True):
            gate, up = linear(x[token : token + 1], gate_up[expert]).chunk(2, -1)
            term = linear(F.silu(gate) * up, down[expert]).float() * weight
            total = term if total is None else total + term
        assert torch.equal(y[token], total[0])


def test_a_slot_without_expert_counts_nothing():
    stacks = make_stacks("w4a16", torch.float32)
    x, (ids, weights) = torch.randn(5, HIDDEN), route(5)
    skipped = ids.clone()
    skipped[1, 0], skipped[2] = EXPERTS, EXPERTS
    alone = experts_product(x, ids[:, 1:], weights[:, 1:], *stacks)
    y = experts_product(x, skipped, weights, *stacks)
    assert torch.equal(y[1], alone[1]) and not y[2].any()
    assert torch.equal(y[3:], experts_product(x, ids, weights, *stacks)[3:])
    assert not experts_product(x, torch.full_like(ids, EXPERTS), weights, *stacks).any()
    assert experts_product(x[:0], ids[:0], weights[:0], *stacks).shape == (0, HIDDEN)


def test_the_engines_clamped_activation_is_transformers_own():
    experts = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=32, num_local_experts=1))
    rows = torch.randn(50, 64) * 8
    assert (rows.abs() > experts.limit).any(), "beyond the limit"
    assert torch.equal(clamped_swiglu(rows), experts._apply_gate(rows))
