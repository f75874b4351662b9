"""The layers of a model, found once, the walk over its weights, and the layers that stay in high precision."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForImageTextToText

from testing_utils.layers import LAYERS, tiny
from testing_utils.pictures import make_picture_config
from trl_qarl.checkpoint.layout import quantization_config
from trl_qarl.quantization.inventory import Inventory, reasons_to_skip
from trl_qarl.quantization.names import base_model, base_modules, base_state_dict, is_adapted, layer_of
from trl_qarl.quantization.precisions import set_precision
from trl_qarl.quantization.swap import prepare_model, quantized_layers, restore_model
from trl_qarl.sharding.fsdp2 import keep_class_names


def picture_model(kind):
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(make_picture_config(kind))


@pytest.fixture
def model():
    model = tiny("qwen2")
    prepare_model(model, {"re:.*mlp.*": "w4a16", "_default": "w8a8"}, exclude_modules="o_proj")
    return model


def test_tensors_of_a_layer_are_together_and_in_order(model):
    layers = list(Inventory.of(model).walk())
    names = [{layer_of(name) for name in layer.tensors} for layer in layers]
    assert [name for layer in layers for name in layer.tensors] == list(base_state_dict(model))
    of_layers = [{"model.layers.0"}, {"model.layers.1"}]
    assert names == [{"model.embed_tokens"}, *of_layers, {"model.norm"}, {"lm_head"}]
    first = layers[1]
    quantized = {name.removesuffix(".weight") for name in first.quantized}
    assert set(first.linears) - quantized == {"model.layers.0.self_attn.o_proj"}
    assert layers[-1].linears == {"lm_head": model.lm_head} and not layers[-1].quantized
    weights = {name: layer.quantized_weights["weight"] for name, layer in quantized_layers(model).items()}
    assert dict(Inventory.of(model).weights()) == weights


def test_a_layer_is_the_name_up_to_its_first_number():
    layers = {"0.weight": "0", "model.layers.3.mlp.experts.7.up_proj.weight": "model.layers.3", "weight": "weight"}
    assert {name: layer_of(name) for name in layers} == layers


def test_a_module_that_was_replaced_is_noticed(model):
    first = Inventory.of(model)
    assert Inventory.of(model) is first
    restore_model(model)
    assert not Inventory.of(model).layers and first.layers
    prepare_model(model, {"re:.*down_proj": "w8a16"})
    names = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    assert [*Inventory.of(model).layers] == names
    model.set_submodule(names[0], nn.Identity())
    assert [*Inventory.of(model).layers] == names[1:]


def test_a_copy_of_a_model_has_an_inventory_of_its_own(model):
    theirs = Inventory.of(copy.deepcopy(model))
    assert theirs.layers.keys() == Inventory.of(model).layers.keys()
    assert theirs.model is not model and not set(theirs.layers.values()) & set(Inventory.of(model).layers.values())


def test_schemes_are_read_when_they_are_asked_for(model):
    inventory = Inventory.of(model)
    before = inventory.formats
    set_precision(inventory.layers, {name: layer.scheme for name, layer in inventory.layers.items()}, 3)
    changed = [name for name in before if inventory.formats[name] != before[name]]
    assert changed == [name for name, (scheme, _) in before.items() if scheme.name == "w4a16"]


@pytest.mark.parametrize(("tied", "target_modules"), [(True, "all-linear"), (False, ["o_proj"])])
def test_an_adapted_model_has_the_names_of_the_model_alone(tied, target_modules):
    plain, inner = (tiny("qwen2", tie_word_embeddings=tied) for _ in range(2))
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(inner, peft.LoraConfig(target_modules=target_modules))
    layers, expected = (
        [([*layer.tensors], [*layer.linears]) for layer in Inventory.of(model).walk()] for model in (adapted, plain)
    )
    assert layers == expected
    for model in (adapted, adapted.get_base_model()):
        assert [(name, type(m)) for name, m in base_modules(model)] == [(n, type(m)) for n, m in plain.named_modules()]
        theirs, ours = plain.state_dict(), base_state_dict(model)
        assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert is_adapted(model) and base_model(model) is adapted.get_base_model()
    assert not is_adapted(plain) and base_model(plain) is plain


def test_a_module_that_occurs_twice_is_named_once():
    layer = nn.Linear(2, 2)
    assert [name for name, _ in base_modules(nn.Sequential(layer, layer))] == ["", "0"]


ROUTERS = ["gate", "router", "shared_expert_gate", "gate.wg", "router.proj", "altup.modality_router"]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        *((f"mlp.{name}", (128, 4), "router") for name in ROUTERS),
        ("mixer.in_proj_a", (128, 16), "decays and step sizes of a recurrence"),
        ("mixer.dt_proj", (128, 256), "decays and step sizes of a recurrence"),
        ("shared_transformer.0", (128, 64), "block that several layers share"),
        ("streams", (4, 128), "fewer than 32 inputs"),
        ("empty", (128, 0), "no weights"),
        ("empty", (0, 128), "no weights"),
    ],
)
def test_layers_stay_in_high_precision_by_name_and_size(name, shape, reason):
    model, linears = nn.Module(), {name: nn.Linear(*shape)}
    # Near to them, and quantized.
    others = {"mlp.gate_proj": (128, 128), "mlp.k_proj": (128, 16), "mixer.in_proj": (128, 256)}
    for path, linear in (linears | {path: nn.Linear(*sizes) for path, sizes in others.items()}).items():
        *parents, leaf = path.split(".")
        module = model
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        module.add_module(leaf, linear)
    model.mixer.A_log = nn.Parameter(torch.zeros(16))
    report = prepare_model(model, "w4a16")
    assert report.skipped == {name: reason} and report.converted.keys() == others.keys()


def test_experts_that_a_checkpoint_joins_with_others_are_named():
    """ERNIE 4.5 VL's experts of text are in one list with those of pictures."""
    config = AutoConfig.for_model("ernie4_5_vl_moe", text_config={"num_hidden_layers": 2})
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    reasons = {why for name, why in reasons_to_skip(Inventory.of(model), None).items() if name.endswith("experts")}
    assert reasons == {"Ernie4_5_VLMoeMoeExperts: checkpoints hold the matrices of experts in another form"}


