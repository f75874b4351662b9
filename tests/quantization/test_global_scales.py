import json

import pytest
import torch
from safetensors.torch import load_file

from testing_utils import make_tiny_tokenizer, run_export
from testing_utils.layers import bits, tiny
from testing_utils.trainings import RECORD
from trl_qarl import export_checkpoint, prepare_model
from trl_qarl.checkpoint.layout import quantization_config
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.swap import freeze_model, quantized_layers, restore_model, share_global_scales


@pytest.fixture
def model():
    model = tiny()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= 8
            layer.mlp.up_proj.weight *= 100
    return model


def test_fused_layers_share_a_divisor(model):
    prepare_model(model, "nvfp4a16", scale_dtype=torch.bfloat16)
    layers = quantized_layers(model)
    scales = Inventory.of(model).global_scales
    assert scales.keys() == layers.keys() and len(set(scales.values())) > 2
    for name, scale in scales.items():
        parent, _, leaf = name.rpartition(".")
        largest_of = {"q_proj": "k_proj", "v_proj": "k_proj", "gate_proj": "up_proj"}
        largest = layers[f"{parent}.{largest_of.get(leaf, leaf)}"].weight.abs().max().item()
        assert 2688 / largest / 8 < scale <= 2688 / largest / 4


def test_frozen_layers_keep_the_divisors_of_their_run(model):
    prepare_model(model, {"re:.*mlp.*": "nvfp4a16", "_default": "w8a8"})
    layers = quantized_layers(model)
    halves = {name: scale / 2 for name, scale in Inventory.of(model).global_scales.items()}
    assert halves.keys() == {name for name in layers if ".mlp." in name}
    share_global_scales(layers, halves)
    freeze_model(model)
    assert {name: layers[name].low_bit_weight().shared_scale for name in halves} == halves
    assert Inventory.of(model).global_scales == halves
    with pytest.raises(ValueError, match="global_scales has no entry"):
        share_global_scales(layers, {"other": 2.0})


def test_a_model_whose_weights_are_not_loaded_yet_has_none():
    with torch.device("meta"):
        model = tiny()
    prepare_model(model, "nvfp4a16")
    assert Inventory.of(model).global_scales == {}


def test_layers_of_several_precisions_are_not_exported(model, tmp_path):
    prepare_model(model, "nvfp4a16", scale_dtype=torch.bfloat16)
    layers = quantized_layers(model)
    before = Inventory.of(model).global_scales
    with torch.no_grad():
        for layer in layers.values():
            layer.low_bit_weight()
            layer.weight *= 3
            layer.low_bit_weight()
    assert Inventory.of(model).global_scales == before
    export_checkpoint(model, tmp_path / "export")
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: tensors[f"{name}.weight_global_scale"].item() for name in before} == before
    layers["model.layers.0.self_attn.v_proj"].quantized_weights["weight"].global_scale /= 2
    with pytest.raises(ValueError, match="global scales .*v_proj.* differ"):
        quantization_config(Inventory.of(model))


def test_masters_are_exported_with_the_divisors_of_their_run(model, tmp_path):
    prepare_model(model, "nvfp4a16", scale_dtype=torch.bfloat16)
    layers = quantized_layers(model)
    scales = Inventory.of(model).global_scales
    with torch.no_grad():
        for layer in layers.values():
            layer.weight *= 3
    expected = bits(
        (f"{name}.{leaf}", tensor)
        for name, layer in layers.items()
        for leaf, tensor in layer.low_bit_weight().checkpoint_tensors().items()
    )
    restore_model(model)
    masters = tmp_path / "masters"
    model.save_pretrained(masters)
    make_tiny_tokenizer().save_pretrained(masters)
    record = RECORD | {"scheme": "nvfp4a16", "group_size": 16}
    for of_the_run in (True, False):
        (masters / "qarl.json").write_text(json.dumps(record | ({"global_scales": scales} if of_the_run else {})))
        folder = tmp_path / f"export-{of_the_run}"
        assert run_export(masters, folder) == 0
        found = bits(load_file(folder / "model.safetensors").items())
        assert (found | expected == found) == of_the_run
