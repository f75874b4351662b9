"""Tensors of an engine's model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn


pytest.importorskip("vllm")

from vllm.model_executor.models.utils import WeightsMapper

import trl_qarl.vllm_plugin.corrected.bloom  # noqa: F401
from trl_qarl.vllm_plugin.engine_tensors import (
    as_in_checkpoints,
    convolution_copies,
    drop_unused_norms,
    engine_name,
    first_names,
    is_unused,
    live_fingerprints,
    mappers_of_names,
    mark_rows_by_heads,
)
from trl_qarl.vllm_plugin.weight_transfer import AuditedReload, _in_order
from trl_qarl.wire.fingerprint import fingerprint


pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_copy_of_a_convolution_has_the_loaded_weight(is_packed):
    model = nn.ModuleDict({"mixer": nn.Module()})
    mixer, weight = model["mixer"], torch.arange(12.0).view(4, 1, 3)
    mixer.conv1d = nn.Module()
    mixer.conv1d.weight = nn.Parameter(weight.flip(0) if is_packed else weight)
    mixer.register_buffer("conv_weights", torch.zeros(4, 3), persistent=False)
    if is_packed:
        mixer.conv1d._cpu_unpacked_conv_weight = weight.view(4, 3)
    [(name, buffer, found)] = convolution_copies(model)
    assert name == "mixer.conv_weights" and buffer is mixer.conv_weights
    assert torch.equal(found, weight.view(4, 3))


def test_tensors_of_a_tower_that_an_engine_lacks_are_unused():
    model = nn.ModuleDict({"vision_tower": nn.Module(), "language_model": nn.Module()})
    model.supports_multimodal, model.get_language_model = True, lambda: model["language_model"]
    assert is_unused(model, "vision_tower.layers.1.fc1.weight")
    # vLLM makes no tower for videos alone.
    assert is_unused(model, "multi_modal_projector.linear_1.weight") and is_unused(model, "image_newline")
    assert not is_unused(model, "language_model.layers.1.fc1.weight")
    assert not is_unused(model, "lm_head.weight")
    assert not is_unused(model["language_model"], "vision_tower.layers.1.fc1.weight")


def test_shards_are_in_the_order_of_the_rows_that_they_fill():
    assert _in_order({"v": "v_proj", "q": "q_proj", "k": "k_proj"}) == ["q_proj", "k_proj", "v_proj"]
    assert _in_order({1: "up_proj", 0: "gate_proj"}) == ["gate_proj", "up_proj"]
    assert _in_order({None: "A_log"}) == ["A_log"]
    assert _in_order({"w3": "gate_proj|up_proj", "w1": "gate_proj|up_proj"}) == ["gate_proj|up_proj"]


def test_models_inside_a_model_map_their_part_of_a_name():
    model = nn.ModuleDict({"model": nn.Module(), "lm_head": nn.Module()})
    model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"language_model.": "model."})
    model["model"].hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"router.": "gate."}, orig_to_new_stacked={".q_proj": (".qkv_proj", "q")}
    )
    mappers = mappers_of_names(model)
    names = ["language_model.router.weight", "model.q_proj.weight", "router.weight"]
    assert [engine_name(mappers, name) for name in names] == [
        "model.gate.weight",
        "model.q_proj.weight",
        "router.weight",
    ]


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_bias_that_is_loaded_in_place_is_found_by_its_bytes(is_loaded):
    """vLLM's loader renames and reshapes the one of ERNIE's router, and notes no load."""
    reload, bias = AuditedReload.__new__(AuditedReload), torch.rand(1, 8)
    path, name = (f"model.layers.1.{part}.e_score_correction_bias" for part in ("gate", "moe_statics"))
    reload._engine_name = lambda name: name
    reload._owned = {path: [path], "model.layers.1.gate.weight": ["model.layers.1.gate.weight"]}
    reload._owned["model.layers.1.experts.e_score_correction_bias"] = reload._owned[path]
    live = {path: fingerprint(bias[0] if is_loaded else bias[0] + 1)}
    reload._own_in_place({name: fingerprint(bias)}, live)
    wanted = [name] if is_loaded else [path]
    assert reload._owned[path] == reload._owned["model.layers.1.experts.e_score_correction_bias"] == wanted


@pytest.mark.parametrize(
    ("file", "family", "kv_heads"), [("bloom", "Bloom", 4), ("falcon", "Falcon", 2), ("gpt_neox", "GPTNeoX", 4)]
)
def test_rows_are_compared_in_the_order_of_the_checkpoint(file, family, kv_heads):
    """vLLM's own loader reorders the rows, and leaves the numbers of `weight_shape`; 0.32 lacks GPT-NeoX."""
    classes = pytest.importorskip(f"vllm.model_executor.models.{file}")
    attention, model = getattr(classes, f"{family}Attention"), getattr(classes, f"{family}Model")
    heads, head_size = 4, 2
    rows = torch.arange((heads + 2 * kv_heads) * head_size).view(-1, 1)
    engine, parent, layer = (cls.__new__(cls) for cls in (model, attention, nn.Module))
    for module in (engine, parent, layer):
        nn.Module.__init__(module)
    layer.num_kv_heads, layer.output_sizes = kv_heads, [n * head_size for n in (heads, kv_heads, kv_heads)]
    names = [f"query_key_value.{leaf}" for leaf in ("weight", "weight_shape")]
    for name, tensor in zip(names, (rows, torch.tensor([12, 8])), strict=True):
        parameter = nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
        parameter.output_dim = 0 if name.endswith("weight") else None
        layer.register_parameter(name.rpartition(".")[2], parameter)
    parent.query_key_value = layer
    engine.query_key_value = layer
    engine.config = SimpleNamespace(num_attention_heads=heads, num_kv_heads=kv_heads, new_decoder_architecture=True)
    sent = dict(zip(names, (rows, torch.tensor([12, 8])), strict=True))
    engine.load_weights(sent.items())
    assert not torch.equal(layer.weight, rows)
    mark_rows_by_heads(nn.ModuleList([parent]))
    assert torch.equal(as_in_checkpoints(layer, "weight"), rows)
    assert layer.weight_shape.tolist() == [12, 8]


@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_norm_that_dense_layers_never_use_is_dropped(is_sparse):
    layer = nn.Module()
    layer.is_layer_sparse, layer.post_mlp_layernorm = is_sparse, nn.LayerNorm(8)
    drop_unused_norms(layer)
    assert hasattr(layer, "post_mlp_layernorm") == is_sparse


def test_a_router_of_two_modules_is_owned_under_its_first_name():
    """That of a block and its experts in vLLM's Transformers backend; checkpoints have the second name."""
    block, router = nn.ModuleDict({"experts": nn.Module()}), nn.Linear(8, 4, bias=False)
    router.register_buffer("e_score_correction_bias", torch.zeros(4))
    block["experts"].gate = block["gate"] = router
    names = [f"gate.{leaf}" for leaf in ("weight", "e_score_correction_bias")]
    reload = AuditedReload.__new__(AuditedReload)
    reload._first_names, reload._owned, reload._read_when_loaded = first_names(block), {}, set()
    reload._own(names)
    assert reload._owned == {f"experts.{name}": [name] for name in names}
    assert live_fingerprints(block, {}).keys() == reload._owned.keys()
