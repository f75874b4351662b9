"""LoRA on a base that bitsandbytes holds in 4 bits, which is QLoRA as in TRL."""

from importlib.util import find_spec

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from testing_utils import logged
from testing_utils.trainings import lora
from testing_utils.trainings import make as make_trainer
from trl_qarl.adapters.tensors import adapter_tensors
from trl_qarl.checkpoint.export import export_checkpoint


peft = pytest.importorskip("peft")
pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def make(model, output_dir, has_adapter=True, **kwargs):
    options = {"bf16": False, "scheme": "bf16", "learning_rate": 1e-2} | kwargs
    return make_trainer(model, output_dir, peft_config=lora() if has_adapter else None, **options)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_only_the_adapter_moves_and_rollouts_are_the_learners(tiny_model, tmp_path, is_loaded):
    quantization_config = BitsAndBytesConfig(**NF4)
    if is_loaded:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=quantization_config)
        trainer = make(model, tmp_path, beta=0.1)
    else:
        trainer = make(tiny_model, tmp_path, quantization_config=quantization_config, beta=0.1)
    base = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trained = {name: p.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert sum(p.dtype is torch.uint8 for p in base.values()) == 14
    assert {p.dtype for p in trained.values()} == {torch.float32}
    trainer.train()
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(now[name], p) for name, p in base.items())
    assert all(not torch.equal(now[name], p) for name, p in trained.items())
    # Token by token with a cache, and at once: in float32 only the order of summation differs.
    assert max(logged(trainer, "mismatch/abs_logp_max")) < 1e-5
    assert logged(trainer, "kl")[0] == 0 and logged(trainer, "kl")[-1] > 0
    trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").is_file()
    with pytest.raises(ValueError, match="has no export"):
        export_checkpoint(trainer.model, tmp_path / "export")


def test_a_saved_adapter_is_trained_on_from_its_folder_on_the_same_4_bits_and_without_rounding(tiny_model, tmp_path):
    quantization_config = BitsAndBytesConfig(**NF4)
    first = make(tiny_model, tmp_path / "first", quantization_config=quantization_config)
    first.train()
    first.save_model(str(tmp_path / "adapter"))
    folder = str(tmp_path / "adapter")
    second = make(folder, tmp_path / "second", has_adapter=False, quantization_config=quantization_config)
    assert second.policy.record() == first.policy.record()
    assert sum(p.dtype is torch.uint8 for p in second.model.parameters()) == 14
    ours, theirs = adapter_tensors(second.model), adapter_tensors(first.model)
    assert any(not torch.equal(t, t.bfloat16().float()) for t in theirs.values())
    assert all(torch.equal(ours[name], t) for name, t in theirs.items())
    with pytest.raises(ValueError, match="was trained over another low-bit base"):
        make(folder, tmp_path / "third", has_adapter=False)


@pytest.mark.slow
def test_a_run_is_resumed_as_if_it_had_not_ended_and_its_adapter_pushed(tiny_model, tmp_path, hub):
    quantization_config = BitsAndBytesConfig(**NF4)
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = make(tiny_model, tmp_path / "whole", quantization_config=quantization_config, **saving)
    whole.train()
    pushing = {"hub_export": "adapter", "hub_model_id": "someone/adapter"}
    resumed = make(tiny_model, tmp_path / "resumed", quantization_config=quantization_config, **pushing)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    ours, theirs = adapter_tensors(resumed.model), adapter_tensors(whole.model)
    assert resumed.state.global_step == 4 and all(torch.equal(ours[name], t) for name, t in theirs.items())

    resumed.push_to_hub()
    files = hub.files("someone/adapter")
    assert load(files["adapter_model.safetensors"]).keys() == ours.keys()
    base = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=quantization_config)
    pushed = peft.PeftModel.from_pretrained(base, snapshot_download("someone/adapter"))
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(pushed.eval()(tokens).logits, resumed.model.eval()(tokens).logits)


def test_the_low_bit_policy_of_a_4_bit_base_is_not_pushed(tiny_model, tmp_path, hub):
    trainer = make(tiny_model, tmp_path, quantization_config=BitsAndBytesConfig(**NF4), hub_model_id="someone/policy")
    with pytest.raises(ValueError, match="has no export"):
        trainer.push_to_hub()


@pytest.mark.parametrize(
    ("config", "options", "match"),
    [
        (NF4, {"has_adapter": False}, "`peft_config`"),
        (NF4, {"scheme": "w4a16"}, "scheme='w4a16'"),
        (NF4, {"use_vllm": True}, "use_vllm=True"),
        ({"load_in_8bit": True}, {}, "load_in_4bit=True"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(tmp_path, config, options, match):
    with pytest.raises(ValueError, match=match):
        make("no such model", tmp_path, quantization_config=BitsAndBytesConfig(**config), **options)


def test_a_loaded_4_bit_model_without_an_adapter_is_refused(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=BitsAndBytesConfig(**NF4))
    with pytest.raises(ValueError, match=r"no adapter is not supported: 4-bit weights take no gradient"):
        make(model, tmp_path, has_adapter=False)