@pytest.mark.parametrize("name", ["model.language_model", "language_model.model"], ids=["transformers", "vllm"])
def test_groups_name_experts_next_to_a_tower_for_both(name):
    """Groups of two sizes, one for the experts' 64 inputs."""
    prepare_model(model := picture_model("qwen3_5_moe"), "w4a16")
    groups = quantization_config(Inventory.of(model))["config_groups"].values()
    matrix = f"{name}.layers.1.mlp.experts.7.down_proj"
    targets = [target.removeprefix("re:") for group in groups for target in group["targets"] if "experts" in target]
    assert [bool(re.fullmatch(target, matrix)) for target in targets].count(True) == 1


def test_head_under_another_name_is_recognised_by_its_tie():
    model = nn.Module()
    model.embed = nn.Embedding(64, 128)
    model.out = nn.Linear(128, 64, bias=False)
    model.out.weight = model.embed.weight
    model.body = nn.Linear(128, 128)
    report = prepare_model(model, "w4a16")
    assert report.skipped == {"out": "shares the embedding's weight"}


def test_exclude_modules_takes_names_and_patterns():
    def excluded(patterns):
        report = prepare_model(tiny(), "w4a16", exclude_modules=patterns)
        return [name for name, why in report.skipped.items() if why == "exclude_modules"]

    assert excluded(["model.layers.0.mlp.down_proj"]) == ["model.layers.0.mlp.down_proj"]
    # A command line and a YAML file cannot tell one name from a list of one.
    assert excluded("o_proj") == excluded(["o_proj"]) == [name for name in LAYERS if name.endswith("o_proj")]
    assert excluded(r"model\.layers\.1\..*") == excluded([r"model\.layers\.1\..*"]) == LAYERS[7:]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        *((p, f"{re.escape(repr(p))} matches none of the 15") for p in ("o_pro", "layers.1", "*o_proj")),
        (r"model\..*", "all skipped"),
    ],
)
def test_patterns_that_fit_nothing_or_everything_are_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        prepare_model(tiny(), "w4a16", exclude_modules=["down_proj", pattern])


