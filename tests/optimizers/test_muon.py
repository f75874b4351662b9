import pytest
import torch

from testing_utils.layers import tiny
from trl_qarl.optimizers.muon import MuonAdamW


def make(model, **kwargs):
    decay = {name for name, p in model.named_parameters() if p.ndim == 2}
    return MuonAdamW(model, decay, **({"lr": 1e-2, "weight_decay": 0.1} | kwargs))


def backward(model):
    torch.manual_seed(1)
    model(torch.randint(0, 200, (2, 8))).logits.square().mean().backward()


def update(model, optimizer):
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("tied", [True, False])
def test_hidden_matrices_get_muon_and_the_rest_adamw(tied):
    model, reference = (tiny("qwen2", tie_word_embeddings=tied) for _ in range(2))
    update(model, make(model))
    matrices = [p for n, p in reference.named_parameters() if n.endswith("proj.weight")]
    others = [p for n, p in reference.named_parameters() if not n.endswith("proj.weight")]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    decay = [p for p in others if p.ndim == 2]
    adamw = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": [p for p in others if p.ndim != 2], "weight_decay": 0.0}],
        lr=1e-2,
        fused=True,
    )
    backward(reference)
    muon.step()
    adamw.step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_scheduler_reaches_both_parts():
    model = tiny("qwen2")
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for expected in (5e-3, 2.5e-3):
        update(model, optimizer)
        scheduler.step()
        groups = [group for part in optimizer.parts.values() for group in part.param_groups]
        assert {group["lr"] for group in groups} == {expected}


def test_state_of_another_optimizer_is_refused():
    model = tiny("qwen2")
    with pytest.raises(ValueError, match="another `optim`"):
        make(model).load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())


def test_frozen_parameters_are_left_out():
    model = tiny("qwen2")
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("o_proj.weight"))
    optimizer = make(model)
    assert optimizer.parts.keys() == {"muon"} and len(optimizer.param_groups[0]["params"]) == 2
    update(model, optimizer)


def test_a_matrix_with_a_zero_gradient_stays_as_it_is():
    model = tiny("qwen2")
    optimizer = make(model)
    for _ in range(2):
        update(model, optimizer)
    backward(model)
    idle, moved = (model.model.layers[0].mlp.__getattr__(name).weight for name in ("up_proj", "down_proj"))
    idle.grad.zero_()
    before, state = (idle.clone(), moved.clone()), optimizer.state[idle]["momentum_buffer"].clone()
    optimizer.step()
    assert torch.equal(idle, before[0]) and torch.equal(optimizer.state[idle]["momentum_buffer"], state)
    assert state.any() and not torch.equal(moved, before[1])
