import itertools
import json
import math
import re
import resource
import shutil

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors import safe_open
from transformers import AutoModelForCausalLM, FalconConfig

from testing_utils import MIXTURES, make_mixture, make_tiny_tokenizer, refused
from testing_utils.layers import assert_close, tiny
from testing_utils.pictures import make_picture_model
from testing_utils.trainings import QUANTIZED, RECORD, assert_equal
from trl_qarl.checkpoint.export import export_checkpoint
from trl_qarl.checkpoint.load import load_frozen_model
from trl_qarl.cli import main
from trl_qarl.quantization.swap import prepare_model, quantized_layers, restore_model


ARCHS = ["llama", "qwen2", "qwen3", "gemma"]


def tensors_of(folder):
    tensors = {}
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


@pytest.mark.parametrize(
    ("arch", "name"), [*((arch, "w8a8") for arch in ARCHS), *zip(itertools.cycle(ARCHS), QUANTIZED, strict=False)]
)
def test_exported_tensors_equal_the_learners(tmp_path, arch, name):
    model = tiny(arch)
    prepare_model(model, name, scale_dtype=torch.bfloat16)
    tensors = tensors_of(export_checkpoint(model, tmp_path / "export", make_tiny_tokenizer()))
    config = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**group["weights"]),
        input_activations=group["input_activations"] and QuantizationArgs(**group["input_activations"]),
    )
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    for fqn, layer in quantized_layers(model).items():
        local = {key: tensors.pop(f"{fqn}.{key}") for key in layer.low_bit_weight().checkpoint_tensors()}
        for key, value in layer.low_bit_weight().checkpoint_tensors().items():
            assert local[key].dtype is value.dtype
            assert torch.equal(local[key].view(torch.uint8), value.view(torch.uint8)), (fqn, key)
        weight = compressor.decompress(local, scheme)["weight"]
        assert torch.equal(weight, layer.low_bit_weight().dequantize(weight.dtype))
    masters = model.state_dict()
    assert all(torch.equal(value, masters[key].bfloat16()) for key, value in tensors.items())
    assert ("lm_head.weight" in tensors) == (not model.config.tie_word_embeddings)


