"""LoRA inside the low-bit weight: values and gradients of a layer, and the trainer with it."""

import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from testing_utils import logged, product_reference, relative_error, run_export
from testing_utils.layers import logits
from testing_utils.trainings import assert_equal, lora
from testing_utils.trainings import make as make_trainer
from trl_qarl.adapters.base import prepare_base
from trl_qarl.checkpoint.layout import iter_checkpoint_tensors
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.swap import prepare_model, quantized_layers, restore_model
from trl_qarl.quantization.tensors import LowBitTensor


peft = pytest.importorskip("peft")
merged = pytest.importorskip("trl_qarl.adapters.merged")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.adapted, self.plain = nn.Linear(256, 96), nn.Linear(96, 128)

    def forward(self, x):
        return self.plain(self.adapted(x))


def make_model(scheme="w4a16", dtype=torch.float32, keep_masters=False, **kwargs):
    """A `PeftModel` whose adapter is not zero, with the layer `adapted` merged and `plain` frozen."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        **({"r": 4, "lora_alpha": 6, "target_modules": ["adapted"], "init_lora_weights": False} | kwargs)
    )
    model = peft.get_peft_model(Model().to(dtype), config)
    prepare_base(model, get_scheme(scheme), keep_masters=keep_masters, is_merged=True, scale_dtype=torch.float32)
    return model


def parts(model):
    """The merged layer, its base weight, both factors and the scaling."""
    layer = quantized_layers(model)["adapted"]
    wrapper = model.base_model.model.adapted
    a, b = (factor["default"].weight for factor in (wrapper.lora_A, wrapper.lora_B))
    return layer, layer.weight, a, b, wrapper.scaling["default"]


def expected_low_bit(model):
    layer, w, a, b, scaling = parts(model)
    master = (w.float() + (b.float() @ a.float()) * scaling).detach()
    return LowBitTensor.from_hp(master, layer.scheme, layer.scale_dtype)


def is_same(left, right):
    return torch.equal(left.qdata, right.qdata) and torch.equal(left.scale, right.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_base_and_adapter_are_added_before_quantizing(dtype, use_rslora):
    model = make_model(dtype=dtype, use_rslora=use_rslora)
    layer, *_, scaling = parts(model)
    assert scaling == (3.0 if use_rslora else 1.5)
    assert is_same(layer.low_bit_weight(), expected_low_bit(model))
    base = LowBitTensor.from_hp(layer.weight, layer.scheme, layer.scale_dtype)
    assert not is_same(layer.low_bit_weight(), base)


def test_a_layer_may_have_its_own_rank_and_scaling():
    model = make_model(rank_pattern={"adapted": 2}, alpha_pattern={"adapted": 5})
    layer, _, a, _, scaling = parts(model)
    assert len(a) == 2 and scaling == 2.5
    assert is_same(layer.low_bit_weight(), expected_low_bit(model))


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
def test_values_and_gradients_equal_float64(scheme):
    model = make_model(scheme)
    layer, _, a, b, scaling = parts(model)
    x, grad = torch.randn(2, 5, 256, requires_grad=True), torch.randn(2, 5, 96)
    y = model.base_model.model.adapted(x)
    y.backward(grad)
    expected, grad_x, grad_w, _ = product_reference(layer, x.flatten(0, 1), grad.flatten(0, 1))
    a64, b64 = (p.detach().double() for p in (a, b))
    # Float32 sums of 256, 96 and 10 products.
    assert relative_error(y.detach().flatten(0, 1), expected) < 1e-6
    assert relative_error(x.grad.flatten(0, 1), grad_x) < 1e-6
    assert relative_error(a.grad, scaling * b64.t() @ grad_w) < 1e-6
    assert relative_error(b.grad, scaling * grad_w @ a64.t()) < 1e-6
    assert layer.weight.grad is None


def test_the_low_bit_weight_follows_the_adapter(monkeypatch):
    model = make_model()
    layer, _, a, b, _ = parts(model)
    optimizer = torch.optim.AdamW([a, b], lr=0.1, fused=True)
    first = layer.low_bit_weight()
    model(torch.randn(2, 256)).sum().backward()
    assert layer.low_bit_weight() is first
    optimizer.step()
    second = layer.low_bit_weight()
    assert layer.quantized_weights["weight"].num_flipped_codes > 0 and is_same(second, expected_low_bit(model))
    for change in (
        lambda: b.mul_(2),
        lambda: a.copy_(torch.randn_like(a)),
        lambda: model.base_model.model.adapted.set_scale("default", 5),
    ):
        with torch.no_grad():
            change()
        assert not is_same(layer.low_bit_weight(), second)
        second = layer.low_bit_weight()
        assert is_same(second, expected_low_bit(model))


def test_a_disabled_adapter_leaves_the_low_bit_base():
    model, x = make_model(), torch.randn(2, 256)
    layer, *_ = parts(model)
    with_adapter, y = layer.low_bit_weight(), model(x)
    base = LowBitTensor.from_hp(layer.weight, layer.scheme, layer.scale_dtype)
    for _ in range(2):
        with model.disable_adapter():
            assert is_same(layer.low_bit_weight(), base) and not torch.equal(model(x), y)
            without = layer.low_bit_weight()
        assert layer.low_bit_weight() is with_adapter and torch.equal(model(x), y)
    with model.disable_adapter():
        assert layer.low_bit_weight() is without
    # Going back and forth does not flip a code.
    assert layer.quantized_weights["weight"].num_flipped_codes is None


def test_a_pickled_copy_follows_its_own_adapter():
    model, x = make_model(), torch.randn(2, 256)
    low_bit, y = parts(model)[0].low_bit_weight(), model(x)
    loaded = pickle.loads(pickle.dumps(model))
    for either in (model, loaded):
        assert torch.equal(either(x), y)
        either.merge_adapter()
        assert is_same(parts(either)[0].low_bit_weight(), low_bit) and torch.equal(either(x), y)
        either.unmerge_adapter()
        assert torch.equal(either(x), y)
    with torch.no_grad():
        parts(loaded)[3].zero_()
    assert torch.equal(model(x), y) and not torch.equal(loaded(x), y)


def test_a_restored_layer_runs_its_adapter_beside_it_again():
    model, x = make_model(keep_masters=True), torch.randn(2, 256)
    assert type(model.base_model.model.adapted) is peft.tuners.lora.Linear
    _, w, a, b, scaling = parts(model)
    expected = x @ (w + scaling * b @ a).t() + model.base_model.model.adapted.base_layer.bias
    assert restore_model(model) == 2
    torch.testing.assert_close(model.base_model.model.adapted(x), expected)


def test_an_unquantized_learner_runs_base_and_adapter():
    model, x = make_model(keep_masters=True), torch.randn(2, 256)
    layer, w, a, b, scaling = parts(model)
    layer.use_quantized_forward = False
    expected = torch.nn.functional.linear(x, w + (b @ a) * scaling, layer.bias)
    y = model.base_model.model.adapted(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert a.grad.abs().sum() > 0 and is_same(layer.low_bit_weight(), expected_low_bit(model))


def make(model, output_dir, **kwargs):
    adapter = lora(**({"lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]} | kwargs.pop("lora", {})))
    options = {"learning_rate": 1e-2, "lora_mode": "merged"} | kwargs
    return make_trainer(model, output_dir, peft_config=adapter, **options)


def tensors(model, dtype=torch.bfloat16):
    return {name: tensor.clone() for name, tensor in iter_checkpoint_tensors(model, dtype)}


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """A training of six updates that keeps close to where it started, saved."""
    folder = tmp_path_factory.mktemp("run")
    options = {"beta": 0.1, "max_steps": 6, "steps_per_generation": 3, "save_strategy": "steps", "save_steps": 4}
    # Dropout is switched off, and stays in the adapter's file.
    trainer = make(tiny_model, folder, lora={"lora_dropout": 0.05}, **options)
    before = tensors(trainer.model)
    trainer.train()
    trainer.save_model()
    return trainer, before, folder


def test_published_tensors_equal_pefts_merge(run, tiny_model):
    trainer, before, folder = run
    after = tensors(trainer.model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    targets = ("q_proj", "v_proj", "down_proj")
    assert {name.split(".")[-2] for name in changed} == set(targets)
    merged_by_peft = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), folder
    ).merge_and_unload()
    prepare_model(merged_by_peft, "w4a16", scale_dtype=torch.bfloat16)
    assert_equal(tensors(merged_by_peft), after)
    saved = load_file(folder / "adapter_model.safetensors")
    assert len(saved) == 2 * 2 * 3 and all("lora_" in name for name in saved)
    assert not [*folder.glob("model*.safetensors")]
    assert "inside low-bit weights" in (folder / "README.md").read_text()


def test_an_adapter_that_rounds_away_flips_no_code(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, learning_rate=1e-9)
    trainer.train()
    assert logged(trainer, "quant/code_flip_rate") == [0, 0, 0, 0]
    assert any(p.abs().sum() > 0 for name, p in trainer.model.named_parameters() if "lora_B" in name)


def test_reference_policy_is_the_low_bit_base(run, tiny_model):
    trainer, *_ = run
    # The reference was asked for at update 3, after three updates of the adapter.
    # Policy and reference are scored in rows of other tokens, which round differently.
    assert logged(trainer, "kl")[0] < 1e-6 and logged(trainer, "kl")[3] > 1e-6
    plain = make_trainer(tiny_model, "unused")
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(plain.model.eval())
        with trainer.model.disable_adapter():
            assert torch.equal(logits(trainer.model.eval()), expected)
        assert not torch.equal(logits(trainer.model), expected)


def test_exports_hold_the_last_policy_byte_for_byte(run, tmp_path):
    trainer, _, folder = run
    assert run_export(folder, tmp_path / "command") == 0
    assert_equal(load_file(tmp_path / "command" / "model.safetensors"), tensors(trainer.model))
    assert not (tmp_path / "command" / "adapter").exists()


@pytest.mark.parametrize(
    ("options", "config", "match"),
    [
        ({"exclude_modules": ["q_proj"]}, {}, r"2 of 6 adapted layers stay in high precision"),
        ({"disable_dropout": False, "loss_type": "grpo"}, {"lora_dropout": 0.1}, "lora_dropout=0.1"),
    ],
)
def test_what_cannot_work_is_refused(tiny_model, tmp_path, options, config, match):
    with pytest.raises(ValueError, match=match):
        make(tiny_model, tmp_path, lora=config, **options)


def test_a_low_bit_checkpoint_is_no_base_to_merge_into(export, tmp_path):
    with pytest.raises(ValueError, match="lora_mode='merged'"):
        make(export, tmp_path)
