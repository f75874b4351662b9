"""Tiny models and the names of their layers, for tests of what is made of them."""

import torch
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_config


ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
LAYERS = [f"model.layers.{i}.{name}" for i in range(2) for name in ATTENTION + MLP]


def tiny(arch="llama", **overrides):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_tiny_config(arch, **overrides))


def route(num_tokens=40, num_experts=8):
    """Tokens of 128 features, and random routes of which the last expert has none, and one is a slot without an
    expert."""
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(num_experts - 1)[:2] for _ in range(num_tokens)])
    ids[3, 1] = num_experts
    return torch.randn(num_tokens, 128, requires_grad=True), ids, torch.rand(num_tokens, 2, requires_grad=True)
