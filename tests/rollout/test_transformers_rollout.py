import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import logged, make_tiny_tokenizer, make_trainer
from trl_qarl.quantization.gemm import has_fast_bf16
from trl_qarl.rollout.transformers_rollout import record_sampling_logps


def test_generation_configuration_of_the_model_does_not_reach_the_rollout(tiny_model, tmp_path):
    theirs = {"do_sample": True, "min_p": 0.5, "typical_p": 0.5, "top_k": 2, "suppress_tokens": [5, 6, 7, 8]}
    rollouts = []
    for name, own in (("plain", {}), ("own", theirs)):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        model.generation_config.update(**own)
        model.save_pretrained(tmp_path / name)
        make_tiny_tokenizer().save_pretrained(tmp_path / name)
        trainer = make_trainer(str(tmp_path / name), tmp_path, bf16=False)
        torch.manual_seed(0)
        rollouts.append(trainer._generate_single_turn([[5, 6, 7]] * 4, None, {}, 1))
        # What is saved for inference stays the model's.
        assert {key: getattr(trainer.model.generation_config, key) for key in own} == own
    assert rollouts[0] == rollouts[1]


def test_rollout_runs_the_output_head_in_float32_as_the_learner_does_if_asked_to(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, bf16=True, cast_lm_head_to_fp32=True, max_steps=1, scheme="bf16")
    trainer.train()
    if has_fast_bf16():
        # Elsewhere the layers below the head round one row otherwise than many, by 2e-4 nats.
        assert logged(trainer, "mismatch/abs_logp_mean")[0] < 1e-6
    with trainer.accelerator.autocast(), torch.no_grad():
        logits = trainer.model(torch.tensor([[5, 6, 7]])).logits
    assert not torch.equal(logits, logits.bfloat16().float())


def test_a_generate_of_the_instance_comes_back(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    own = model.generate
    model.generate = own
    with record_sampling_logps(model, 1.0) as recorded:
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=3)
    assert vars(model)["generate"] is own and recorded[0].shape == (1, 3)


def test_a_generate_that_ignores_logits_processors_is_named(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    generate = model.generate
    model.generate = lambda *args, logits_processor, **kwargs: generate(*args, **kwargs)
    with pytest.raises(TypeError, match="`logits_processor`"), record_sampling_logps(model, 1.0):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=3)
