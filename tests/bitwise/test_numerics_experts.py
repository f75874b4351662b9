"""
Mixtures of experts with engine numerics, without an engine: routes and products are vLLM's where it is installed, a
token's bits do not depend on the batch, gradients are those of float64.
"""

import pytest
import torch
import torch.nn.functional as F

from testing_utils import relative_error
from testing_utils.learners import make_model, needs_vllm
from trl_qarl.bitwise.attach import attach_engine_numerics, detach_engine_numerics
from trl_qarl.bitwise.expert_products import PackedExperts, experts, route


MIXTURES = ["qwen3_moe", "qwen2_moe", "mixtral"]


def random(*shape, seed=0, std=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def make_inputs(tokens=40, num_experts=8, hidden=64, inner=96):
    """Tokens, routing that leaves expert 5 idle, and masters."""
    logits = random(tokens, num_experts, seed=1)
    logits[:, 5] = -30
    weights, ids = route(logits.bfloat16(), 2, True)
    masters = (
        random(num_experts, 2 * inner, hidden, seed=2, std=0.1),
        random(num_experts, hidden, inner, seed=3, std=0.1),
    )
    return random(tokens, hidden, seed=4).bfloat16(), ids, weights, *masters


@needs_vllm
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("num_experts", [8, 60, 128])
def test_routes_are_those_of_vllms_router(num_experts, renormalize):
    from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts

    # Rounded to bfloat16 many of them tie.
    logits = random(500, num_experts).bfloat16()
    theirs = select_experts(logits, logits, 4, use_grouped_topk=False, renormalize=renormalize)
    for ours, their in zip(route(logits, 4, renormalize), theirs, strict=True):
        assert torch.equal(ours, their.to(ours.dtype))
    one_by_one = [route(row, 4, renormalize) for row in logits[:50].split(1)]
    assert torch.equal(torch.cat([ids for _, ids in one_by_one]), route(logits, 4, renormalize)[1][:50])


def naive(x, ids, weights, gate_up, down):
    """Token by token, expert by expert."""
    rows = []
    for token, chosen, shares in zip(x, ids.tolist(), weights, strict=True):
        gates = [(gate_up[e] @ token).chunk(2) for e in chosen]
        rows.append(sum(w * (down[e] @ (F.silu(g) * u)) for w, e, (g, u) in zip(shares, chosen, gates, strict=True)))
    return torch.stack(rows)


def test_unquantized_experts_equal_float64(arithmetic):
    x, ids, weights, *masters = make_inputs()
    rounded = [master.bfloat16() for master in masters]
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weights, *(r.float() for r in rounded))]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    y = experts(inputs[0], ids, *inputs[1:], PackedExperts(*rounded))
    expected = naive(exact[0], ids, *exact[1:])
    upstream = random(*y.shape, seed=9).bfloat16()
    y.backward(upstream)
    expected.backward(upstream.double())
    assert relative_error(y, expected) < 2**-7
    for ours, reference in zip(inputs, exact, strict=True):
        assert ours.grad.dtype is ours.dtype
        # Forward and backward round to 8 bits at each operation.
        assert relative_error(ours.grad, reference.grad) < 2**-6
    # An expert without a token, and one with.
    assert all(master.grad[5].count_nonzero() == 0 < master.grad[4].count_nonzero() for master in inputs[2:])


def make_ids(batch=4, length=20):
    return torch.randint(4, 260, (batch, length), generator=torch.Generator().manual_seed(1))


def log_probs(model, ids, **kwargs):
    return model(input_ids=ids, labels=ids, fused_lm_head=True, attention_mask=torch.ones_like(ids), **kwargs)


@pytest.mark.parametrize(("arch", "scheme"), [*((arch, "bf16") for arch in MIXTURES), ("qwen3_moe", "w4a16")])
def test_a_sequence_has_the_same_bits_in_every_batch(tmp_path, arch, scheme, arithmetic):
    model, ids = make_model(tmp_path, arch, scheme), make_ids()
    fast = model(input_ids=ids, output_router_logits=True)
    attach_engine_numerics(model)
    together = log_probs(model, ids, output_router_logits=True)
    alone = [log_probs(model, row).log_probs for row in ids.split(1)]
    assert torch.equal(together.log_probs, torch.cat(alone))
    assert log_probs(model, ids).aux_loss is None
    together.aux_loss.backward()
    detach_engine_numerics(model)
    assert abs(together.aux_loss - fast.aux_loss) < 0.02 * fast.aux_loss
    assert all(layer.mlp.gate.weight.grad.count_nonzero() for layer in model.model.layers)
    assert torch.equal(fast.logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("arch", MIXTURES)
def test_gradients_reach_experts_routers_and_shared_experts(tmp_path, arch, arithmetic):
    """In float64 and with the routes of the engine, as an expert that is chosen instead has another gradient."""
    model, ids = make_model(tmp_path, arch), make_ids()
    upstream = random(4, 19, seed=5)
    routes = []
    attach_engine_numerics(model)
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda m, a, out: routes.append(out[2])) for gate in gates]
    (log_probs(model, ids).log_probs * upstream).sum().backward()
    for hook in hooks:
        hook.remove()
    detach_engine_numerics(model)
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.double().config._experts_implementation = "eager"
    for layer, chosen in zip(model.model.layers, routes, strict=True):
        layer.mlp.gate.register_forward_hook(
            lambda module, args, output, chosen=chosen: _forced(module, output[0], chosen)
        )
    logits = model(input_ids=ids).logits[:, :-1]
    (torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0] * upstream).sum().backward()
    for name, parameter in model.named_parameters():
        # Rounding to 8 bits at every operation of a model whose outputs depend on all of it.
        assert relative_error(ours[name], parameter.grad) < 2**-4, name


def _forced(router, logits, ids):
    shares = torch.softmax(logits, -1).gather(1, ids)
    return logits, shares / shares.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else shares, ids
