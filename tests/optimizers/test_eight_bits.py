"""Optimizer state in 8 bits, and gradients in 16, against float32."""

import pytest
import torch
from torchao.optim.subclass_8bit import OptimState8bit

from testing_utils import make_trainer
from testing_utils.layers import tiny
from testing_utils.trainings import EXPERTS
from trl_qarl.optimizers.eight_bits import AdamWIn8Bits, new_state, parts_of
from trl_qarl.optimizers.muon import MuonAdamW
from trl_qarl.quantization.swap import quantized_layers


def make(model, in_8_bits=True, **options):
    decay = {name for name, p in model.named_parameters() if p.ndim == 2}
    return MuonAdamW(model, decay, **({"lr": 1e-3, "weight_decay": 0.1, "in_8_bits": in_8_bits} | options))


def update(model, optimizer, seed):
    """An update with random gradients, of which every second row of the embedding gets none."""
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * torch.randn(p.shape[-1]).exp()
    model.model.embed_tokens.weight.grad[seed % 2 :: 2] = 0
    optimizer.step()


@pytest.mark.parametrize(("arch", "fields"), [("qwen2", {}), ("qwen3_moe", EXPERTS)])
def test_updates_stay_near_those_of_a_state_in_float32(arch, fields):
    ours, theirs = (tiny(arch, tie_word_embeddings=False, **fields) for _ in range(2))
    before = [p.detach().clone() for p in ours.parameters()]
    for model, in_8_bits in ((ours, True), (theirs, False)):
        optimizer = make(model, in_8_bits)
        for seed in range(8):
            update(model, optimizer, seed)
    for (name, p), q, start in zip(ours.named_parameters(), theirs.parameters(), before, strict=True):
        assert (p - q).norm() < 0.06 * (q - start).norm(), name


def test_the_state_takes_a_byte_for_each_value():
    model = tiny("qwen2", tie_word_embeddings=False)
    optimizer = make(model)
    update(model, optimizer, 0)
    bits = {}
    for name, p in model.named_parameters():
        for key, state in optimizer.state[p].items():
            if key != "step":
                assert isinstance(state, OptimState8bit) or state.dtype is torch.float32, (name, key)
                bits[name, key] = 8 if isinstance(state, OptimState8bit) else 32
    assert bits["model.layers.0.mlp.up_proj.weight", "momentum_buffer"] == 8
    assert bits["lm_head.weight", "exp_avg"] == bits["lm_head.weight", "exp_avg_sq"] == 8
    embedding = "model.embed_tokens.weight"
    assert (bits[embedding, "exp_avg"], bits[embedding, "exp_avg_sq"]) == (8, 32)
    assert bits["model.norm.weight", "exp_avg"] == 32


def test_blocks_lie_within_rows():
    states = [new_state(torch.nn.Parameter(torch.empty(64, width))) for width in (512, 896, 96, 90)]
    assert [getattr(state, "block_size", None) for state in states] == [256, 128, 32, None]
    # torchao cannot count the blocks of nothing.
    assert new_state(torch.nn.Parameter(torch.empty(0, 64))).dtype is torch.float32
    # A part has the blocks of its rows.
    whole = torch.randn(64, 896)
    states[1].copy_(whole)
    part = new_state(torch.nn.Parameter(torch.empty(5, 896)))
    for rows in (slice(10, 15), slice(59, 64)):
        part = OptimState8bit.zeros((5, 896), True, 128)
        part.copy_(whole[rows])
        assert torch.equal(part.codes, states[1].codes[rows]) and torch.equal(
            part.dequantize(), states[1][rows].dequantize()
        )


def test_parts_are_of_bounded_size():
    weight = torch.empty(10, 3000, 1000, device="meta")
    assert [*parts_of(weight)] == [(i, 1) for i in range(10)]
    lengths = [length for _, length in parts_of(torch.empty(10_000, 1000, device="meta"))]
    assert sum(lengths) == 10_000 and max(lengths) * 1000 <= 2**22


def test_gradients_in_16_bits_change_an_update_by_their_rounding():
    ours, theirs = (torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0))) for _ in "ab")
    ours.grad_dtype, before = torch.bfloat16, theirs.detach().clone()
    (ours * torch.arange(64)).sum().backward()
    theirs.grad = ours.grad.float()
    assert ours.grad.dtype is torch.bfloat16
    for p in (ours, theirs):
        AdamWIn8Bits([p], lr=1e-2).step()
    assert torch.equal(ours, theirs) and not torch.equal(ours, before)


def test_the_trainer_keeps_gradients_and_state_small(tiny_model, tmp_path):
    """Saved, resumed with the same bits, and clipped by a norm in float32."""
    options = {"optim": "muon_8bit", "gradient_dtype": "bfloat16", "bf16": True, "max_steps": 3, "learning_rate": 1e-3}
    options |= {"save_strategy": "steps", "save_steps": 1, "max_grad_norm": 1e-3, "gradient_accumulation_steps": 2}
    trainer, seen = make_trainer(tiny_model, tmp_path, **options), []

    def look(optimizer, args, kwargs):
        gradients = [p.grad for p in trainer.model.parameters()]
        assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
        seen.append(torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt().item())

    trainer.create_optimizer().register_step_pre_hook(look)
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert min(norms) > 1e-3 and seen == pytest.approx([1e-3] * 3, rel=2e-3)
    layer = quantized_layers(trainer.model)["model.layers.0.mlp.up_proj"]
    assert isinstance(trainer.optimizer.optimizer.state[layer.weight]["momentum_buffer"], OptimState8bit)
    resumed = make_trainer(tiny_model, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(map(torch.equal, resumed.model.parameters(), trainer.model.parameters()))
