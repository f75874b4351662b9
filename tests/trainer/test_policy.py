"""The model that is trained, with a trainer and without."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from testing_utils import make_problems, make_tiny_config, make_trainer
from testing_utils.trainings import SIGNED
from trl_qarl import QaRLConfig
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.quantization.swap import quantized_layers, restore_model
from trl_qarl.trainer.policy import Policy


def test_a_model_that_lost_layers_or_bits_is_not_trained(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path / "out")
    trainer.model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="The masters are bfloat16"):
        trainer.train()
    restore_model(trainer.model.float())
    for act in (trainer.train, trainer.export_model):
        with pytest.raises(ValueError, match="The model has no quantized layers"):
            act()


def test_a_policy_needs_no_trainer(tiny_model, tmp_path):
    args = QaRLConfig(str(tmp_path), use_cpu=True, bf16=False, scheme="w8a16", exclude_modules=["o_proj"])
    policy = Policy(args)
    model = policy.load(tiny_model)
    policy.prepare(model)
    assert model.dtype == policy.dtype == torch.float32 and policy.numerics == "fast"
    assert policy.record() == {
        "scheme": "w8a16",
        "quantize_learner": True,
        "group_size": None,
        "exclude_modules": ["o_proj"],
        "scale_dtype": "float32",
    }
    assert policy.card_facts()["loss_type"] == "tbpo" and "group_size" not in policy.card_facts()
    assert policy.describe() == {"model": tiny_model, "numerics": "fast"}
    folder = policy.export(tmp_path / "w8a16", AutoTokenizer.from_pretrained(tiny_model), card={})
    assert "quantization_config" in json.loads((folder / "config.json").read_text())


LOW_BIT = {"targets": ["Linear"], "weights": SCHEMES["w4a16"].weight_args(128)}
LOW_BIT = {"quant_method": "compressed-tensors", "config_groups": {"group_0": LOW_BIT}}


@pytest.mark.vllm
@pytest.mark.parametrize("fields", [{}, {"quantization_config": LOW_BIT}], ids=["masters", "low bits"])
def test_a_class_that_vllm_cannot_run_is_named_without_weights(tmp_path, fields):
    config = make_tiny_config("doge", architectures=["DogeForCausalLM"], **fields)
    config.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="use_vllm=True: the installed vLLM has no class DogeForCausalLM"):
        make_trainer(str(tmp_path / "model"), tmp_path / "out", use_vllm=True, vllm_mode="colocate", bf16=False)


def test_evaluation_and_export_have_the_bits_of_the_scheme(tiny_model, tmp_path):
    options = {"scheme": SIGNED[4], "group_size": 32, "precisions": [3, 2], "steps_per_generation": 2, "max_steps": 3}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "bf16": False}
    trainer = make_trainer(tiny_model, tmp_path, eval_dataset=make_problems(4), beta=0.1, **options)
    seen, generate = [], trainer._generate_and_score_completions

    def note(inputs):
        models = (trainer.model, trainer.ref_model)
        seen.append((trainer.model.training, *({x.scheme.name for x in quantized_layers(m).values()} for m in models)))
        return generate(inputs)

    trainer._generate_and_score_completions = note
    trainer.train()
    train, evaluate = ([schemes for mode, *schemes in seen if mode == wanted] for wanted in (True, False))
    assert train == [[{SIGNED[3]}] * 2, [{SIGNED[2]}] * 2]
    assert evaluate and all(schemes == [{SIGNED[4]}] * 2 for schemes in evaluate)
    history = trainer.state.log_history
    # Evaluations within a batch leave it as it was.
    assert [row["quant/bits"] for row in history if "quant/bits" in row] == [3, 2]
    assert max(row["eval_mismatch/abs_logp_mean"] for row in history if "eval_mismatch/abs_logp_mean" in row) < 1e-6
    # As a push within a batch exports it.
    assert trainer.policy.precision is None
    trainer.set_precision(2)
    exported = load_file(trainer.export_model(tmp_path / "export") / "model.safetensors")
    assert trainer.policy.precision == 2
    trainer.set_precision(None)
    for name, layer in quantized_layers(trainer.model).items():
        assert layer.scheme.name == SIGNED[4]
        assert torch.equal(
            exported[f"{name}.weight_packed"], layer.low_bit_weight().checkpoint_tensors()["weight_packed"]
        )
