import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from testing_utils import make_mixture
from testing_utils.layers import logits, tiny
from testing_utils.pictures import KINDS, make_picture_model
from testing_utils.trainings import QUANTIZED, assert_equal
from trl_qarl.checkpoint.export import export_checkpoint
from trl_qarl.checkpoint.load import is_low_bit_checkpoint, load_frozen_model, load_masters, load_renamed
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.swap import prepare_model, quantized_layers, report_frozen


# One leaf with two schemes, two schemes in one container, and a layer in high precision.
MIXED = {
    "re:.*mlp.down_proj": "w3a16",
    "re:.*layers.0.mlp.*": {"scheme": "w4a16", "group_size": 32},
    "re:.*mlp.*": {"scheme": "w4a16", "group_size": 64},
    "re:.*layers.1.self_attn.*": None,
    "_default": "w8a8",
}
# What llm-compressor 0.14.0.1 wrote of a random Llama of one layer, calibrated on the text of docs/; embeddings of 16
# tokens.
FILES = Path(__file__).parent / "llm_compressor"


def exported(folder, scheme="w4a16", **kwargs):
    model = tiny("qwen2", tie_word_embeddings=True)
    report = prepare_model(model, scheme, **kwargs)
    export_checkpoint(model, folder)
    return model, report


@pytest.mark.parametrize("scheme", [*QUANTIZED, MIXED], ids=str)
def test_a_loaded_model_computes_what_the_exported_one_does(tmp_path, scheme):
    model, report = exported(tmp_path, scheme, exclude_modules=["o_proj"])
    loaded = load_frozen_model(str(tmp_path))
    assert is_low_bit_checkpoint(str(tmp_path)) and loaded.name_or_path == str(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    expected = {name: layer.scheme.name for name, layer in quantized_layers(model).items()}
    assert {name: layer.scheme.name for name, layer in quantized_layers(loaded).items()} == expected
    described = report_frozen(loaded)
    assert described.converted == report.converted and described.low_bit_bytes == report.low_bit_bytes
    assert described.skipped.keys() == report.skipped.keys() and described.master_bytes == 0
    parts = [part for layer in quantized_layers(loaded).values() for part in layer.low_bit_weight().parts()]
    assert sum(part.nbytes for part in parts) == report.low_bit_bytes
    assert all(layer.is_frozen for layer in quantized_layers(loaded).values())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    # What was loaded is exported to the same bytes.
    export_checkpoint(loaded, tmp_path / "again", dtype=torch.float32)
    assert_equal(*(load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "again")))


@pytest.mark.parametrize("size", ["5GB", "200KB"])
def test_files_that_no_index_names_are_not_read(tmp_path, size):
    model = tiny("qwen2", tie_word_embeddings=True)
    prepare_model(model, "w4a16")
    export_checkpoint(model, tmp_path, max_shard_size=size)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (size == "200KB")
    # Of an earlier export, and of another tool; read in any order.
    for name in ("model-00009-of-00009.safetensors", "consolidated.safetensors", "a.safetensors"):
        for path in files:
            zeros = {key: torch.zeros_like(tensor) for key, tensor in load_file(path).items()}
            save_file(zeros, tmp_path / f"{path.stem}-{name}")
    assert torch.equal(logits(load_frozen_model(str(tmp_path))), logits(model))
    files[-1].unlink()
    with pytest.raises(ValueError, match="lacks 'model-0000" if len(files) > 1 else "neither model.safetensors nor"):
        load_frozen_model(str(tmp_path))


def test_masters_of_a_folder_are_those_that_transformers_loads(tmp_path):
    saved, model = make_mixture("qwen3_moe"), make_mixture("qwen3_moe", seed=1)
    saved.save_pretrained(tmp_path)
    other = {name: torch.zeros_like(t) for name, t in load_file(tmp_path / "model.safetensors").items()}
    for name in ("a.safetensors", "z.safetensors"):
        save_file(other, tmp_path / name)
    load_renamed(model, tmp_path)
    experts = (m.model.layers[1].mlp.experts.down_proj for m in (model, saved))
    assert torch.equal(*experts)


ORDER = "model.layers.0.mlp.up_proj.weight_g_idx"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, scheme: scheme.update(num_bits=3), "with other schemes than"),
        (
            lambda tensors, scheme: scheme.update(symmetric=False),
            "zero points .*are unsupported. Start from the high-precision",
        ),
        (lambda tensors, scheme: tensors.pop("model.norm.weight"), "lacks 1 tensors"),
        (lambda tensors, scheme: tensors.update({ORDER: torch.arange(128)}), f"'{ORDER}'"),
    ],
    ids=["bits", "zero points", "too few", "too many"],
)
def test_other_checkpoints_are_refused(tmp_path, change, message):
    exported(tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    change(tensors, config["quantization_config"]["config_groups"]["group_0"]["weights"])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_frozen_model(str(tmp_path))


@pytest.mark.parametrize(("arch", "renamed"), [("mixtral", "block_sparse_moe.gate.weight"), ("qwen3_moe", None)])
def test_what_the_trainer_does_not_find_in_a_checkpoint_of_a_mixture_is_loaded(tmp_path, arch, renamed):
    saved, model = make_mixture(arch), make_mixture(arch, seed=1)
    saved.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    # As transformers' Trainer does.
    lost = set(model.load_state_dict(stored, strict=False).missing_keys)
    layer = "model.layers.1.mlp"
    assert {f"{layer}.experts.gate_up_proj", f"{layer}.experts.down_proj"} <= lost
    assert (f"{layer}.gate.weight" in lost) == bool(renamed) == (f"model.layers.1.{renamed}" in stored)
    prepare_model(model, "w4a16")
    experts = model.model.layers[1].mlp.experts
    before = experts.quantized_weights["down_proj"].low_bit_weight().qdata.clone()
    load_renamed(model, tmp_path)
    assert all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in model.state_dict().items())
    # The low-bit form is that of what was loaded.
    assert not torch.equal(experts.quantized_weights["down_proj"].low_bit_weight().qdata, before)
    # Experts under names that are not known are not left as they are.
    unknown = {name.replace(".experts.3.", ".experts.x."): tensor for name, tensor in stored.items()}
    save_file(unknown, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="'model.layers.0.mlp.experts.gate_up_proj'"):
        load_renamed(model, tmp_path)


