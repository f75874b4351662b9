"""Tiny models and the names of their layers, for tests of what is made of them."""

from functools import partial

import torch
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_config
from trl_qarl.checkpoint.layout import quantization_config
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.quantize import quantize_activation
from trl_qarl.quantization.swap import prepare_model
from trl_qarl.quantization.tensors import LowBitTensor


ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
TOKENS = torch.arange(12).view(2, 6)
LAYERS = [f"model.layers.{i}.{name}" for i in range(2) for name in ATTENTION + MLP]


def one_layer(scheme, **options):
    """A model of one linear layer with a scheme, and what the configuration of its checkpoint says of that."""
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    prepare_model(model, scheme, **options)
    return model, quantization_config(Inventory.of(model))


def tiny(arch="llama", seed=0, **overrides):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(make_tiny_config(arch, **overrides))


def bits(tensors):
    """Dtypes and bytes of tensors, which come with their names."""
    return {name: (tensor.dtype, tensor.view(torch.uint8).tolist()) for name, tensor in tensors}


@torch.no_grad()
def logits(model, tokens=TOKENS):
    return model(tokens).logits


def assert_close(ours, theirs):
    """Compare logits of two models with the same weights in float32, where only the order of summation differs."""
    tokens = torch.randint(4, 200, (2, 12))
    torch.testing.assert_close(logits(ours, tokens), logits(theirs, tokens), rtol=1e-5, atol=1e-5)


def route(num_tokens=40, num_experts=8):
    """Tokens of 128 features with random routes: none to the last expert, and one slot without an expert."""
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(num_experts - 1)[:2] for _ in range(num_tokens)])
    ids[3, 1] = num_experts
    return torch.randn(num_tokens, 128, requires_grad=True), ids, torch.rand(num_tokens, 2, requires_grad=True)


def straight_through(value, rounded):
    return value + (rounded - value).detach()


def naive_experts(layer, x, ids, weights):
    """Token by token and expert by expert, in float64; each expert's matrix is quantized by itself. The leaves are
    `x`, `weights` and the parameters of `layer`, in order."""
    leaves = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters(recurse=False)}
    x, weights = (t.detach().double().requires_grad_() for t in (x, weights))
    activation = partial(layer.experts_class._apply_gate, layer) if layer.has_gate else layer.act_fn

    def product(row, name, expert):
        master = leaves[name][expert].mT if layer.is_transposed else leaves[name][expert]
        matrix = LowBitTensor.from_hp(master.detach().float(), layer.scheme, layer.scale_dtype)
        matrix = matrix.gemm_weight().dequantize(torch.float64)
        if layer.scheme.activation is not None:
            codes, scale = quantize_activation(row.detach().float()[None], layer.scheme)
            row = straight_through(row, (codes.double() * scale.double())[0])
        y = straight_through(master, matrix) @ row
        return y + leaves[f"{name}_bias"][expert] if layer.has_bias else y

    inner, outer = layer.quantized_weights
    rows = []
    for token, chosen in enumerate(ids.tolist()):
        y = torch.zeros(x.shape[1], dtype=torch.float64)
        for slot, expert in enumerate(chosen):
            if expert < layer.num_experts:
                y = y + weights[token, slot] * product(activation(product(x[token], inner, expert)), outer, expert)
        rows.append(y)
    return torch.stack(rows), (x, weights, *leaves.values())