# Their decoders have seven linear layers in each layer.
ALIKE = ("idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize("kind", ALIKE)
@pytest.mark.parametrize("scheme", ["w8a16", {"re:.*(mlp|attn).*": "w8a16"}], ids=["one", "pattern"])
def test_the_language_model_alone_is_quantized(kind, scheme):
    """Also where an expression fits layers of its tower."""
    model = picture_model(kind)
    decoder = next(name for name, module in model.named_modules() if module is model.get_decoder())
    report = prepare_model(model, scheme)
    assert len(report.converted) == 14 and all(name.startswith(f"{decoder}.layers.") for name in report.converted)
    around = [name for name, why in report.skipped.items() if why == "outside the language model"]
    others = {name for name, module in model.named_modules() if type(module) is nn.Linear} - {"lm_head"}
    assert {*around} == others and any("vis" in name for name in around)
    assert f"left alone: {len(around)} (outside the language model): " in str(report)
    ignore = quantization_config(Inventory.of(model))["ignore"]
    # Engines may call or fuse layers of a tower otherwise.
    expressions = [each.removeprefix("re:") for each in ignore if each.startswith("re:")]
    assert {*around} < {*ignore} and all(any(re.match(each, name) for each in expressions) for name in around)
    assert not any(re.match(each, name) for each in expressions for name in report.converted)


@pytest.mark.parametrize("kind", ALIKE)
def test_a_pattern_that_fits_a_tower_alone_quantizes_it(kind):
    model = picture_model(kind)
    report = prepare_model(model, {r"re:.*\.(blocks|encoder)\..*": "w8a16", "_default": "w8a8"})
    names = {scheme: [n for n, s in report.schemes.items() if s.name == scheme] for scheme in ("w8a16", "w8a8")}
    assert len(names["w8a8"]) == 14 and names["w8a16"] and all("vis" in name for name in names["w8a16"])
    assert "outside the language model" in report.skipped.values(), "the connector is not fitted"


def test_towers_inside_a_decoder_stay_in_high_precision():
    """Those of Phi-4-multimodal, whose configuration is that of its text."""
    tower = {"hidden_size": 128, "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 4}
    sound = {"num_blocks": 1, "nemo_conv_channels": 64}
    report = prepare_model(tiny("phi4_multimodal", vision_config=tower, audio_config=sound), "w4a16")
    assert len(report.converted) == 8 and all(name.startswith("model.layers.") for name in report.converted)
    whys = {why for name, why in report.skipped.items() if "embed_tokens_extend" in name}
    assert "outside the language model" in whys
    # Llama 4's class of text is its own decoder, whose body is no tower.
    report = prepare_model(tiny("llama4_text", num_local_experts=4, intermediate_size_mlp=256), "w4a16")
    assert "outside the language model" not in report.skipped.values()


def test_an_expression_keeps_decoder_layers_in_high_precision():
    kept = r"re:.*text_model[.]layers[.]0[.].*"
    report = prepare_model(picture_model("idefics3"), "w8a16", exclude_modules=[kept])
    assert len(report.converted) == 7 and all("text_model.layers.1." in name for name in report.converted)


def test_a_layer_in_a_list_is_matched_with_the_name_of_its_list():
    """Its number alone would match decoder layers."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(128, 64)}) for _ in range(2)])
    model.streams = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
    prepare_model(model, "w4a16")
    groups = quantization_config(Inventory.of(model))["config_groups"].values()
    targets = {group["weights"]["group_size"]: group["targets"] for group in groups}
    assert targets == {128: [r"re:.*\.up$"], 64: [r"re:.*\.streams\.0$", r"re:.*\.streams\.1$"]}


def test_a_class_that_fsdp2_derives_keeps_its_checkpoint_names():
    model, sharded = (picture_model("qwen2_5_vl") for _ in range(2))
    cls = type(sharded)
    sharded.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    keep_class_names(sharded)
    names = Inventory(sharded).names
    assert names == Inventory(model).names and "visual.merger.mlp.0.weight" in names.tensors.values()
