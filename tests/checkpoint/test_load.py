import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from testing_utils import make_mixture
from testing_utils.layers import LAYERS, logits, tiny
from testing_utils.pictures import KINDS, KINDS_OF_TEXT, make_picture_config, make_picture_model
from testing_utils.releases import as_gptq, write_release
from testing_utils.trainings import QUANTIZED, assert_equal
from trl_qarl.adapters.base import load_policy
from trl_qarl.checkpoint.export import export_checkpoint
from trl_qarl.checkpoint.layout import quantization_config
from trl_qarl.checkpoint.load import (
    dequantizing,
    is_low_bit_checkpoint,
    keep_masters_precise,
    load_frozen_model,
    load_masters,
    load_renamed,
    skeleton,
)
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.swap import prepare_model, quantized_layers, report_frozen
from trl_qarl.quantization.tensors import LowBitTensor


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
    for path in files:
        zeros = {key: torch.zeros_like(tensor) for key, tensor in load_file(path).items()}
        for name in (f"a-{path.name}", f"z-{path.name}"):
            save_file(zeros, tmp_path / name)
    assert torch.equal(logits(load_frozen_model(str(tmp_path))), logits(model))
    files[-1].unlink()
    with pytest.raises(ValueError, match="lacks 'model-0000" if len(files) > 1 else "neither model.safetensors nor"):
        load_frozen_model(str(tmp_path))


