"""LoRA on a base that bitsandbytes holds in 4 bits, which is QLoRA as in TRL."""

from importlib.util import find_spec

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from testing_utils import logged
from testing_utils.layers import logits
from testing_utils.trainings import assert_equal, lora
from testing_utils.trainings import make as make_trainer
from trl_qarl.adapters.tensors import adapter_tensors
from trl_qarl.checkpoint.export import export_checkpoint


peft = pytest.importorskip("peft")
pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def make(model, output_dir, has_adapter=True, bits=NF4, **kwargs):
    options = {"bf16": False, "scheme": "bf16", "learning_rate": 1e-2} | kwargs
    options["quantization_config"] = bits and BitsAndBytesConfig(**bits)
    return make_trainer(model, output_dir, peft_config=lora() if has_adapter else None, **options)


def load_base(path):
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=BitsAndBytesConfig(**NF4))


@pytest.mark.parametrize("is_loaded", [False, True])
def test_only_the_adapter_moves_and_rollouts_are_the_learners(tiny_model, tmp_path, is_loaded):
    model, bits = (load_base(tiny_model), None) if is_loaded else (tiny_model, NF4)
    trainer = make(model, tmp_path, bits=bits, beta=0.1)
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


def test_a_saved_adapter_trains_on_without_rounding(tiny_model, tmp_path):
    first = make(tiny_model, tmp_path / "first")
    first.train()
    first.save_model(str(tmp_path / "adapter"))
    folder = str(tmp_path / "adapter")
    second = make(folder, tmp_path / "second", has_adapter=False)
    assert second.policy.record() == first.policy.record()
    assert sum(p.dtype is torch.uint8 for p in second.model.parameters()) == 14
    ours, theirs = adapter_tensors(second.model), adapter_tensors(first.model)
    assert any(not torch.equal(t, t.bfloat16().float()) for t in theirs.values())
    assert_equal(ours, theirs)
    with pytest.raises(ValueError, match="was trained over another low-bit base"):
        make(folder, tmp_path / "third", has_adapter=False, bits=None)


@pytest.mark.slow
def test_a_resumed_run_equals_a_whole_one_and_pushes(tiny_model, tmp_path, hub):
    whole = make(tiny_model, tmp_path / "whole", save_strategy="steps", save_steps=2)
    whole.train()
    resumed = make(tiny_model, tmp_path / "resumed", hub_model_id="someone/adapter")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    ours, theirs = adapter_tensors(resumed.model), adapter_tensors(whole.model)
    assert resumed.state.global_step == 4
    assert_equal(ours, theirs)

    resumed.push_to_hub()
    files = hub.repos["someone/adapter"].files
    assert "training_args.bin" not in files and load(files["adapter_model.safetensors"]).keys() == ours.keys()
    pushed = peft.PeftModel.from_pretrained(load_base(tiny_model), snapshot_download("someone/adapter"))
    assert torch.equal(logits(pushed.eval()), logits(resumed.model.eval()))


@pytest.mark.parametrize(
    ("bits", "options", "match"),
    [
        (NF4, {"has_adapter": False}, "`peft_config`"),
        (NF4, {"scheme": "w4a16"}, "scheme='w4a16'"),
        (NF4, {"use_vllm": True}, "use_vllm=True"),
        ({"load_in_8bit": True}, {}, "load_in_4bit=True"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(tmp_path, bits, options, match):
    with pytest.raises(ValueError, match=match):
        make("no such model", tmp_path, bits=bits, **options)


def test_a_loaded_4_bit_model_without_an_adapter_is_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"no adapter is not supported: 4-bit weights take no gradient"):
        make(load_base(tiny_model), tmp_path, has_adapter=False, bits=None)
