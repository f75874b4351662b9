import re

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from testing_utils.layers import LAYERS, tiny
from testing_utils.pictures import KINDS, make_picture_config
from trl_qarl.checkpoint.layout import quantization_config
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.plan import get_plan
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.swap import prepare_model


@pytest.mark.parametrize("name", ["gate", "router", "shared_expert_gate"])
def test_routers_stay_and_gate_proj_does_not(name):
    model = nn.Module()
    model.mlp = nn.Module()
    setattr(model.mlp, name, nn.Linear(128, 4))
    model.mlp.gate_proj = nn.Linear(128, 128)
    report = prepare_model(model, "w4a16")
    assert list(report.converted) == ["mlp.gate_proj"]
    assert report.skipped == {f"mlp.{name}": "router"}


def test_head_under_another_name_is_recognised_by_its_tie():
    model = nn.Module()
    model.embed = nn.Embedding(64, 128)
    model.out = nn.Linear(128, 64, bias=False)
    model.out.weight = model.embed.weight
    model.body = nn.Linear(128, 128)
    report = prepare_model(model, "w4a16")
    assert report.skipped == {"out": "shares the embedding's weight"}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("shape", [(128, 0), (0, 128)])
def test_layers_without_weights_are_left_alone_with_the_reason(shape):
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(*shape))
    report = prepare_model(model, "w4a16")
    assert list(report.converted) == ["0"] and report.skipped == {"1": "no weights"}
    with pytest.raises(ValueError, match=rf"no weights to quantize: shape \({shape[1]}, {shape[0]}\)"):
        QuantizedLinear.from_linear(nn.Linear(*shape), get_scheme("w4a16"))


def test_exclude_modules_takes_names_last_components_and_a_regular_expression():
    def excluded(patterns):
        report = prepare_model(tiny(), "w4a16", exclude_modules=patterns)
        return [name for name, why in report.skipped.items() if why == "exclude_modules"]

    assert excluded(["o_proj"]) == [name for name in LAYERS if name.endswith("o_proj")]
    assert excluded(["model.layers.0.mlp.down_proj"]) == ["model.layers.0.mlp.down_proj"]
    assert excluded(r"model\.layers\.1\..*") == LAYERS[7:]
    # A command line and a YAML file cannot tell one name from a list of one.
    assert excluded("o_proj") == excluded(["o_proj"])
    assert excluded([r"model\.layers\.1\..*"]) == LAYERS[7:]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        *(
            (["down_proj", p], f"{re.escape(repr(p))} matches none of the 15")
            for p in ("o_pro", "layers.1", "*o_proj")
        ),
        (r"model\..*", "all skipped"),
    ],
)
def test_patterns_that_fit_nothing_or_everything_are_refused(patterns, message):
    with pytest.raises(ValueError, match=message):
        prepare_model(tiny(), "w4a16", exclude_modules=patterns)


def picture_model(kind):
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(make_picture_config(kind))


@pytest.mark.parametrize("kind", KINDS)
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
    assert {*around} < {*quantization_config(Inventory.of(model))["ignore"]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pattern_that_fits_a_tower_alone_quantizes_it(kind):
    model = picture_model(kind)
    report = prepare_model(model, {r"re:.*\.(blocks|encoder)\..*": "w8a16", "_default": "w8a8"})
    names = {scheme: [n for n, s in report.schemes.items() if s.name == scheme] for scheme in ("w8a16", "w8a8")}
    assert len(names["w8a8"]) == 14 and names["w8a16"] and all("vis" in name for name in names["w8a16"])
    assert "outside the language model" in report.skipped.values(), "the connector is not fitted"


def test_decoder_layers_at_the_ends_are_counted_without_the_tower():
    """The tower's stack of layers has the same name."""
    report = prepare_model(picture_model("idefics3"), get_plan("w8a16", high_precision_first=1))
    assert len(report.converted) == 7 and all("text_model.layers.1." in name for name in report.converted)