def edited(folder, **described):
    """Change entries of the `quantization_config` of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | described
    (folder / "config.json").write_text(json.dumps(config))


ORDER = "model.layers.0.mlp.up_proj.weight_g_idx"
FIXED = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, group: group["weights"].update(num_bits=3), "with other schemes than"),
        (
            lambda tensors, group: group["weights"].update(symmetric=False),
            "zero points .*Start from the high-precision",
        ),
        (
            lambda tensors, group: group.update(input_activations=FIXED),
            "input_activations in int8 .*with fixed scales",
        ),
        (lambda tensors, group: tensors.pop("model.norm.weight"), "lacks 1 tensors"),
        (lambda tensors, group: tensors.update({ORDER: torch.arange(128)}), f"'{ORDER}'"),
    ],
    ids=["bits", "zero points", "fixed activations", "too few", "too many"],
)
def test_other_checkpoints_are_refused(tmp_path, change, message):
    model, _ = exported(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    groups = quantization_config(Inventory.of(model))["config_groups"]
    change(tensors, groups["group_0"])
    save_file(tensors, tmp_path / "model.safetensors")
    edited(tmp_path, config_groups=groups)
    with pytest.raises(ValueError, match=message):
        load_frozen_model(str(tmp_path))


@pytest.mark.parametrize(("arch", "renamed"), [("mixtral", "block_sparse_moe.gate.weight"), ("qwen3_moe", None)])
def test_missing_tensors_of_a_mixture_are_loaded(tmp_path, arch, renamed):
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
    # Which no index names.
    save_file({name: torch.zeros_like(tensor) for name, tensor in stored.items()}, tmp_path / "z.safetensors")
    load_renamed(model, tmp_path)
    assert all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in model.state_dict().items())
    # The low-bit form is that of what was loaded.
    assert not torch.equal(experts.quantized_weights["down_proj"].low_bit_weight().qdata, before)
    # Experts under names that are not known are not left as they are.
    unknown = {name.replace(".experts.3.", ".experts.x."): tensor for name, tensor in stored.items()}
    save_file(unknown, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="'model.layers.0.mlp.experts.gate_up_proj'"):
        load_renamed(model, tmp_path)


def release_gpt_oss(tmp_path):
    """Write a model as gpt-oss is released; return its tensors, and the experts' in high precision."""
    model = make_mixture("gpt_oss")
    model.save_pretrained(tmp_path)
    tensors, masters = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        rows = tensors.pop(name).mT.contiguous()
        low_bit = LowBitTensor.from_hp(rows.flatten(0, 1), get_scheme("mxfp4a16"), torch.float32)
        stored = low_bit.checkpoint_tensors()
        tensors[f"{name}_blocks"] = stored["weight_packed"].view(*rows.shape[:2], -1, 16)
        tensors[f"{name}_scales"] = stored["weight_scale"].view(*rows.shape[:2], -1)
        masters[name] = low_bit.dequantize(torch.float32).view_as(rows).mT
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    edited(tmp_path, quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    return tensors, masters


def test_a_release_in_mxfp4_is_loaded_in_high_precision(tmp_path):
    _, masters = release_gpt_oss(tmp_path)
    loaded = load_policy(str(tmp_path), None, {"dtype": torch.float32})
    assert all(torch.equal(loaded.get_parameter(name), master) for name, master in masters.items())
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    loaded.save_pretrained(tmp_path / "masters")
    saved = load_file(tmp_path / "masters" / "model.safetensors")
    assert all(torch.equal(saved[name], master) for name, master in masters.items())
    report = prepare_model(loaded, "w4a16")
    assert [*report.num_experts] == [f"model.layers.{index}.mlp.experts" for index in range(2)]
    # What is known of it before it is loaded.
    assert prepare_model(skeleton(AutoConfig.from_pretrained(tmp_path)), "w4a16").num_experts == report.num_experts
    # As on a GPU with kernels for it.
    assert dequantizing(str(tmp_path))["quantization_config"].dequantize


def test_an_export_of_a_release_in_mxfp4_is_one(tmp_path):
    tensors, masters = release_gpt_oss(tmp_path / "release")
    policy = load_policy(str(tmp_path / "release"), None, {"dtype": torch.float32})
    prepare_model(policy, "mxfp4a16")
    export_checkpoint(policy, tmp_path / "export")
    found = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    # Codes have signs of 0.
    assert all(torch.equal(found[name], tensors[name]) for name in tensors if not name.endswith("_blocks"))
    config = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4" and "model.layers.1.mlp.router" in config["modules_to_not_convert"]
    assert "transformers cannot read" not in (tmp_path / "export" / "README.md").read_text()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert all(torch.equal(plain.get_parameter(name), master) for name, master in masters.items())
    ids = torch.arange(16)[None]
    with torch.no_grad():
        logits = [load_frozen_model(tmp_path / each)(ids).logits for each in ("release", "export")]
        assert all(torch.equal(each, policy.eval()(ids).logits) for each in logits)


def test_a_small_update_of_a_release_in_mxfp4_flips_no_code(tmp_path):
    release_gpt_oss(tmp_path)
    policy = load_policy(str(tmp_path), None, {"dtype": torch.float32})
    prepare_model(policy, "mxfp4a16")
    weights = [weight for _, weight in Inventory.of(policy).weights()]
    before = [weight.low_bit_weight() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.parameter.add_(torch.randn(weight.parameter.shape) * 1e-6)
    assert len(weights) == 4
    for weight, former in zip(weights, before, strict=True):
        assert torch.equal(weight.low_bit_weight().scale, former.scale) and weight.num_flipped_codes == 0


def as_blocks(weight, size):
    """The codes of a matrix in FP8, the scales of its blocks, and the matrix that they are."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % size, 0, -rows % size))
    blocks = padded.unflatten(0, (-1, size)).unflatten(-1, (-1, size))
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    whole = [
        each.flatten(2).flatten(0, 1)[:rows, :columns] for each in (codes, codes.float() * scales[:, None, :, None])
    ]
    return whole[0].contiguous(), scales, whole[1]


@pytest.mark.parametrize(("arch", "size"), [("qwen3", 32), ("qwen3_moe", 32), ("qwen3", 48), ("qwen3", 96)])
def test_a_release_in_blocks_of_fp8_is_loaded_in_high_precision(tmp_path, arch, size):
    model = make_mixture(arch) if arch == "qwen3_moe" else tiny(arch)
    model.save_pretrained(tmp_path)
    tensors, masters = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"], masters[name] = as_blocks(tensors[name], size)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    edited(tmp_path, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[size, size])
    loaded = load_policy(str(tmp_path), None, {"dtype": torch.float32})
    models = [loaded]
    if size == 32:
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        keep_masters_precise(theirs)
        models.append(theirs)
    # Masters are not rounded anew, nor those of a model that transformers loaded alone.
    for each in models:
        each.save_pretrained(tmp_path / "masters")
        found = load_file(tmp_path / "masters" / "model.safetensors")
        assert masters and all(torch.equal(found[name], master) for name, master in masters.items())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert prepare_model(skeleton(AutoConfig.from_pretrained(tmp_path)), "w4a16").converted


# Folder of a file of llm-compressor, or a preset of compressed-tensors and its group size, -1 for channels.
RELEASES = {
    "gptq": (None, "w4a16"),
    "autoround": (None, "w4a16"),
    "W4A16": (32, "w4a16"),
    "W8A16": (-1, "w8a16"),
    "W8A8": (None, "w8a8"),
    "FP8_DYNAMIC": (None, "fp8"),
    "MXFP4A16": (None, "mxfp4a16"),
}


def make_release(name, folder):
    """The folder of a release in [`RELEASES`], and its scheme."""
    size, scheme = RELEASES[name]
    if (FILES / name).exists():
        return FILES / name, scheme
    return write_release(tiny("qwen3").bfloat16(), folder / name, name, size), scheme


def assert_are_those_of(theirs, model):
    """Compare codes and scales of a prepared model, with other dtypes of scales, with those of a file."""
    for layer, module in quantized_layers(model).items():
        low_bit = module.low_bit_weight()
        for leaf, tensor in low_bit.checkpoint_tensors().items():
            expected = theirs[f"{layer}.{leaf}"]
            assert torch.equal(tensor.to(expected.dtype).view(torch.uint8), expected.view(torch.uint8)), (layer, leaf)


@pytest.mark.parametrize("name", RELEASES)
def test_masters_of_a_release_start_on_its_codes_and_scales(tmp_path, name):
    folder, scheme = make_release(name, tmp_path)
    theirs, model = load_file(folder / "model.safetensors"), load_masters(str(folder))
    assert all(p.requires_grad and p.dtype is torch.float32 for p in model.parameters())
    report = prepare_model(model, scheme, scale_dtype=torch.bfloat16)
    assert len(report.converted) == sum(name.endswith(".weight_scale") for name in theirs)
    assert_are_those_of(theirs, model)
    # Frozen, as below an adapter, it is the same.
    assert_are_those_of(theirs, load_frozen_model(str(folder)))


@pytest.mark.parametrize("name", ["gptq", "W8A8"])
def test_an_update_changes_codes_of_a_release_where_it_crosses(tmp_path, name):
    folder, scheme = make_release(name, tmp_path)
    model = load_masters(str(folder))
    prepare_model(model, scheme, scale_dtype=torch.bfloat16)
    for module in quantized_layers(model).values():
        before = module.low_bit_weight()
        largest = 8 if scheme == "w4a16" else 128
        step = before.scale_values().repeat_interleave(before.group_size or before.shape[1], 1)
        for share, is_crossed in ((0.49, False), (0.02, True)):
            with torch.no_grad():
                module.weight += share * step
            after = module.low_bit_weight()
            expected = (before.codes() + is_crossed).clamp(max=largest - 1)
            assert torch.equal(after.codes(), expected) and torch.equal(after.scale, before.scale)


def test_fewer_bits_of_a_release_have_multiples_of_its_scales(tmp_path):
    folder, _ = make_release("gptq", tmp_path)
    model, coarse = load_masters(str(folder)), load_masters(str(folder))
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    prepare_model(coarse, "w3a16", scale_dtype=torch.bfloat16)
    for name, layer in quantized_layers(coarse).items():
        fine = quantized_layers(model)[name].low_bit_weight()
        assert torch.equal(layer.low_bit_weight().scale, 2 * fine.scale)
        assert torch.equal(layer.low_bit_weight().codes(), (fine.codes() / 2).round().clamp(-4, 3))


def test_experts_of_a_release_keep_their_scales(tmp_path):
    model = make_mixture("qwen3_moe")
    prepare_model(model, get_scheme("w4a16", 32), scale_dtype=torch.bfloat16)
    folder = export_checkpoint(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[name] = tensors[name] * 1.5
    save_file(tensors, folder / "model.safetensors")
    again = load_masters(str(folder))
    prepare_model(again, "w4a16", scale_dtype=torch.bfloat16)
    for (name, ours), (_, theirs) in zip(Inventory.of(again).weights(), Inventory.of(model).weights(), strict=True):
        ours, theirs = ours.low_bit_weight(), theirs.low_bit_weight()
        assert torch.equal(ours.qdata, theirs.qdata) and torch.equal(ours.scale, theirs.scale * 1.5), name


@pytest.mark.parametrize(("name", "bits"), [("W4A16", 4), ("W8A16", 8)])
def test_files_of_gptqmodel_are_read(tmp_path, name, bits):
    release, scheme = make_release(name, tmp_path)
    folder = as_gptq(release, tmp_path / "gptqmodel", bits, RELEASES[name][0])
    assert is_low_bit_checkpoint(str(folder))
    model = load_masters(str(folder))
    prepare_model(model, scheme, scale_dtype=torch.float32)
    assert_are_those_of(load_file(release / "model.safetensors"), model)


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("qzeros", 0x66666666, "zero points off the middle"),
        ("g_idx", 1, "orders the columns anew"),
        ("scales", 1.0 + 2**-10, "torch.float16, which torch.bfloat16 does not hold"),
    ],
)
def test_unsupported_files_of_gptqmodel_are_refused(tmp_path, leaf, value, message):
    folder = as_gptq(make_release("W4A16", tmp_path)[0], tmp_path / "gptqmodel")
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{leaf}"
    tensors[name] = torch.full_like(tensors[name], value, dtype=torch.float16 if leaf == "scales" else None)
    save_file(tensors, folder / "model.safetensors")
    model = None
    with pytest.raises(ValueError, match=message):
        prepare_model(model := load_masters(str(folder)), "w4a16", scale_dtype=torch.bfloat16)
    assert model is None or not quantized_layers(model)


def test_low_bit_keys_and_values_of_a_release_are_mentioned(tmp_path, caplog):
    release = write_release(tiny("qwen3").bfloat16(), tmp_path)
    expected = load_masters(str(release))
    edited(release, kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False})
    tensors = load_file(release / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{leaf}_scale": torch.ones(1) for leaf in "kv"}
    save_file(tensors, release / "model.safetensors", {"format": "pt"})
    assert_equal(load_masters(str(release)).state_dict(), expected.state_dict())
    assert caplog.text.count("kv_cache_scheme") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore": ["lm_head", "re:.*q_proj"]}, "q_proj is bf16, .*k_proj is w4a16"),
        ({"ignore": []}, "holds 'lm_head' in low bits, which is never quantized here \\(output head\\)"),
        (
            {"preset": "W8A8", "group_size": None},
            "as 'int8', and scheme 'w4a16' is 'int4-packed'. Use one of \\['w8a8'\\]",
        ),
        ({"preset": "W8A16"}, "it has weights in int8 per group of 128. Start from the high-precision"),
    ],
    ids=["parts", "head", "scheme", "groups"],
)
def test_releases_that_no_plan_reproduces_are_refused(tmp_path, options, message):
    folder = write_release(tiny("qwen3").bfloat16(), tmp_path, **{"group_size": None} | options)
    with pytest.raises(ValueError, match=message):
        prepare_model(load_masters(str(folder)), "w4a16", scale_dtype=torch.bfloat16)


def test_the_language_model_of_a_release_with_a_tower_is_trained(tmp_path):
    """Gemma 4 in INT4: a class with a tower, buffers among the weights, and a tied head in the file."""
    model = make_picture_model("gemma4").bfloat16()
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.5)
    folder = write_release(model, tmp_path, group_size=32, ignore=["lm_head", "re:.*vision.*", "re:.*per_layer.*"])
    theirs = load_file(folder / "model.safetensors")
    theirs["lm_head.weight"] = theirs["model.language_model.embed_tokens.weight"].clone()
    save_file(theirs, folder / "model.safetensors")
    again = load_masters(str(folder))
    report = prepare_model(again, "w4a16", scale_dtype=torch.bfloat16)
    assert_are_those_of(theirs, again)
    assert len(report.converted) == 14 and all(".language_model." in name for name in report.converted)
    assert {float(layer.layer_scalar) for layer in again.model.language_model.layers} == {0.5}
    assert again.lm_head.weight is again.model.language_model.embed_tokens.weight


def test_a_release_under_names_of_earlier_transformers_is_read(tmp_path):
    """transformers writes Gemma 3's `model.language_model` as `language_model.model`."""
    model = make_picture_model("gemma3").bfloat16()
    folder = write_release(model, tmp_path, group_size=32, ignore=["lm_head", "re:.*vision.*", "re:.*projector.*"])
    theirs = load_file(folder / "model.safetensors")
    again = load_masters(str(folder))
    prepare_model(again, "w4a16", scale_dtype=torch.bfloat16)
    stored = {"model." + name.replace(".model.", ".", 1): tensor for name, tensor in theirs.items()}
    assert "language_model.model.layers.0.mlp.up_proj.weight_packed" in theirs
    assert_are_those_of(stored, again)


def test_layers_in_high_precision_in_a_release_stay_so(tmp_path):
    folder = write_release(tiny("qwen3").bfloat16(), tmp_path, ignore=["lm_head", "re:.*layers.0.*"])
    report = prepare_model(load_masters(str(folder)), "w4a16", scale_dtype=torch.bfloat16)
    assert {name for name, why in report.skipped.items() if why == "not quantized in the checkpoint"} == {*LAYERS[:7]}
    assert report.plan.group_size == 128 and {*report.converted} == {*LAYERS[7:]}


@pytest.mark.parametrize("kind", KINDS + KINDS_OF_TEXT)
def test_the_class_with_the_tower_is_judged(kind):
    """As TRL loads it. For Qwen3.5 transformers' class of text has the same configuration."""
    assert any("vis" in name for name, _ in skeleton(make_picture_config(kind)).named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_missing_tensors_of_a_picture_model_are_loaded(tmp_path, kind):
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
