"""The learner's forward counts positions as a rollout does."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from testing_utils.trainings import make
from trl_qarl.forward import scoring_forward


@pytest.mark.parametrize("objective", ["tbpo", "grpo"])
def test_scoring_and_loss_count_positions_from_the_first_token(tiny_model, tmp_path, objective):
    prompts = Dataset.from_dict({"prompt": ["1 + " * (1 + i % 4) for i in range(16)]})
    trainer = make(
        tiny_model, tmp_path, train_dataset=prompts, objective=objective, beta=0.1, max_steps=1, num_generations=2
    )
    seen = []

    def note(name):
        def hook(module, args, kwargs):
            if kwargs.get("fused_lm_head"):
                seen.append((name, torch.is_grad_enabled()))
                for positions, mask in zip(kwargs["position_ids"], kwargs["attention_mask"], strict=True):
                    first = mask.tolist().index(1)
                    count = int(mask.sum())
                    assert positions[first : first + count].tolist() == list(range(count))
                    padded.append(first)

        return hook

    padded: list[int] = []
    trainer.model.register_forward_pre_hook(note("policy"), with_kwargs=True)
    trainer.ref_model.register_forward_pre_hook(note("reference"), with_kwargs=True)
    trainer.train()
    assert set(seen) == {("policy", False), ("policy", True), ("reference", False)} and len(set(padded)) > 1


def test_a_model_that_counts_positions_itself_is_left_to_it(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    inputs = {"attention_mask": torch.tensor([[0, 1, 1]])}
    assert scoring_forward(dict, model)(**inputs)["position_ids"].tolist() == [[0, 0, 1]]
    model.config.get_text_config = lambda: object()
    assert scoring_forward(dict, model)(**inputs).keys() == {"attention_mask"}