# Of a quantized layer, whose scale says so, and of one in high precision.
@pytest.mark.parametrize("layer", ["model.layers.1.mlp.down_proj", "model.norm"])
@pytest.mark.parametrize(
    # Of NVFP4 an infinite weight is refused as one that has outgrown its global scale.
    ("name", "value"),
    [*itertools.product(["w4a16", "w8a8", "fp8", "mxfp4a16"], [math.nan, math.inf]), ("nvfp4a16", math.nan)],
)
def test_a_master_that_is_not_finite_is_named_and_not_exported(tmp_path, name, layer, value):
    model = tiny()
    prepare_model(model, name, scale_dtype=torch.bfloat16)
    weight = model.get_submodule(layer).weight
    with torch.no_grad():
        weight.view(len(weight), -1)[5, -1] = value
    with pytest.raises(ValueError, match=rf"^{layer}\.weight(_scale)?: row 5 is not finite"):
        export_checkpoint(model, tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("ties", [True, False])
def test_an_export_says_whether_weights_are_tied_as_they_are(tmp_path, ties):
    """A user may have tied or untied what a configuration says."""
    model = tiny("qwen2", tie_word_embeddings=not ties)
    weight = model.get_input_embeddings().weight
    model.lm_head.weight = weight if ties else torch.nn.Parameter(2 * weight.detach())
    prepare_model(model, "w4a16")
    export_checkpoint(model, tmp_path, dtype=torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is ties
    assert_close(model, load_frozen_model(tmp_path))


def test_mixed_group_sizes_are_described_per_layer_and_load(tmp_path):
    model = tiny(hidden_size=192)
    prepare_model(model, "w4a16", exclude_modules=["model.layers.1.mlp.down_proj"])
    folder = export_checkpoint(model, tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    sizes = {group["weights"]["group_size"]: group["targets"] for group in config["config_groups"].values()}
    assert sizes[128] == ["re:.*\\.down_proj$", "re:.*\\.o_proj$"] and "re:.*\\.q_proj$" in sizes[64]
    assert config["ignore"] == ["model.layers.1.mlp.down_proj", "lm_head"]
    assert_close(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), model)


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral"])
def test_high_precision_experts_beside_low_bit_are_refused(tmp_path, arch):
    model = make_mixture(arch)
    prepare_model(model, "w4a16", exclude_modules="experts")
    with pytest.raises(ValueError, match="`save_model`"):
        export_checkpoint(model, tmp_path / "export")
    assert not (tmp_path / "export").exists()
    model = make_mixture(arch)
    prepare_model(model, "bf16")
    exported = tensors_of(export_checkpoint(model, tmp_path / "export"))
    model.save_pretrained(tmp_path / "original")
    assert_equal(exported, tensors_of(tmp_path / "original"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gemma3", "vision_tower.vision_model.embeddings.patch_embedding.weight"),
        ("gemma4", "model.language_model.layers.0.layer_scalar"),
        ("mistral3", "language_model.model.layers.0.input_layernorm.weight"),
        ("qwen2_5_vl", "model.layers.0.input_layernorm.weight"),
        ("qwen3_5", "model.language_model.layers.0.linear_attn.A_log"),
    ],
)
def test_a_model_with_a_tower_has_the_names_of_its_release(tmp_path, kind, name):
    """vLLM knows no others of Gemma 3's tower, and transformers describes layers by its own."""
    model = make_picture_model(kind).eval()
    prepare_model(model, "w4a16")
    folder = export_checkpoint(model, tmp_path / "export")
    assert name in tensors_of(folder)
    assert_close(type(model).from_pretrained(folder, dtype=torch.float32), model)
    assert_close(load_frozen_model(str(folder)), model)


UNREAD = "transformers cannot read this layout"


def experts_of(model):
    return {name: module for name, module in model.named_modules() if name.endswith(".experts")}


def assert_same_experts(loaded, model):
    for path, experts in experts_of(model).items():
        for leaf, weight in experts.quantized_weights.items():
            ours = loaded.get_submodule(path).quantized_weights[leaf].low_bit_weight()
            assert torch.equal(ours, weight.low_bit_weight().to(torch.bfloat16))


# Names do not depend on the scheme.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "name"),
    [*((arch, "w4a16") for arch in MIXTURES), ("qwen3_moe", "w8a8"), ("mixtral", "w8a16"), ("mixtral", "fp8")],
)
def test_exports_of_mixtures_load_the_learners_weights(tmp_path, arch, name):
    model = make_mixture(arch)
    prepare_model(model, name, scale_dtype=torch.bfloat16)
    folder = export_checkpoint(model, tmp_path / "export")
    leaves = {"mixtral": ("w1", "w3", "w2"), "gpt_oss": ("w13_", "w2_")}.get(
        arch, ("gate_proj", "up_proj", "down_proj")
    )
    block = "block_sparse_moe" if arch == "mixtral" else "mlp"
    matrices = {f"model.layers.1.{block}.experts.{e}.{leaf}" for e in range(8) for leaf in leaves}
    found = tensors_of(folder)
    scales = {t.removesuffix("weight_scale").removesuffix(".") for t in found if t.endswith("weight_scale")}
    assert {matrix for matrix in scales if matrix.startswith("model.layers.1.") and ".experts." in matrix} == matrices
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    router = f"model.layers.1.{block}.{'router' if arch == 'gpt_oss' else 'gate'}"
    assert router in ignored and f"{router}.weight" in found

    assert_same_experts(load_frozen_model(folder, torch.bfloat16), model)
    is_unread = name == "w8a8" or arch == "gpt_oss"
    assert (UNREAD in (folder / "README.md").read_text()) == is_unread
    if is_unread:
        if arch != "gpt_oss":
            with pytest.raises(RuntimeError):
                AutoModelForCausalLM.from_pretrained(folder)
        return
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for path, experts in experts_of(loaded).items():
        for leaf, weight in experts_of(model)[path].quantized_weights.items():
            dense = weight.low_bit_weight().dequantize(torch.bfloat16)
            assert torch.equal(getattr(experts, leaf).flatten(0, 1), dense), (path, leaf)
    assert torch.equal(loaded.model.layers[1].mlp.gate.weight, model.model.layers[1].mlp.gate.weight.bfloat16())


def test_stacked_experts_are_exported_one_by_one_in_low_bits(tmp_path):
    model = tiny("granitemoe", num_local_experts=8, num_experts_per_tok=2)
    assert prepare_model(model, "bf16").num_experts == {}
    dense = tensors_of(export_checkpoint(model, tmp_path / "dense", dtype=torch.float32))
    model.save_pretrained(tmp_path / "original")
    assert_equal(dense, tensors_of(tmp_path / "original"))
    assert "model.layers.1.block_sparse_moe.input_linear.weight" in dense
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    folder = export_checkpoint(model, tmp_path / "export")
    prefix = "model.layers.1.block_sparse_moe.experts.7"
    wanted = {f"{prefix}.{leaf}.weight_packed" for leaf in ("gate_proj", "up_proj", "down_proj")}
    assert {name for name in tensors_of(folder) if name.startswith(prefix) and "packed" in name} == wanted
    assert UNREAD in (folder / "README.md").read_text()
    assert_same_experts(load_frozen_model(str(folder), "auto"), model)


@pytest.mark.parametrize(
    ("arch", "leaf", "fields"),
    [
        ("glm4_moe", "e_score_correction_bias", {"n_routed_experts": 8, "first_k_dense_replace": 1}),
        ("lfm2_moe", "expert_bias", {"num_experts": 8, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_biases_of_routers_keep_their_bits_in_an_export(tmp_path, arch, leaf, fields):
    model = tiny(arch, num_experts_per_tok=2, moe_intermediate_size=64, **fields)
    biases = {name: tensor.uniform_() for name, tensor in model.state_dict().items() if name.endswith(leaf)}
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)
    tensors = tensors_of(export_checkpoint(model, tmp_path / "export"))
    assert biases
    assert_equal({name: tensors[name] for name in biases}, biases)


MAMBA = {"state_size": 16, "num_heads": 8, "head_dim": 32, "n_groups": 1, "chunk_size": 16}


@pytest.mark.parametrize(("arch", "fields", "kept"), [("mamba2", MAMBA, "out_proj"), ("nanochat", {}, "o_proj")])
def test_an_export_has_the_weights_that_transformers_reads(tmp_path, arch, fields, kept):
    """While it loads them, transformers initializes these layers by their `weight`, which packed ones do not have."""
    model = tiny(arch, **fields)
    report = prepare_model(model, "w4a16")
    assert {name.rpartition(".")[2] for name in report.skipped} == {kept, "lm_head"}
    loaded = AutoModelForCausalLM.from_pretrained(export_checkpoint(model, tmp_path / "export"))
    assert_close(loaded, model)


@pytest.mark.parametrize(("name", "is_read"), [("w4a16", False), ("w8a8", True)])
def test_a_card_of_falcon_says_whether_transformers_reads_it(tmp_path, name, is_read):
    sizes = {"vocab_size": 260, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(FalconConfig(**sizes))
    prepare_model(model, name)
    folder = export_checkpoint(model, tmp_path / "export")
    assert (UNREAD in (folder / "README.md").read_text()) != is_read
    if is_read:
        AutoModelForCausalLM.from_pretrained(folder)
        return
    with pytest.raises(AttributeError, match="weight"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_experts_of_a_plan_have_their_own_group(tmp_path):
    model = make_mixture("qwen2_moe")
    plan = {"re:.*experts": "w4a16", "re:.*(shared_expert|attn).*": "w8a16"}
    prepare_model(model, plan, scale_dtype=torch.bfloat16)
    folder = export_checkpoint(model, tmp_path / "export", dtype=torch.float32)
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    targets = {group["weights"]["num_bits"]: group["targets"] for group in groups}
    assert targets[4] == [rf"re:model\.layers\.{index}\.mlp\.experts\.[0-9]+\..*" for index in (0, 1)]
    # What experts have too is not an expression.
    assert "model.layers.0.mlp.shared_expert.down_proj" in targets[8] and "re:.*\\.q_proj$" in targets[8]
    loaded, ours = AutoModelForCausalLM.from_pretrained(folder), load_frozen_model(folder)
    for path, experts in experts_of(loaded).items():
        weight = experts_of(model)[path].quantized_weights["down_proj"].low_bit_weight()
        assert torch.equal(experts.down_proj.flatten(0, 1), weight.dequantize(torch.bfloat16))
    assert_close(ours, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["w4a16", "nvfp4a16", "bf16"])
def test_exports_are_overwritten_and_masters_are_not(tmp_path, name):
    model = tiny()
    model.save_pretrained(tmp_path / "masters")
    prepare_model(model, name)
    with pytest.raises(ValueError, match="holds other weights"):
        export_checkpoint(model, tmp_path / "masters")
    export_checkpoint(model, tmp_path / "export", max_shard_size="100KB")
    folder = export_checkpoint(model, tmp_path / "export")
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
    AutoModelForCausalLM.from_pretrained(folder)
    restore_model(model)
    model.save_pretrained(folder)
    prepare_model(model, name)
    with pytest.raises(ValueError, match="holds other weights"):
        export_checkpoint(model, folder)


def test_an_export_that_fails_to_write_keeps_the_earlier_one(masters, tmp_path, capsys):
    argv = ["export", "--model_name_or_path", str(masters), "--scheme", "w8a8", "--output_dir", str(tmp_path)]
    assert main(argv) == 0
    earlier = {path: path.read_bytes() for path in tmp_path.iterdir()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        error = refused(capsys, *argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert re.search(f"trl-qarl: error: .*could not be written: .*os error 27.*'{tmp_path}'$", error.strip())
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == earlier


@pytest.mark.parametrize(
    ("name", "num_bytes", "said"),
    [
        *(("model.safetensors", size, "A weight file of .* is damaged or cut off") for size in (0, 5, 50, -1)),
        ("qarl.json", 9, ".*qarl.json cannot be read"),
    ],
)
def test_a_cut_off_file_is_one_line_and_exit_code_2(masters, tmp_path, capsys, name, num_bytes, said):
    folder = shutil.copytree(masters, tmp_path / "masters")
    (folder / "qarl.json").write_text(json.dumps(RECORD))
    (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes])
    error = refused(capsys, "export", "--model_name_or_path", str(folder), "--output_dir", str(tmp_path / "out"))
    lines = error.replace("\r", "\n").splitlines()
    (line,) = [line for line in lines if line and "it/s" not in line and "Loading weights" not in line]
    assert re.match(f"trl-qarl: error: {said}", line) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["out", object()], ids=["a folder", "a trainer"])
def test_what_is_no_model_is_refused_with_the_command_to_use(tmp_path, what):
    with pytest.raises(TypeError, match=r"got (str|object)\. .*`trainer.export_model\(\)`.*`trl-qarl export"):
        export_checkpoint(what, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arch", "fields", "says"),
    [("phimoe", {"num_local_experts": 4}, "the bias of the output head"), ("llama", {}, "")],
)
def test_an_export_warns_of_what_plain_vllm_leaves_out(tmp_path, caplog, arch, fields, says):
    model = tiny(arch, **fields)
    prepare_model(model, "w4a16")
    export_checkpoint(model, tmp_path / "export")
    assert says in caplog.text and ("class leaves out" in caplog.text) == bool(says)
