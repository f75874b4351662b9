"""Pushes of the trainer, by the real client of the Hub to a stand-in for it."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing_utils import make_trainer


def local_files(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_push_to_hub_uploads_the_low_bit_policy_which_loads_by_name(tiny_model, tmp_path, hub):
    trainer = make_trainer(tiny_model, tmp_path / "run", max_steps=2, hub_model_id="policy")
    trainer.train()
    trainer.push_to_hub()
    assert list(hub.repos) == ["someone/policy"]
    files = hub.files("someone/policy")
    assert {k: v for k, v in files.items() if k != ".gitattributes"} == local_files(tmp_path / "run" / "w4a16")
    inputs = AutoTokenizer.from_pretrained("someone/policy")("23 + 8 =", return_tensors="pt")
    pushed = AutoModelForCausalLM.from_pretrained("someone/policy", dtype=torch.float32)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "w4a16", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(pushed(**inputs).logits, exported(**inputs).logits)
