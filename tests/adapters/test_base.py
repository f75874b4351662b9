import json
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForImageTextToText

from testing_utils import layers, product_reference, relative_error, trainings
from testing_utils.pictures import make_picture_config
from testing_utils.trainings import QUANTIZED, RECORD
from trl_qarl.adapters.base import base_fingerprint, load_adapter, prepare_base
from trl_qarl.checkpoint.export import export_checkpoint
from trl_qarl.checkpoint.load import load_frozen_model
from trl_qarl.checkpoint.record import check_record
from trl_qarl.quantization.linear import QuantizedLinear
from trl_qarl.quantization.plan import get_plan
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.swap import prepare_model, quantized_layers


peft = pytest.importorskip("peft")


def tiny(seed=0, **lora):
    return peft.get_peft_model(layers.tiny("qwen2", seed), trainings.lora(init_lora_weights=False, **lora))


def prepare(model, scheme="w4a16", keep_masters=False, exclude_modules=None, scale_dtype=torch.float32):
    return prepare_base(
        model, scheme, keep_masters=keep_masters, exclude_modules=exclude_modules, scale_dtype=scale_dtype
    )


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_a_layer_equals_a_naive_reference(scheme, use_rslora):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(256, 64))
    config = peft.LoraConfig(target_modules=["0"], r=4, lora_alpha=6, use_rslora=use_rslora, init_lora_weights=False)
    layer = peft.get_peft_model(network, config).base_model.model[0]
    layer.base_layer = QuantizedLinear.from_linear(layer.base_layer, get_scheme(scheme))
    layer.base_layer.freeze()
    x, grad = torch.randn(3, 256, requires_grad=True), torch.randn(3, 64)
    y = layer(x)
    y.backward(grad)

    value, grad_x, _, _ = product_reference(layer.base_layer, x, grad)
    a, b = (p["default"].weight.detach().double() for p in (layer.lora_A, layer.lora_B))
    scaling, seen, upstream = 6 / (2 if use_rslora else 4), x.detach().double(), grad.double()
    # Sums of 256 products in float32; the base's own tolerance is that of tests/quantization/test_linear.py.
    assert relative_error(y, value + scaling * (seen @ a.t()) @ b.t()) < 1e-5
    assert relative_error(x.grad, grad_x + scaling * upstream @ b @ a) < 1e-5
    assert relative_error(layer.lora_A["default"].weight.grad, scaling * (upstream @ b).t() @ seen) < 1e-5
    assert relative_error(layer.lora_B["default"].weight.grad, scaling * upstream.t() @ (seen @ a.t())) < 1e-5
    assert layer.base_layer.weight.grad is None and layer.base_layer.bias.grad is None


def test_fingerprints_differ_by_base_and_scheme_not_adapter():
    prints = {}
    for name, seed, scheme, lora in (
        ("same", 0, "w4a16", {}),
        ("other adapter", 0, "w4a16", {"target_modules": ["q_proj"], "r": 2}),
        ("other base", 1, "w4a16", {}),
        ("other scheme", 0, "w8a16", {}),
        ("baseline", 0, "bf16", {}),
        ("other baseline", 1, "bf16", {}),
    ):
        model = tiny(seed, **lora)
        prepare(model, scheme)
        prints[name] = base_fingerprint(model)
    assert prints["same"] == prints.pop("other adapter")
    assert len(set(prints.values())) == len(prints)


def test_bases_with_equal_scales_have_other_fingerprints():
    prints, scales = set(), []
    for times in (1.0, 2.0):
        model = tiny()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("proj.base_layer.weight"):
                    p.mul_(times)
        prepare(model, "nvfp4a16")
        prints.add(base_fingerprint(model))
        scales.append([layer.low_bit_weight().scale for layer in quantized_layers(model).values()])
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(*scales, strict=True))
    assert len(prints) == 2


PLAN = {"re:.*mlp.*": {"scheme": "w4a16", "group_size": 32}, "re:.*self_attn.*": "w8a8"}


