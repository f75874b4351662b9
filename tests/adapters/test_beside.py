"""LoRA over a frozen low-bit base in the trainer: what moves, what stays, what is saved, resumed and exported."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from testing_utils import ADAPTED_PLAN, TRAINING, make_problems, make_tiny_model, run_export, spread
from testing_utils.layers import TOKENS
from testing_utils.trainings import EXPERTS, assert_equal, lora, make, train_stock
from trl_qarl import QaRLConfig, QaRLTrainer
from trl_qarl.adapters.tensors import adapter_config, adapter_tensors
from trl_qarl.checkpoint.export import export_checkpoint
from trl_qarl.checkpoint.layout import iter_checkpoint_tensors
from trl_qarl.checkpoint.load import load_frozen_model
from trl_qarl.quantization.swap import prepare_model, quantized_layers


peft = pytest.importorskip("peft")


def base_of(model):
    return {name: tensor.clone() for name, tensor in iter_checkpoint_tensors(model, torch.float32)}


def logits(model):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model.eval()(TOKENS).logits


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("base"), "qwen3")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """A training of four updates with o_proj in high precision, saved after two, and what it started from."""
    options = {"exclude_modules": ["o_proj"], "beta": 0.1, "save_strategy": "steps", "save_steps": 2}
    folder = tmp_path_factory.mktemp("run")
    trainer = make(base, folder, peft_config=lora(), **options)
    before = base_of(trainer.model)
    trainer.train()
    trainer.save_model()
    return trainer, before, options


def test_a_saved_adapter_is_the_policy_on_either_base(run, base, tmp_path):
    trainer, *_ = run
    folder = trainer.args.output_dir
    assert_equal(load_file(f"{folder}/adapter_model.safetensors"), adapter_tensors(trainer.model))
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    assert sorted(config.pop("target_modules")) == adapter_config(trainer.model)["target_modules"]
    assert config.items() <= adapter_config(trainer.model).items()
    export_checkpoint(trainer.model, tmp_path, trainer.processing_class, torch.float32)
    exported = peft.PeftModel.from_pretrained(load_frozen_model(str(tmp_path)), tmp_path / "adapter")
    assert torch.equal(logits(exported), logits(trainer.model))
    exported.set_adapter("default")
    with exported.disable_adapter():
        assert not torch.equal(logits(exported), logits(trainer.model))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, folder)
    assert_equal(adapter_tensors(loaded), adapter_tensors(trainer.model))
    # The policy that was trained, once its base is quantized.
    prepare_model(loaded, "w4a16", exclude_modules=["o_proj"], scale_dtype=torch.bfloat16)
    assert torch.equal(logits(loaded), logits(trainer.model))


def test_another_base_or_scheme_is_not_resumed(run, base, tmp_path):
    trainer, _, options = run
    checkpoint = f"{trainer.args.output_dir}/checkpoint-2"
    other = make_tiny_model(tmp_path, "qwen3", seed=1)
    for model, kwargs in ((other, options), (base, options | {"scheme": "w8a16"})):
        with pytest.raises(ValueError, match="base='"):
            make(model, tmp_path, peft_config=lora(), **kwargs).train(resume_from_checkpoint=checkpoint)


def test_a_loaded_adapter_trains_on_and_is_its_reference(run, tmp_path, caplog):
    trainer, _, options = run
    folder, given = trainer.args.output_dir, {"attn_implementation": "eager"}
    further = make(folder, tmp_path, model_init_kwargs=given, **(options | {"max_steps": 1}))
    assert further.policy.record() == trainer.policy.record() and "will be ignored" not in caplog.text
    assert further.model.get_base_model().config._attn_implementation == "eager"
    assert_equal(adapter_tensors(further.model), load_file(f"{folder}/adapter_model.safetensors"))
    further.train()
    (row,) = [row for row in further.state.log_history if "loss" in row]
    # Policy and reference are scored in rows of other tokens, which round differently.
    assert row["kl"] < 1e-6 and row["grad_norm"] > 0
    ours, theirs = adapter_tensors(further.model), adapter_tensors(trainer.model)
    first = next(iter(ours))
    assert not torch.equal(ours[first], theirs[first])
    further.save_model()
    assert not (tmp_path / "ref").exists(), "TRL's copy of the start"


def test_the_export_command_writes_base_and_adapter(run, tmp_path, capsys):
    trainer, *_ = run
    export_checkpoint(trainer.model, tmp_path / "ours", trainer.processing_class)
    folder = tmp_path / "theirs"
    assert run_export(trainer.args.output_dir, folder) == 0
    command = f"vllm serve {folder} --enable-lora --lora-modules adapter={folder}/adapter"
    assert command in capsys.readouterr().out
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert_equal(load_file(folder / name), load_file(tmp_path / "ours" / name))


@pytest.mark.parametrize("scheme", ["w4a16", ADAPTED_PLAN], ids=["w4a16", "other formats"])
def test_a_low_bit_start_equals_a_start_from_masters(base, tmp_path, scheme):
    options = {"bf16": False, "max_steps": 2, "scheme": scheme}
    masters = make(base, tmp_path / "masters", peft_config=lora(), **options)
    masters.train()
    export_checkpoint(masters.model, tmp_path / "int4", masters.processing_class)
    masters.save_model()
    assert run_export(masters.args.output_dir, tmp_path / "again") == 0
    assert_equal(*(load_file(tmp_path / name / "model.safetensors") for name in ("int4", "again")))
    low_bit = make(str(tmp_path / "int4"), tmp_path / "low_bit", peft_config=lora(), **options)
    assert low_bit.swap_report.master_bytes == 0
    assert low_bit.swap_report.low_bit_bytes == masters.swap_report.low_bit_bytes
    low_bit.train()
    assert_equal(adapter_tensors(low_bit.model), adapter_tensors(masters.model))
    assert low_bit.policy.record() == masters.policy.record()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"scheme": "w8a8"}, "scheme='w8a8'"),
        ({"group_size": 64}, "scheme='w4a16'"),
        ({"bf16": True}, r"scales in torch.float32; this run .*scales in torch.bfloat16"),
        ({"exclude_modules": ["o_proj"]}, "exclude_modules="),
        ({"quantize_learner": False}, "quantize_learner=False"),
    ],
)
def test_a_low_bit_checkpoint_of_another_kind_is_refused(export, tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(export, tmp_path, peft_config=lora(), **({"bf16": False} | kwargs))


def test_plain_lora_of_the_baseline_equals_stock_trl_bit_for_bit(base, tmp_path):
    options = {"bf16": False, "optim": "adamw_torch", "loss_type": "grpo", "max_steps": 2}
    # Padded and shuffled as in TRL.
    options |= {"model_init_kwargs": {"attn_implementation": "eager"}, "keep_groups": False}
    ours = make(base, tmp_path / "ours", peft_config=lora(), scheme="bf16", **options)
    ours.train()
    stock = train_stock(base, tmp_path / "stock", lora(), **options)
    assert_equal(adapter_tensors(ours.model), adapter_tensors(stock.model))


def test_muon_leaves_the_factors_of_an_adapter_to_adamw(base, tmp_path):
    muon = make(base, tmp_path, peft_config=lora(), max_steps=2, optim="muon")
    muon.train()
    adamw = make(base, tmp_path, peft_config=lora(), max_steps=2, optim="adamw_torch")
    adamw.train()
    assert list(muon.optimizer.optimizer.parts) == ["adamw"]
    ours, theirs = adapter_tensors(muon.model), adapter_tensors(adamw.model)
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-7) for name in ours)


def test_a_learner_in_high_precision_keeps_its_masters(base, tmp_path):
    trainer = make(base, tmp_path, peft_config=lora(), quantize_learner=False, max_steps=1)
    trainer.train()
    assert not any(layer.is_frozen or layer.weight.requires_grad for layer in quantized_layers(trainer.model).values())
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    assert row["mismatch/abs_logp_mean"] > 0.001 and "quant/code_flip_rate" not in row and row["quant/sqnr"] > 10


def test_trls_example_runs_with_the_two_names_changed(base, tmp_path, caplog):
    # https://huggingface.co/docs/trl/peft_integration, its `...` filled in.
    peft_config = peft.LoraConfig(r=32, lora_alpha=16, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")
    training_args = QaRLConfig(str(tmp_path), **(TRAINING | {"learning_rate": 1.0e-5, "max_steps": 1}))
    trainer = QaRLTrainer(
        model=base, reward_funcs=spread, args=training_args, train_dataset=make_problems(), peft_config=peft_config
    )
    trainer.train()
    assert "lora_dropout=0.05 is switched off" in caplog.text
    assert len(adapter_tensors(trainer.model)) == 2 * 2 * 2, "PEFT's default: q_proj and v_proj"


def test_a_mixtures_adapter_trains_on_frozen_experts(tmp_path):
    model = make_tiny_model(tmp_path, "qwen3_moe", **EXPERTS)
    with pytest.raises(ValueError, match="'all-linear'"):
        make(model, tmp_path / "all", peft_config=lora())
    trainer = make(model, tmp_path / "run", peft_config=lora(target_modules=["q_proj", "v_proj"]), max_steps=1)
    layers = quantized_layers(trainer.model)
    assert all(layer.is_frozen for layer in layers.values()) and "model.layers.1.mlp.experts" in layers
    before = base_of(trainer.model)
    trainer.train()
    assert_equal(base_of(trainer.model), before)
    assert any(p.any() for name, p in trainer.model.named_parameters() if "lora_B" in name)
    # The export's base is one to start from, and is known to be the same.
    trainer.export_model(tmp_path / "export")
    again = make(str(tmp_path / "export"), tmp_path / "again", peft_config=lora(target_modules=["q_proj", "v_proj"]))
    assert again.policy.record()["base"] == trainer.policy.record()["base"]
    assert base_of(again.model).keys() == before.keys()