@pytest.mark.parametrize(("name", "num_moved"), [("gptq", 534), ("autoround", 0)])
def test_masters_of_another_tool_start_on_its_weights(name, num_moved, caplog):
    folder = FILES / name
    theirs = load_file(folder / "model.safetensors")
    model, frozen = load_masters(str(folder)), load_frozen_model(str(folder))
    assert all(p.requires_grad and p.dtype is torch.float32 for p in model.parameters())
    message = (
        f"of 768 groups of weights {num_moved} start with one weight, their largest, changed by one step, and 0 with"
    )
    assert (message in caplog.text) == (num_moved > 0)
    prepare_model(model, get_scheme("w4a16", 32), scale_dtype=torch.bfloat16)
    layers, low_bit = quantized_layers(model), quantized_layers(frozen)
    assert layers.keys() == low_bit.keys() and len(layers) == 7
    num_weights = 0
    for layer in layers:
        assert low_bit[layer].scheme.name == "w4a16"
        for leaf, tensor in low_bit[layer].low_bit_weight().checkpoint_tensors().items():
            # Frozen, as below an adapter, all of it is the file's.
            assert torch.equal(tensor, theirs[f"{layer}.{leaf}"]), (layer, leaf)
        # The weight, as compressed-tensors unpacks it.
        shape, scale = theirs[f"{layer}.weight_shape"].tolist(), theirs[f"{layer}.weight_scale"].double()
        codes = unpack_from_int32(theirs[f"{layer}.weight_packed"], 4, shape).double()
        ours = layers[layer].low_bit_weight()
        assert torch.equal(ours.scale.double().abs(), scale.abs())
        steps = ours.dequantize(torch.float64) / scale.repeat_interleave(32, 1) - codes
        # The weight that changes is the group's largest, and becomes larger.
        assert ((steps == 0) | ((steps.abs() == 1) & (codes.abs() == 7) & (steps.sign() == codes.sign()))).all()
        num_weights += steps.count_nonzero().item()
    assert num_weights == num_moved


@pytest.mark.parametrize("arch", ["qwen2", "qwen3_moe"])
def test_groups_whose_codes_no_masters_give_back_are_counted_and_keep_their_weights(tmp_path, caplog, arch):
    model = make_mixture(arch) if arch == "qwen3_moe" else tiny(arch)
    scheme = get_scheme("w4a16", 32)
    report = prepare_model(model, scheme, scale_dtype=torch.bfloat16)
    folder = export_checkpoint(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj"
    # One group of -1.
    tensors[f"{name}.weight_packed"][3, :4] = 0x77777777
    save_file(tensors, folder / "model.safetensors")
    again, frozen = load_masters(str(folder)), load_frozen_model(str(folder))
    assert "weights 0 start with one weight, their largest, changed by one step, and 1 with" in caplog.text
    kept = quantized_layers(frozen)[name].low_bit_weight().dequantize(torch.float32)
    assert torch.equal(again.get_submodule(name).weight[3, :32], kept[3, :32])
    assert prepare_model(again, scheme, scale_dtype=torch.bfloat16).converted == report.converted
    for layer, ours in quantized_layers(again).items():
        for leaf, weight in ours.quantized_weights.items():
            theirs = quantized_layers(model)[layer].quantized_weights[leaf].low_bit_weight()
            assert torch.equal(weight.low_bit_weight(), theirs) == (layer != name), (layer, leaf)


def test_scales_in_float32_are_named_as_the_reason_why_they_are_not_given_back(tmp_path, caplog):
    shutil.copytree(FILES / "gptq", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(".weight_scale"):
            tensors[name] = tensor.float() * (1 + 1e-3 * torch.rand(tensor.shape))
    save_file(tensors, tmp_path / "model.safetensors")
    load_masters(str(tmp_path))
    assert "scales in float32, which masters reproduce to 0.00014" in caplog.text
    assert "too few codes" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_trainer_does_not_find_in_a_checkpoint_of_a_model_of_pictures_is_loaded(tmp_path, kind):
    """transformers saves Qwen2.5-VL's `model.visual` as `visual`, and its Trainer looks for the former."""
    make_picture_model(kind).save_pretrained(tmp_path / "first")
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "first")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(1.0)
    trained.save_pretrained(tmp_path / "checkpoint")
    resumed = AutoModelForImageTextToText.from_pretrained(tmp_path / "first")
    names = {*load_file(tmp_path / "checkpoint" / "model.safetensors")}
    resumed.load_state_dict(load_file(tmp_path / "checkpoint" / "model.safetensors"), strict=False)
    missing = [n for n, p in resumed.named_parameters() if not torch.equal(p, trained.get_parameter(n))]
    assert bool(missing) == (not {n for n, _ in resumed.named_parameters()} <= names)
    load_renamed(resumed, tmp_path / "checkpoint")
    assert [n for n, p in resumed.named_parameters() if not torch.equal(p, trained.get_parameter(n))] == []