def low_bit_base(folder, scheme, model=None):
    """A model whose layers come from a low-bit checkpoint."""
    model = layers.tiny("qwen2") if model is None else model
    prepare_model(model, scheme)
    return load_frozen_model(str(export_checkpoint(model, folder, dtype=torch.float32)))


def test_a_base_of_several_schemes_needs_its_plan(tmp_path):
    first = {"re:.*layers[.]0[.].*": None}
    base = low_bit_base(tmp_path / "mixed", first | PLAN)
    report = prepare(base, first | PLAN)
    assert report.plan == get_plan(first | PLAN) and len(report.converted) == 7
    assert "3 w4a16 group 32" in str(report) and "4 w8a8 per output channel" in str(report)
    for other in (
        get_plan(PLAN),
        get_plan("w8a8"),
        get_plan("bf16"),
        get_plan(first | PLAN | {"re:.*mlp.*": "w4a16"}),
        get_plan(first | PLAN | {"re:.*mlp.*": {"scheme": "w3a16", "group_size": 32}}),
        get_plan(first | PLAN | {"re:.*self_attn.*": None}),
    ):
        with pytest.raises(ValueError, match="'w8a8'"):
            prepare(base, other)


def test_a_low_bit_picture_base_is_taken_by_its_plan(tmp_path):
    model = AutoModelForImageTextToText.from_config(make_picture_config("qwen2_vl"))
    base = low_bit_base(tmp_path, PLAN, model)
    # The patterns match layers of the vision tower too, which stay in high precision.
    report = prepare(base, PLAN)
    assert len(report.converted) == 14 and any("visual" in name for name in report.skipped)


def test_a_base_with_a_quantized_output_head_is_refused(tmp_path):
    model = layers.tiny("qwen2")
    prepare_model(model, "w8a8")
    # As llm-compressor quantizes without `ignore`.
    model.lm_head = QuantizedLinear.from_linear(model.lm_head, get_scheme("w8a8"), torch.float32)
    base = load_frozen_model(str(export_checkpoint(model, tmp_path, dtype=torch.float32)))
    assert isinstance(base.lm_head, QuantizedLinear)
    with pytest.raises(ValueError, match=r"quantized output head \('lm_head'\).*ignore=\['lm_head'\]"):
        prepare(base, "w8a8")


OTHER = {"base": "f" * 16, "scheme": "w8a16", "group_size": 64, "scale_dtype": "float32"}


@pytest.mark.parametrize(("name", "value"), OTHER.items())
def test_an_adapter_of_another_base_is_refused(tmp_path, caplog, name, value):
    record = RECORD | {"base": "0" * 16}
    check_record(tmp_path, record)
    assert "its adapter may not fit this base and scheme" in caplog.text
    caplog.clear()
    (tmp_path / "qarl.json").write_text(json.dumps(record))
    check_record(tmp_path, record)
    assert not caplog.text
    with pytest.raises(ValueError, match=rf"\({name}={record.get(name)!r} there, {value!r} here\)"):
        check_record(tmp_path, record | {name: value})


@pytest.mark.parametrize(
    ("saved", "given", "loaded"),
    [("v1", "main", "v1"), ("v1", None, "v1"), ("v1", "v2", "v2"), (None, "main", "main")],
)
def test_the_base_of_an_adapter_is_of_the_revision_that_it_names(tmp_path, monkeypatch, saved, given, loaded):
    model = tiny()
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.revision = "someone/base", saved
    model.save_pretrained(tmp_path)
    load_base = Mock(return_value=layers.tiny("qwen2"))
    monkeypatch.setattr("trl_qarl.adapters.base.load_base", load_base)
    load_adapter(tmp_path, {"revision": given, "dtype": "auto"}, is_trainable=False)
    load_base.assert_called_once_with("someone/base", {"revision": loaded, "dtype": "auto"})


def test_merging_into_codes_is_refused_with_what_to_do():
    model = tiny()
    prepare(model)
    with pytest.raises(RuntimeError, match="merge it into the high-precision base"):
        model.merge_and_unload()
